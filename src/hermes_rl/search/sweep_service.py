"""The W&B service, as a search asks it: creates or reads a sweep, registers agents, takes their commands.

Through W&B's own client. ``wandb.sweep`` and ``wandb.Api`` are its public calls. What ``wandb.agent`` does
behind them, registering and heartbeats, is called directly: ``wandb.agent`` runs a function in its own
process, one at a time, while a trial here is a run with processes of its own, several at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hermes_rl.config.tracking_mode import wandb_mode
from hermes_rl.errors import HermesRLError, SearchError


@dataclass(frozen=True)
class Command:
    """What the service tells an agent.

    Attributes:
        type: ``run`` a configuration, ``stop`` a run, or ``exit``.
        run_id: the W&B run that is meant.
        params: the configuration, field → value.
    """

    type: Literal["run", "stop", "exit"]
    run_id: str = ""
    params: Mapping[str, Any] | None = None


class SweepService(Protocol):
    """What a sweep's agents need of the service."""

    def register(self) -> str:
        """A new agent; returns its id."""
        ...

    def beat(self, agent: str, running: Iterable[str]) -> list[Command]:
        """Say what an agent runs; returns what it is told."""
        ...


class WandbSweep:
    """One sweep of the W&B service.

    Args:
        path: ``ENTITY/PROJECT/ID``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._entity, self._project, self._sweep_id = split_path(path)
        with _client() as wandb:
            self._api = wandb.Api()

    @classmethod
    def create(cls, config: Mapping[str, Any], project: str) -> WandbSweep:
        """A new sweep in a project.

        Raises:
            SearchError: W&B is not usable, or refuses it.
        """
        with _client() as wandb, contextlib.redirect_stdout(io.StringIO()):
            sweep_id = wandb.sweep(dict(config), project=project)
            # The client keeps in the environment whose sweep it has made.
            entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        return cls(f"{entity}/{project}/{sweep_id}")

    def config(self) -> dict[str, Any]:
        """The sweep's configuration, as a sweep file holds it.

        Raises:
            SearchError: there is no such sweep, or W&B does not answer.
        """
        try:
            return dict(self._api.sweep(self.path).config)
        except Exception as error:
            raise SearchError(f"W&B has no sweep {self.path}: {error}") from error

    def register(self) -> str:
        """A new agent of the sweep; returns its id.

        Raises:
            SearchError: the service refuses it.
        """
        register, _ = _agent_calls()
        try:
            agent = register(
                self._api,
                socket.gethostname(),
                sweep_id=self._sweep_id,
                entity=self._entity,
                project=self._project,
            )
        except Exception as error:
            raise SearchError(f"W&B takes no agent for the sweep {self.path}: {error}") from error
        return str(agent["id"])

    def beat(self, agent: str, running: Iterable[str]) -> list[Command]:
        """An agent's heartbeat; a deleted sweep tells it to exit, a service that is away tells nothing."""
        _, heartbeat = _agent_calls()
        try:
            answered = heartbeat(self._api, agent, {}, dict.fromkeys(running, True))
        except Exception as error:
            if type(error).__name__ == "SweepNotFoundError":
                return [Command("exit")]
            raise SearchError(f"W&B does not answer the sweep's agent: {error}") from error
        return [command for told in answered if (command := read_command(told)) is not None]


def read_command(told: Mapping[str, Any]) -> Command | None:
    """A command as the service writes it; None for one of no meaning here."""
    kind = told.get("type")
    if kind in ("run", "resume"):
        params = {name: entry.get("value") for name, entry in (told.get("args") or {}).items()}
        return Command("run", str(told["run_id"]), params)
    if kind == "stop":
        return Command("stop", str(told["run_id"]))
    return Command("exit") if kind == "exit" else None


def split_path(path: str) -> tuple[str, str, str]:
    """Entity, project and id of a sweep.

    Raises:
        SearchError: the path is not ``ENTITY/PROJECT/ID``.
    """
    parts = path.split("/")
    if len(parts) != 3 or not all(parts):
        raise SearchError(f"{path!r} is not a sweep's path.", allowed="ENTITY/PROJECT/ID")
    return parts[0], parts[1], parts[2]


def full_path(text: str, project: str) -> str:
    """``ENTITY/PROJECT/ID`` of a sweep given as that, as ``PROJECT/ID`` or as its id alone."""
    parts = text.split("/")
    if len(parts) < 3:
        with _client() as wandb:
            entity = wandb.Api().default_entity
        parts = [entity, *parts] if len(parts) == 2 else [entity, project, *parts]
    return "/".join(split_path("/".join(parts)))


def require_wandb() -> None:
    """Check that W&B is on and has a key; the service is not asked.

    Raises:
        SearchError: it is switched off, or has no key.
    """
    if wandb_mode("sweep") != "online":
        raise SearchError(
            "A W&B sweep needs W&B to be reachable and a key.",
            hint="Set WANDB_API_KEY or run `wandb login`, and leave WANDB_MODE unset.",
        )


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    """The ``wandb`` package, which is logged in; the environment is as it was afterwards.

    The client leaves in the environment where its own helper process listens, for child processes to use it.
    The runs of a search outlive the process that starts them, and so they must have their own.

    Raises:
        SearchError: W&B is switched off, has no key, or answers with an error.
    """
    require_wandb()
    before = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb

        yield wandb
    except HermesRLError:
        raise
    except Exception as error:
        raise SearchError(f"W&B cannot be used: {error}") from error
    finally:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        os.environ.update(before)


def _agent_calls() -> tuple[Any, Any]:
    """The client's calls that register an agent and send its heartbeat."""
    try:
        from wandb.apis.public.sweeps import _agent_heartbeat, _register_agent
    except ImportError as error:
        raise SearchError(
            "This version of wandb has other calls for a sweep's agents than 0.31.",
            hint="pip install 'wandb==0.31.*'",
        ) from error
    return _register_agent, _agent_heartbeat
