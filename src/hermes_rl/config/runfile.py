"""A run's configuration: built from profile and overrides, checked, written as the run's YAML."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_rl.config.catalogue import (
    FIELDS,
    CatalogueField,
    check_value,
    find_field,
    names_own_field,
    names_secret,
    own_key,
    without_secrets,
)
from hermes_rl.config.profiles import DEFAULT_PROFILE, find_profile
from hermes_rl.config.sections import EnvSection, OpenAISection, RunSection, TinkerSection
from hermes_rl.config.workspace import checked_name
from hermes_rl.errors import ConfigError


class EnvironmentReference(Protocol):
    """What a configuration needs to know of an environment; discovery's result has it."""

    @property
    def name(self) -> str: ...
    @property
    def file_path(self) -> Any: ...
    @property
    def class_name(self) -> str: ...


class RunConfig(BaseModel):
    """Everything that one run is told, in the sections of its YAML.

    No URL with a capability and no key of ours is ever part of it: those reach the processes of the run as
    environment variables. A key that an environment's own field holds is; only the run's YAML says it.
    """

    model_config = ConfigDict(extra="forbid")

    run: RunSection = Field(default_factory=RunSection)
    env: EnvSection = Field(default_factory=EnvSection)
    openai: list[OpenAISection] = Field(default_factory=lambda: [OpenAISection()], min_length=1)
    tinker: TinkerSection = Field(default_factory=TinkerSection)
    slurm: bool = False
    testing: bool = False

    def value(self, name: str) -> Any:
        """The value of a catalogue field, or of the environment's own, by what it is set by."""
        if names_own_field(name):
            return (self.env.model_extra or {}).get(name.rpartition(".")[2])
        field = FIELDS[name]
        section = self.openai[0] if field.section == "openai" else getattr(self, field.section)
        return getattr(section, name)

    def shown(self) -> dict[str, Any]:
        """All of it as plain data to be shown, the environment's own secrets replaced by ``<secret>``."""
        data = self.model_dump(mode="json")
        return data | {"env": without_secrets(data["env"])}

    def secrets(self) -> list[str]:
        """The values of the environment's own fields that are, by their names, for keys and passwords."""
        own = self.env.model_extra or {}
        return [str(value) for name, value in own.items() if value and names_secret(own_key(name))]

    def to_yaml(self, path: Path) -> None:
        """Write the configuration atomically, readable by its owner only."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_private(path, text)

    @classmethod
    def from_yaml(cls, path: Path) -> RunConfig:
        """Read a configuration that :meth:`to_yaml` wrote.

        Raises:
            ConfigError: the file is missing, is not YAML, or holds something that is not allowed.
        """
        try:
            return cls.model_validate(read_yaml_mapping(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{path}: {where}: {first['msg']}.") from error


def write_private(path: Path, text: str) -> None:
    """Write a file atomically with mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a mapping of fields to values.")
    return data


def new_run_id(now: datetime | None = None) -> str:
    """A fresh run id: UTC time and four random hexadecimal digits, sortable by age."""
    return f"{(now or datetime.now(UTC)):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def read_overrides(path: Path) -> dict[str, Any]:
    """Overrides from a YAML file: flat (``learning_rate: 6e-5``) or by section.

    Args:
        path: a file such as the ``best.yaml`` of a search, or a run's own ``run.yaml``.

    Returns:
        Field name → value, unchecked.

    Raises:
        ConfigError: the file cannot be read or is not a mapping.
    """
    overrides: dict[str, Any] = {}
    for name, value in read_yaml_mapping(path).items():
        if name == "openai" and isinstance(value, list):
            value = value[0] if value else {}
        if name == "run":
            continue
        if name in ("env", "openai", "tinker") and isinstance(value, dict):
            for inner, given in value.items():
                # A field of the environment's own may share its name with one of another section.
                known = FIELDS.get(inner)
                overrides[inner if known is None or known.section == name else f"{name}.{inner}"] = given
        elif name not in ("slurm", "testing"):
            overrides[name] = value
    return overrides


def build_run_config(
    environment: EnvironmentReference,
    *,
    profile: str = DEFAULT_PROFILE,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    run_id: str | None = None,
    own_fields: Callable[[], Iterable[CatalogueField]] | None = None,
) -> RunConfig:
    """A complete, checked configuration: catalogue defaults, then the profile's, then ``overrides``.

    Args:
        environment: the environment to train on.
        profile: name of the model profile.
        overrides: field name (bare or sectioned) → value.
        seed: the run's seed.
        run_id: id of the run; a new one when None.
        own_fields: gives the environment's own fields. Called only when an override is not in the
            catalogue, because it must import the environment (in a child process).

    Raises:
        ConfigError: an unknown profile or field, a value out of its bounds, or fields that contradict
            each other.
    """
    values: dict[str, Any] = dict(find_profile(profile).values)
    own: dict[str, CatalogueField] = {}
    unknown = [name for name in overrides or {} if names_own_field(name)]
    if unknown and own_fields is not None:
        own = {field.name: field for field in own_fields()}
    own_values: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        field = find_field(name, own)
        if field.section == "run":
            raise ConfigError(
                f"{field.name} is set when the run is created and cannot be overridden.",
                hint="`hermes-rl run start --seed N` sets it; an environment's own seed follows it."
                if field.name == "seed"
                else None,
            )
        (own_values if field.own else values)[field.name] = check_value(field, value)
    run_id = checked_name(run_id or new_run_id())
    if values.get("wandb_name") is None:
        values["wandb_name"] = f"{environment.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    by_section: dict[str, dict[str, Any]] = {"env": own_values, "openai": {}, "tinker": {}}
    for name, value in values.items():
        by_section[FIELDS[name].section][name] = value
    config = RunConfig(
        run=RunSection(
            run_id=run_id,
            environment=environment.name,
            environment_file=str(environment.file_path),
            environment_class=environment.class_name,
            profile=profile,
            seed=check_value(FIELDS["seed"], seed),
        ),
        env=EnvSection(**by_section["env"]),
        openai=[OpenAISection(**by_section["openai"])],
        tinker=TinkerSection(**by_section["tinker"]),
    )
    check_together(config)
    return config


def check_together(config: RunConfig) -> None:
    """Check what only several fields together can violate.

    Raises:
        ConfigError: names the fields, what must hold and what to change.
    """
    env, tinker = config.env, config.tinker
    if env.group_size > env.batch_size:
        raise ConfigError(
            f"group_size ({env.group_size}) is larger than batch_size ({env.batch_size}).",
            allowed="group_size <= batch_size",
            hint="A batch is made of whole groups: raise batch_size or lower group_size.",
        )
    if env.batch_size % env.group_size:
        raise ConfigError(
            f"batch_size ({env.batch_size}) is not a multiple of group_size ({env.group_size}).",
            allowed=f"a multiple of {env.group_size}",
            hint="A batch is made of whole groups.",
        )
    if env.max_token_length > tinker.max_token_trainer_length:
        raise ConfigError(
            f"max_token_length ({env.max_token_length}) is larger than "
            f"max_token_trainer_length ({tinker.max_token_trainer_length}).",
            allowed="max_token_length <= max_token_trainer_length",
            hint="The trainer would drop what the environment produces.",
        )
