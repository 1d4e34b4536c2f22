"""The operator's policy: what an agent may change, within which bounds, and what is fixed for it.

The policy is a TOML file that only the operator writes: ``$HERMES_RL_POLICY``, else ``policy.toml`` in the
workspace. The agent-facing functions read it at every call and have no way to change it. The operator's
own commands (``hermes-rl run``, ``hermes-rl search``) are not bound by it.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hermes_rl.config.catalogue import (
    FIELDS,
    HIDDEN,
    CatalogueField,
    check_value,
    find_field,
    names_secret,
)
from hermes_rl.config.profiles import DEFAULT_PROFILE, find_profile
from hermes_rl.config.workspace import Workspace
from hermes_rl.errors import ConfigError

POLICY_VARIABLE = "HERMES_RL_POLICY"
POLICY_FILE = "policy.toml"

_INFRASTRUCTURE = re.compile(r"(^|_)(url|uri|host|port|path|paths|dir|dirs|directory|file|files|folder)$")

Source = Literal["default", "profile", "policy", "edit"]
"""Where the value in force came from."""


def holds_secret(field: CatalogueField) -> bool:
    """Whether an environment's own field is, by its name, for a key or a password."""
    return field.own and names_secret(field.key)


def locked_by_nature(field: CatalogueField) -> bool:
    """Whether a field is the operator's unless a policy says otherwise.

    The catalogue says it for its own fields. Of an environment's own, those are that are named for a secret,
    an address or a place in the file system.
    """
    named = field.own and _INFRASTRUCTURE.search(field.name.lower()) is not None
    return field.locked or named or holds_secret(field)


class FieldRule(BaseModel):
    """What the operator says about one field.

    Attributes:
        locked: whether the agent may not change it. Without it a field with a ``value`` is locked, any
            other field is as :func:`locked_by_nature` has it.
        value: the value in force until the agent edits the field, in place of the profile's.
        minimum, maximum: narrower bounds of a number.
        choices: the only values allowed.
    """

    model_config = ConfigDict(extra="forbid")

    locked: bool | None = None
    value: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: list[Any] | None = Field(default=None, min_length=1)

    @property
    def fixes(self) -> bool:
        """Whether the rule gives a value."""
        return "value" in self.model_fields_set

    def applied_to(self, field: CatalogueField) -> CatalogueField:
        """The field as the rule leaves it.

        Raises:
            ConfigError: the rule contradicts the field or itself.
        """
        if field.section == "run" and field.name != "seed":
            raise ConfigError(f"{field.name} is set when a run is created; a policy cannot change it.")
        changes: dict[str, Any] = {}
        numeric = field.type in ("int", "float")
        for name, exclusive in (("minimum", "exclusive_minimum"), ("maximum", "exclusive_maximum")):
            bound = getattr(self, name)
            if bound is None:
                continue
            if not numeric:
                raise ConfigError(
                    f"{field.name} is not a number, so it has no {name}.", hint="Use choices instead."
                )
            if bound == getattr(field, name) and getattr(field, exclusive):
                continue
            changes |= {name: check_value(field, bound), exclusive: False}
        narrowed = replace(field, **changes)
        if (
            narrowed.minimum is not None
            and narrowed.maximum is not None
            and narrowed.minimum > narrowed.maximum
        ):
            raise ConfigError(f"{field.name}: the minimum is above the maximum.")
        if self.choices is not None:
            checked = tuple(check_value(narrowed, choice) for choice in self.choices)
            narrowed = replace(narrowed, choices=checked)
        if self.fixes:
            check_value(narrowed, self.value)
        locked = self.locked if self.locked is not None else (self.fixes or locked_by_nature(field))
        return replace(narrowed, locked=locked)


class ModelEndpoint(BaseModel):
    """A model that ``rl_test_inference`` may be pointed at, by the name of its table.

    Attributes:
        base_url: an OpenAI-compatible endpoint, ending in ``/v1``.
        model_name: name of the model there.
        api_key_env: environment variable that holds the key; the key itself is never in the file.
        server_type: which of Atropos's clients talks to it.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    base_url: str = Field(pattern=r"^https?://")
    model_name: str
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    server_type: Literal["openai", "sglang", "vllm"] = "openai"


class Policy(BaseModel):
    """Everything in a policy file. An empty policy leaves the catalogue as it is.

    Attributes:
        profile: profile of the agent's runs unless it chooses another.
        profiles: profiles the agent may choose from; without it only ``profile``.
        environment: environment selected when the agent selects none.
        environments: shell patterns of the environments the agent sees.
        fields: catalogue field → rule.
        own_fields: environment → its own field → rule.
        models: name → endpoint for ``rl_test_inference``.
    """

    model_config = ConfigDict(extra="forbid")

    profile: str = DEFAULT_PROFILE
    profiles: list[str] = []
    environment: str | None = None
    environments: list[str] = Field(default=["*"], min_length=1)
    fields: dict[str, FieldRule] = {}
    own_fields: dict[str, dict[str, FieldRule]] = {}
    models: dict[str, ModelEndpoint] = {}

    @model_validator(mode="after")
    def _names_exist(self) -> Policy:
        for name in (self.profile, *self.profiles):
            find_profile(name)
        self.fields = {find_field(name).name: rule for name, rule in self.fields.items()}
        for name in self.fields:
            self.field(FIELDS[name])
        return self

    @property
    def allowed_profiles(self) -> list[str]:
        """The profiles that the agent may choose from."""
        return list(dict.fromkeys([self.profile, *self.profiles]))

    def allows_environment(self, name: str) -> bool:
        """Whether the agent sees the environment of that name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.environments)

    def check_environments(self, names: Iterable[str]) -> None:
        """Refuse a policy that speaks of environments that there are not.

        Args:
            names: every environment that was found.

        Raises:
            ConfigError: it selects one, or has rules for one, that is not among them, or it selects one that
                it hides.
        """
        known = sorted(names)
        unknown = [name for name in self.own_fields if name not in known]
        if unknown:
            raise ConfigError(
                f"The policy has rules under [own_fields.{unknown[0]}], and there is no such environment.",
                allowed=difflib.get_close_matches(unknown[0], known) or known,
                hint="Rules that name no environment would bind nothing: put the name right.",
            )
        if self.environment is not None and self.environment not in known:
            raise ConfigError(
                f"The policy selects the environment {self.environment!r}, and there is none of that name.",
                allowed=difflib.get_close_matches(self.environment, known) or known,
            )
        if self.environment is not None and not self.allows_environment(self.environment):
            raise ConfigError(
                f"The policy selects the environment {self.environment!r} and hides it from the agent.",
                hint="Add it to environments.",
            )

    def rule(self, field: CatalogueField, environment: str | None = None) -> FieldRule:
        """The rule for a field; an empty one when the policy says nothing."""
        rules = self.own_fields.get(environment or "", {}) if field.own else self.fields
        return rules.get(field.name) or FieldRule()

    def field(self, field: CatalogueField, environment: str | None = None) -> CatalogueField:
        """The field with its rule applied.

        Raises:
            ConfigError: the rule contradicts the field.
        """
        return self.rule(field, environment).applied_to(field)


def policy_path(workspace: Workspace) -> Path:
    """Where the workspace's policy is, whether or not there is one."""
    chosen = os.environ.get(POLICY_VARIABLE)
    return Path(chosen).expanduser() if chosen else workspace.root / POLICY_FILE


def load_policy(workspace: Workspace) -> Policy:
    """The policy in force; an empty one when there is no file.

    Raises:
        ConfigError: the file that ``$HERMES_RL_POLICY`` names is missing, or the file cannot be read or
            says something that is not allowed.
    """
    path = policy_path(workspace)
    if not path.exists() and POLICY_VARIABLE not in os.environ:
        return Policy()
    return read_policy(path)


def read_policy(path: Path) -> Policy:
    """The policy in a file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or says something that is not allowed.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The policy {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The policy {path} is not valid TOML: {error}.") from error
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"The policy {path}: {where}: {first['msg']}.", hint="docs/configuration.md describes the file."
        ) from error
    except ConfigError as error:
        raise ConfigError(
            f"The policy {path}: {error.message}", allowed=error.allowed, hint=error.hint
        ) from error


@dataclass(frozen=True)
class FieldInForce:
    """One field as it stands for the next run.

    Attributes:
        field: with the policy's rule applied.
        value: what a run started now would get.
        default: what it would get without edits.
        source: where ``value`` came from.
    """

    field: CatalogueField
    value: Any
    default: Any
    source: Source


def fields_in_force(
    profile: str,
    policy: Policy,
    *,
    environment: str | None = None,
    own_fields: Iterable[CatalogueField] | None = None,
    edits: Mapping[str, Any] | None = None,
) -> dict[str, FieldInForce]:
    """Every field that a run can be told, with the value in force.

    Args:
        profile: name of the profile.
        policy: the operator's policy.
        environment: name of the environment, for the rules about its own fields.
        own_fields: the environment's own fields; None when they are not known, and then the rules about
            them are not looked at.
        edits: field name → value, already checked.

    Raises:
        ConfigError: there is no such profile, the policy contradicts a field, names one that the environment
            does not have, or leaves the default outside its own bounds.
    """
    profile_values = find_profile(profile).values
    own = [field for field in own_fields or () if field.settable]
    unknown = set(policy.own_fields.get(environment or "", {})) - {field.name for field in own}
    if own_fields is not None and unknown:
        raise ConfigError(
            f"The policy names fields that {environment} does not have: {', '.join(sorted(unknown))}.",
            allowed=sorted(field.name for field in own) or f"{environment} has no fields of its own",
            hint=f"Put it right under [own_fields.{environment}] in the policy file.",
        )
    found: dict[str, FieldInForce] = {}
    for original in [*FIELDS.values(), *own]:
        if original.section == "run" and original.name != "seed":
            continue
        rule = policy.rule(original, environment)
        field = rule.applied_to(original)
        source: Source = "default"
        value = field.default
        if not field.own and field.name in profile_values:
            value, source = profile_values[field.name], "profile"
        if rule.fixes:
            value, source = check_value(field, rule.value), "policy"
        elif replace(field, locked=original.locked) != original and not (field.own and value is None):
            _check_default(field, value)
        default = value
        if edits and field.key in edits:
            value, source = edits[field.key], "edit"
        found[field.key] = FieldInForce(field, value, default, source)
    return found


def _check_default(field: CatalogueField, value: Any) -> None:
    try:
        check_value(field, value)
    except ConfigError as error:
        shown = HIDDEN if holds_secret(field) else repr(value)
        raise ConfigError(
            f"The policy's bounds for {field.key} leave out its default, {shown}.",
            allowed=error.allowed,
            hint="Give the field a value in the policy too.",
        ) from error
