"""The state store: which runs there are, how far each has come, which processes belong to it.

Any process of a workspace may open it: whoever starts a run, the run's supervisor, whoever asks. Every
change is one short transaction; nothing is kept open in between. SQLite by default (write-ahead log, so
that readers never wait), any SQLAlchemy URL in its place.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, Row
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from hermes_rl.errors import UnknownRunError, WorkspaceError
from hermes_rl.runs.states import ACTIVE, FINAL, ProcessState, RunState, sources

SCHEMA_VERSION = 1
BUSY_SECONDS = 15.0
_CREATION_LOCK = 0x6865726D6573

Answering = tuple[int | None, str | None]
"""Pid and mark of the process that answers for an active run. No two attempts at a run share one."""


class UtcTime(sa.types.TypeDecorator[datetime]):
    """A time with zone UTC, stored without a zone."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class PlainText(sa.types.TypeDecorator[str]):
    """Text without NUL characters: logs of killed processes can hold them, PostgreSQL cannot."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.replace("\0", "")


_NOT_ENDED = (ProcessState.STARTING.value, ProcessState.RUNNING.value)

metadata = sa.MetaData()

schema_version = sa.Table(
    "runs_schema",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run_id", sa.String(128), primary_key=True),
    sa.Column("environment", sa.String(256), nullable=False),
    sa.Column("profile", sa.String(128), nullable=False),
    sa.Column("seed", sa.Integer, nullable=False),
    sa.Column("overrides", sa.JSON, nullable=False),
    sa.Column("search_id", sa.String(128), index=True),
    sa.Column("trial", sa.Integer),
    sa.Column("external_environment", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("phase", sa.String(128)),
    sa.Column("reason", PlainText),
    sa.Column("guilty_role", sa.String(16)),
    sa.Column("log_tail", PlainText),
    sa.Column("stop_requested", sa.Boolean, nullable=False),
    # The process that answers for an active run: its supervisor, or before that whoever starts it.
    sa.Column("supervisor_pid", sa.Integer),
    sa.Column("supervisor_mark", sa.String(128)),
    sa.Column("total_steps", sa.Integer, nullable=False),
    sa.Column("progress", sa.JSON),
    sa.Column("created_at", UtcTime, nullable=False, index=True),
    sa.Column("started_at", UtcTime),
    sa.Column("ended_at", UtcTime),
)

processes = sa.Table(
    "processes",
    metadata,
    sa.Column("run_id", sa.String(128), sa.ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("role", sa.String(16), primary_key=True),
    sa.Column("pid", sa.Integer),
    sa.Column("mark", sa.String(128)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("exit_code", sa.Integer),
    sa.Column("started_at", UtcTime),
    sa.Column("ended_at", UtcTime),
)


def utc_now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


class RunStore:
    """Reads and changes the runs of one workspace.

    Args:
        url: SQLAlchemy URL.

    Raises:
        WorkspaceError: the store cannot be opened, or was written by another version.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = sa.make_url(url)
            if self._url.get_backend_name() == "sqlite" and self._url.database:
                _create_private(Path(self._url.database))
            self._engine = sa.create_engine(self._url, poolclass=NullPool)
        except (ArgumentError, ImportError) as error:
            raise WorkspaceError(
                f"The URL of the state store cannot be used: {error}.",
                allowed="such as sqlite:////folder/state.db or postgresql+psycopg://user@host/database",
                hint="A database server needs its driver: pip install 'psycopg[binary]' for PostgreSQL.",
            ) from error
        if self._url.get_backend_name() == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
        self._open()

    def _open(self) -> None:
        try:
            with self._engine.begin() as connection:
                if self._url.get_backend_name() == "postgresql":
                    # There, of several that create what does not exist all but one fail.
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
                for table in metadata.sorted_tables:
                    connection.execute(CreateTable(table, if_not_exists=True))
                    for index in table.indexes:
                        connection.execute(CreateIndex(index, if_not_exists=True))
            with self._engine.begin() as connection:
                version = connection.scalar(sa.select(schema_version.c.version))
            if version is None:
                try:
                    with self._engine.begin() as connection:
                        connection.execute(schema_version.insert().values(id=1, version=SCHEMA_VERSION))
                except IntegrityError:
                    pass  # another process wrote the same row first
                version = SCHEMA_VERSION
        except DBAPIError as error:
            raise self._unusable(error) from error
        if version != SCHEMA_VERSION:
            raise WorkspaceError(
                f"The state store {self._url.render_as_string(hide_password=True)} has schema version "
                f"{version}.",
                allowed=f"version {SCHEMA_VERSION}",
                hint="Use the hermes-rl that wrote it, or another workspace.",
            )

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._told_in_words(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._told_in_words(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _told_in_words(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except DBAPIError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: DBAPIError) -> WorkspaceError:
        return WorkspaceError(
            f"The state store {self._url.render_as_string(hide_password=True)} cannot be used: {error.orig}.",
            hint="Check that the file is a database of ours, that its folder is writable and the disk "
            "is not full.",
        )

    def add_run(self, **values: Any) -> None:
        """Record a new run as pending.

        Raises:
            WorkspaceError: there is a run of that id.
        """
        values |= {"status": RunState.PENDING, "created_at": utc_now(), "stop_requested": False}
        try:
            with self._write() as connection:
                connection.execute(runs.insert().values(**values))
        except IntegrityError as error:
            raise WorkspaceError(f"There is a run {values['run_id']} already.") from error

    def run(self, run_id: str) -> Row[Any]:
        """The row of one run.

        Raises:
            UnknownRunError: there is none.
        """
        with self._read() as connection:
            row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).one_or_none()
        if row is None:
            raise UnknownRunError(f"There is no run {run_id!r}.", hint="`hermes-rl run list` shows them all.")
        return row

    def all_runs(self, search_id: str | None = None) -> list[Row[Any]]:
        """Every run, or those of one search, oldest first."""
        query = sa.select(runs).order_by(runs.c.created_at, runs.c.run_id)
        if search_id is not None:
            query = query.where(runs.c.search_id == search_id)
        with self._read() as connection:
            return list(connection.execute(query))

    def run_ids_from(self, prefix: str) -> list[str]:
        """Ids that begin with ``prefix``, oldest first."""
        query = (
            sa.select(runs.c.run_id)
            .where(runs.c.run_id.startswith(prefix, autoescape=True))
            .order_by(runs.c.created_at, runs.c.run_id)
        )
        with self._read() as connection:
            return list(connection.scalars(query))

    def latest_run_id(self) -> str | None:
        """Id of the run created last."""
        query = sa.select(runs.c.run_id).order_by(runs.c.created_at.desc(), runs.c.run_id.desc()).limit(1)
        with self._read() as connection:
            return connection.scalar(query)

    def update_run(self, run_id: str, *, answered_by: Answering | None = None, **values: Any) -> bool:
        """Change columns other than the status.

        Args:
            answered_by: change them only while the run is active and this process answers for it.

        Returns:
            Whether they were changed.
        """
        with self._write() as connection:
            where = runs.c.run_id == run_id
            if answered_by is not None:
                where &= _is_answered_by(answered_by)
            return connection.execute(runs.update().where(where).values(**values)).rowcount == 1

    def move_run(
        self, run_id: str, target: RunState, *, answered_by: Answering | None = None, **values: Any
    ) -> bool:
        """Bring a run to another state, if the state machine allows it from where the run is now.

        The check and the change are one statement, so that of several processes that try, one succeeds.
        With the end of a run its processes that are not known to have ended are recorded as stopped.

        Args:
            answered_by: move it only while this process answers for it: what was found out about one
                attempt at a run must not end the next.

        Returns:
            Whether the run was moved.
        """
        allowed = [state.value for state in sources(target)]
        where = (runs.c.run_id == run_id) & runs.c.status.in_(allowed)
        if answered_by is not None:
            where &= _is_answered_by(answered_by)
        with self._write() as connection:
            moved = connection.execute(runs.update().where(where).values(status=target, **values))
            if moved.rowcount == 1 and RunState(target) in FINAL:
                connection.execute(
                    processes.update()
                    .where(processes.c.run_id == run_id, processes.c.state.in_(_NOT_ENDED))
                    .values(state=ProcessState.STOPPED, ended_at=utc_now())
                )
        return moved.rowcount == 1

    def processes(self, run_id: str) -> list[Row[Any]]:
        """The processes of one run, in the order in which they were started."""
        query = (
            sa.select(processes)
            .where(processes.c.run_id == run_id)
            .order_by(processes.c.started_at, processes.c.role)
        )
        with self._read() as connection:
            return list(connection.execute(query))

    def processes_of_ended_runs(self) -> Sequence[Row[Any, Any, Any, Any]]:
        """Run id, role, pid and mark of every process of runs that have ended, shared engines excepted."""
        query = (
            sa.select(processes.c.run_id, processes.c.role, processes.c.pid, processes.c.mark)
            .join(runs, runs.c.run_id == processes.c.run_id)
            .where(runs.c.status.not_in([state.value for state in ACTIVE]))
            .where(processes.c.pid.is_not(None), processes.c.role != "engine")
        )
        with self._read() as connection:
            return connection.execute(query).all()

    def put_processes(
        self, run_id: str, rows: Mapping[str, Mapping[str, Any]], *, answered_by: Answering | None = None
    ) -> bool:
        """Write what is known of a run's processes.

        Args:
            rows: role → columns.
            answered_by: write it only while the run is active and this process answers for it.

        Returns:
            Whether it was written.
        """
        with self._write() as connection:
            if answered_by is not None:  # changes nothing, and holds the row until all is written
                held = runs.update().where((runs.c.run_id == run_id) & _is_answered_by(answered_by))
                if connection.execute(held.values(run_id=run_id)).rowcount != 1:
                    return False
            for role, values in rows.items():
                where = (processes.c.run_id == run_id) & (processes.c.role == role)
                if not connection.execute(processes.update().where(where).values(**values)).rowcount:
                    connection.execute(processes.insert().values(run_id=run_id, role=role, **values))
        return True


@lru_cache(maxsize=8)
def open_store(url: str) -> RunStore:
    """The store at ``url``; opened once in a process, which is safe because it keeps no connection."""
    return RunStore(url)


def is_active(row: Row[Any]) -> bool:
    """Whether the run of this row has not ended."""
    return RunState(row.status) in ACTIVE


def answering(row: Row[Any]) -> Answering:
    """The process that answers for the run of this row."""
    return row.supervisor_pid, row.supervisor_mark


def _is_answered_by(answered_by: Answering) -> sa.ColumnElement[bool]:
    pid, mark = answered_by
    active = runs.c.status.in_([state.value for state in ACTIVE])
    return (
        active
        & runs.c.supervisor_pid.is_not_distinct_from(pid)
        & (runs.c.supervisor_mark.is_not_distinct_from(mark))
    )


def _create_private(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise WorkspaceError(
            f"The state store {path} cannot be opened: {error.strerror or error}.",
            hint="Choose a folder you can write to with --workspace.",
        ) from error


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
    deadline = time.monotonic() + BUSY_SECONDS
    while cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:  # the switch itself does not honour busy_timeout
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def as_json(value: Any) -> Any:
    """``value`` with everything that JSON cannot hold turned into text."""
    return json.loads(json.dumps(value, default=str))
