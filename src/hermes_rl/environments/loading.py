"""From a file and a class name to a ready environment object."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.config import RunConfig
from hermes_rl.errors import EnvironmentFailedError


@dataclass(frozen=True)
class Endpoints:
    """Where the environment finds its servers.

    Attributes:
        trajectories_url: base URL of the API server, with its capability.
        inference_url: base URL of the inference endpoint, ending in ``/v1``.
        inference_key: bearer token of the inference endpoint.
    """

    trajectories_url: str
    inference_url: str
    inference_key: str


def load_class(file: Path, class_name: str) -> Any:
    """Import an environment's file and return its class.

    The file is imported as ``python FILE`` would find its neighbours: its folder is put on the path. A file
    inside a package (a folder with ``__init__.py``) is imported under its dotted name, so that relative
    imports work.

    Raises:
        EnvironmentFailedError: the import raised or ended the interpreter, or the class is not there.
    """
    file = file.resolve()
    if not file.is_file():
        raise EnvironmentFailedError(f"The environment's file {file} does not exist.")
    package_parts: list[str] = []
    root = file.parent
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        package_parts.insert(0, root.name)
        root = root.parent
    for folder in dict.fromkeys((str(file.parent), str(root))):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if package_parts and file.stem.isidentifier():
            module = importlib.import_module(".".join([*package_parts, file.stem]))
        else:
            name = f"hermes_rl_environment_{file.stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise EnvironmentFailedError(
            f"Importing {file} ended the interpreter (status {error.code})."
        ) from error
    except Exception as error:
        raise EnvironmentFailedError(f"Importing {file} raised {describe(error)}.") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise EnvironmentFailedError(f"{file} defines no class {class_name}.")
    return found


def build(config: RunConfig, endpoints: Endpoints) -> Any:
    """The environment of a run, seeded and configured.

    Its own ``config_init()`` gives the defaults; the run's ``env`` and ``openai`` sections override them,
    and the URLs come from ``endpoints``.

    Raises:
        EnvironmentFailedError: import, ``config_init``, a refused value, or the constructor.
    """
    import numpy
    from pydantic import ValidationError

    random.seed(config.run.seed)
    numpy.random.seed(config.run.seed)
    cls = load_class(Path(config.run.environment_file), config.run.environment_class)
    try:
        default_config, default_servers = cls.config_init()
    except Exception as error:
        raise EnvironmentFailedError(f"{cls.__name__}.config_init raised {describe(error)}.") from error
    try:
        env_config = type(default_config)(**env_values(default_config, config, endpoints))
        servers = [server_config(default_servers, config, endpoints)]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EnvironmentFailedError(
            f"{cls.__name__} refuses {field}: {first['msg']}.",
            hint=f"`hermes-rl environments show {config.run.environment}` lists what it accepts.",
        ) from error
    try:
        return cls(config=env_config, server_configs=servers, slurm=False, testing=False)
    except Exception as error:
        raise EnvironmentFailedError(f"{cls.__name__}() raised {describe(error)}.") from error


def env_values(default_config: Any, config: RunConfig, endpoints: Endpoints) -> dict[str, Any]:
    """The values for the environment's configuration class: its defaults, then the run's."""
    values = {**default_config.model_dump(), **config.env.model_dump()}
    # An environment that orders its items by a seed follows the run's, so that runs of one seed see the
    # same items and replicates see others.
    if "seed" in type(default_config).model_fields and "seed" not in (config.env.model_extra or {}):
        values["seed"] = config.run.seed
    # W&B calls are captured in this process, so the environment always makes them.
    values["use_wandb"] = True
    values["rollout_server_url"] = endpoints.trajectories_url
    # Zero means synchronous, which the runner sees to; BaseEnv's arithmetic needs one batch of room.
    values["max_batches_offpolicy"] = max(1, int(values["max_batches_offpolicy"]))
    return values


def server_config(default_servers: Any, config: RunConfig, endpoints: Endpoints) -> Any:
    """The one inference server of a run, in the class that the environment's ``config_init`` used."""
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    base = default_servers
    if isinstance(base, list):
        base = base[0] if base else APIServerConfig()
    kind = type(base) if isinstance(base, APIServerConfig) else APIServerConfig
    values = {
        **base.model_dump(),
        **config.openai[0].model_dump(),
        "base_url": endpoints.inference_url,
        "api_key": endpoints.inference_key,
        "tokenizer_name": config.env.tokenizer_name,
        "n_kwarg_is_ignored": False,
        # Atropos's check asks for a completion every second, for ever.
        "health_check": False,
    }
    return kind(**values)


def describe(error: BaseException) -> str:
    """An exception in one line: its class and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:1000]}" if text else type(error).__name__
