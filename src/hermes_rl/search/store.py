"""What a search leaves on disk, and who may write it.

``searches/<id>/`` holds ``search.json`` (the definition), ``trials.jsonl`` (one line a change of a trial,
the last line of a trial counts), ``study.log`` (Optuna's journal, readable with optuna-dashboard) and, once
written, the report and ``best.yaml``. Any process may read at any time; one, the holder of the lock,
writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from hermes_rl.config import write_private
from hermes_rl.config.workspace import Workspace, checked_name
from hermes_rl.errors import SearchError
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.trial import FINISHED, TrialRecord

if TYPE_CHECKING:
    import optuna

_LOOK_SECONDS = 2.0
"""Whoever looks whether a search is driven holds its lock for an instant; a driver holds it for longer."""


class SearchFile(BaseModel):
    """``search.json``.

    Attributes:
        search_id: the id.
        created_at: UNIX time.
        state: ``running``, ``completed``, ``stopped`` or ``failed``; ``running`` without a living writer
            means that the search was interrupted.
        reason: why it ended, unless it completed.
        seconds: wall time over all sittings, kept as it passes.
        replicate_seconds: the part of it in which only replicates ran; no budget counts it.
        default_params: the default configuration's values of the searched fields.
        sweep: the W&B sweep that chooses, once it is known, ``ENTITY/PROJECT/ID``.
        definition: what the search is.
    """

    search_id: str
    created_at: float
    state: str = "running"
    reason: str | None = None
    seconds: float = 0.0
    replicate_seconds: float = 0.0
    default_params: dict[str, Any] = {}
    sweep: str | None = None
    definition: SearchDefinition


def new_search_id() -> str:
    """A fresh id: ``s``, UTC time and four random hexadecimal digits, sortable by age."""
    return f"s{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


class SearchStore:
    """One search's folder.

    Args:
        workspace: the workspace that the search belongs to.
        search_id: its id.
    """

    def __init__(self, workspace: Workspace, search_id: str) -> None:
        self.workspace = workspace
        self.search_id = checked_name(search_id)
        self.folder = workspace.searches / self.search_id

    @classmethod
    def create(
        cls, workspace: Workspace, definition: SearchDefinition, default_params: dict[str, Any]
    ) -> SearchStore:
        """Make the folder of a new search."""
        store = cls(workspace, new_search_id())
        store.folder.mkdir(parents=True)
        store.save(
            SearchFile(
                search_id=store.search_id,
                created_at=time.time(),
                default_params=default_params,
                definition=definition,
            )
        )
        return store

    @classmethod
    def open(cls, workspace: Workspace, search_id: str) -> SearchStore:
        """An existing search, by its id or an unambiguous beginning of it; ``last`` is the newest.

        Raises:
            SearchError: there is none, or more than one.
        """
        ids = list_search_ids(workspace)
        matches = [search_id] if search_id in ids else [i for i in ids if i.startswith(search_id)]
        if search_id == "last" and ids:
            matches = ids[-1:]
        if len(matches) != 1:
            raise SearchError(
                f"There is no search {search_id!r}." if not matches else f"{search_id!r} is ambiguous.",
                allowed=(matches or ids[-5:]) or None,
                hint="hermes-rl search list shows all searches of the workspace.",
            )
        return cls(workspace, matches[0])

    def load(self) -> SearchFile:
        """The search's definition and state.

        Raises:
            SearchError: the file is missing or damaged.
        """
        path = self.folder / "search.json"
        try:
            return SearchFile.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise SearchError(f"{path} cannot be read: {error}.") from error

    def save(self, file: SearchFile) -> None:
        """Write definition and state, atomically."""
        write_atomically(self.folder / "search.json", file.model_dump_json(indent=2))

    def append(self, record: TrialRecord) -> None:
        """Keep the newest state of a trial."""
        line = record.model_dump_json(exclude_defaults=True) + "\n"
        with open(self.folder / "trials.jsonl", "ab") as file:
            if file.tell() and not self._ends_with_newline():
                file.write(b"\n")
            file.write(line.encode())
            if record.state in FINISHED:
                file.flush()
                os.fsync(file.fileno())

    def _ends_with_newline(self) -> bool:
        with open(self.folder / "trials.jsonl", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def records(self) -> list[TrialRecord]:
        """The newest state of every trial, by number. A line cut off by a crash is left out."""
        newest: dict[int, TrialRecord] = {}
        try:
            lines = (self.folder / "trials.jsonl").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError, ValidationError):
                record = TrialRecord.model_validate_json(line)
                newest[record.trial] = record
        return [newest[number] for number in sorted(newest)]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one process that drives this search.

        Raises:
            SearchError: another process drives it.
        """
        with open(self.folder / "lock", "w", encoding="ascii") as lock:
            deadline = time.monotonic() + _LOOK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise SearchError(
                            f"The search {self.search_id} is already running.",
                            hint=f"hermes-rl search status {self.search_id}",
                        ) from error
                time.sleep(0.01)
            self.stop_file.unlink(missing_ok=True)
            yield

    def is_driven(self) -> bool:
        """Whether a living process drives this search."""
        try:
            with open(self.folder / "lock", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def state(self) -> str:
        """The search's state, ``interrupted`` where its driver died."""
        state = self.load().state
        return "interrupted" if state == "running" and not self.is_driven() else state

    @property
    def stop_file(self) -> Path:
        """Its existence asks the driver to stop."""
        return self.folder / "stop"

    def study_storage(self) -> optuna.storages.BaseStorage:
        """Optuna's storage: this search's journal, or the workspace's database where machines share it.

        Only the holder of :meth:`writing` may ask for it.
        """
        from hermes_rl.search.journal import open_storage

        shared = not self.workspace.state_url.startswith("sqlite")
        return open_storage(self.workspace.state_url if shared else self.folder / "study.log")


def list_search_ids(workspace: Workspace) -> list[str]:
    """Ids of all searches of a workspace, oldest first."""
    found = [path.parent.name for path in workspace.searches.glob("*/search.json")]
    return sorted(found)


def write_atomically(path: Path, text: str) -> None:
    """Write a file for its owner only, so that a reader sees the old or the new text, never a part."""
    write_private(path, text)
