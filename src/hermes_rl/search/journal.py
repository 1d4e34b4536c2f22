"""Where Optuna keeps what it knows of a search. Used by the one process that drives the search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend


def open_storage(place: str | Path) -> optuna.storages.BaseStorage:
    """Optuna's storage: a database by its SQLAlchemy URL, or a journal file of ours."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if isinstance(place, str):
        return optuna.storages.RDBStorage(place)
    _drop_cut_off_line(place)
    return optuna.storages.JournalStorage(_Journal(place))


def _drop_cut_off_line(path: Path) -> None:
    """Remove a last line that a killed writer left unfinished."""
    if path.exists():
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class _Journal(JournalFileBackend):
    """Optuna's journal file, for the one process that holds the search's own lock anyway.

    Optuna's file locks outlive a killed writer and make the next one wait half a minute, and it waits for the
    disk at each of the ten lines of a trial. The trials' own records wait for it once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with open(self._path, "ab") as file:
            file.write(lines.encode())
