"""Where everything of a workspace lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hermes_rl.config.profiles import packaged_data_dir
from hermes_rl.errors import ConfigError, WorkspaceError

Role = Literal["api", "trainer", "env", "supervisor"]
WORKSPACE_NAME = "tinker-atropos"
WORKSPACE_VARIABLE = "HERMES_RL_WORKSPACE"
STATE_URL_VARIABLE = "HERMES_RL_STATE_URL"
ENVIRONMENTS_VARIABLE = "HERMES_RL_ENVIRONMENTS"


def _upwards(start: Path) -> Iterator[Path]:
    yield start
    yield from start.parents


@dataclass(frozen=True)
class Workspace:
    """The folder that holds environments, runs, logs, checkpoints and the state store.

    Attributes:
        root: the folder itself, ``tinker-atropos`` in a checkout or ``~/.hermes/rl``.
    """

    root: Path

    @classmethod
    def resolve(cls, path: str | Path | None = None) -> Workspace:
        """The workspace to use.

        In this order: ``path``; ``$HERMES_RL_WORKSPACE``; the ``tinker-atropos`` folder of the checkout
        that holds the current folder; ``~/.hermes/rl``.

        Raises:
            WorkspaceError: the folder cannot be made or written to.
        """
        root = Path(path).expanduser() if path else cls.usual_root()
        workspace = cls(root.resolve())
        workspace._make()
        return workspace

    @staticmethod
    def usual_root() -> Path:
        """The folder of the workspace that is used from here when none is named; it need not exist."""
        configured = os.environ.get(WORKSPACE_VARIABLE)
        if configured:
            return Path(configured).expanduser()
        return next(
            (
                folder / WORKSPACE_NAME
                for folder in _upwards(Path.cwd())
                if (folder / WORKSPACE_NAME / "tinker_atropos" / "environments").is_dir()
            ),
            Path.home() / ".hermes" / "rl",
        )

    def _make(self) -> None:
        try:
            for folder in (
                self.environments,
                self.configs,
                self.logs,
                self.runs,
                self.checkpoints,
                self.searches,
                self.engines,
            ):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkspaceError(
                f"The workspace {self.root} cannot be used: {error.strerror or error}.",
                hint=f"Choose a folder you can write to with --workspace or ${WORKSPACE_VARIABLE}.",
            ) from error

    @property
    def environments(self) -> Path:
        """The folder for environment files of this workspace."""
        return self.root / "tinker_atropos" / "environments"

    @property
    def environments_dirs(self) -> list[Path]:
        """Every folder scanned for environments: this workspace's, the packaged ones, configured ones.

        ``$HERMES_RL_ENVIRONMENTS`` adds folders, separated as in ``$PATH``.
        """
        configured = os.environ.get(ENVIRONMENTS_VARIABLE, "").split(os.pathsep)
        folders = [self.environments, packaged_data_dir("environments")]
        folders += [Path(folder).expanduser() for folder in configured if folder]
        unique: list[Path] = []
        for folder in folders:
            if folder.resolve() not in unique:
                unique.append(folder.resolve())
        return unique

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def searches(self) -> Path:
        return self.root / "searches"

    @property
    def engines(self) -> Path:
        """Address files and locks of the engines started in this workspace."""
        return self.root / "engines"

    @property
    def state_url(self) -> str:
        """SQLAlchemy URL of the state store; ``$HERMES_RL_STATE_URL`` puts another in its place."""
        return os.environ.get(STATE_URL_VARIABLE) or f"sqlite:///{self.root / 'state.db'}"

    def run_dir(self, run_id: str) -> Path:
        """Folder of one run.

        Raises:
            ConfigError: ``run_id`` is not a plain name.
        """
        return self.runs / checked_name(run_id)

    def log_path(self, role: Role, run_id: str) -> Path:
        """Log file of one process of a run: ``logs/{role}_{run_id}.log``."""
        return self.logs / f"{role}_{checked_name(run_id)}.log"


def checked_name(name: str) -> str:
    """``name``, if it can be part of a path without leaving its folder.

    Raises:
        ConfigError: it is empty, too long, or holds anything but letters, digits, ``-``, ``_`` and ``.``.
    """
    plain = all(char.isascii() and (char.isalnum() or char in "-_.") for char in name)
    if not name or len(name) > 120 or not plain or name.startswith("."):
        raise ConfigError(
            f"{name[:80]!r} is not a usable name.",
            allowed="letters, digits, '-', '_' and '.', at most 120 characters, not starting with '.'",
        )
    return name
