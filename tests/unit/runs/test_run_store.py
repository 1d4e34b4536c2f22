"""The state store, on SQLite.

``$HERMES_RL_TEST_DATABASE_SERVER``, the URL of a PostgreSQL server on which databases may be created, has it
tested there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hermes_rl.errors import UnknownRunError, WorkspaceError
from hermes_rl.runs.states import ACTIVE, FINAL, TRANSITIONS, ProcessState, RunState
from hermes_rl.runs.store import RunStore

SERVER = os.environ.get("HERMES_RL_TEST_DATABASE_SERVER")
sqlite_only = pytest.mark.skipif(SERVER is not None, reason="about the file of SQLite")


def _url(folder: Path) -> str:
    if SERVER is None:
        return f"sqlite:///{folder / 'state.db'}"
    url = sa.make_url(SERVER).set(database=f"test_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}")
    engine = sa.create_engine(SERVER, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        known = sa.text("select 1 from pg_database where datname = :name")
        if connection.scalar(known, {"name": url.database}) is None:
            connection.execute(sa.text(f'create database "{url.database}"'))
    engine.dispose()
    return url.render_as_string(hide_password=False)


def _values(run_id: str, **more: Any) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "environment": "count",
        "profile": "embedded",
        "seed": 0,
        "overrides": {"learning_rate": 6e-5},
        "external_environment": False,
        "total_steps": 10,
        **more,
    }


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(_url(tmp_path))


def test_a_recorded_run_is_read_back_with_its_zone_and_overrides(store: RunStore) -> None:
    store.add_run(**_values("a"))
    row = store.run("a")
    assert row.status == RunState.PENDING
    assert row.created_at.utcoffset().total_seconds() == 0
    assert row.overrides == {"learning_rate": 6e-5}


def test_one_id_cannot_be_two_runs(store: RunStore) -> None:
    store.add_run(**_values("a"))
    with pytest.raises(WorkspaceError, match="already"):
        store.add_run(**_values("a"))


def test_an_unknown_run_is_said_to_be_unknown(store: RunStore) -> None:
    with pytest.raises(UnknownRunError):
        store.run("nothing")


@pytest.mark.parametrize("state", sorted(FINAL))
def test_an_ended_run_goes_on_by_a_resume_only(store: RunStore, state: RunState) -> None:
    store.add_run(**_values("a"))
    for step in (RunState.STARTING, RunState.STOPPING, state):
        assert store.move_run("a", step)
    for target in set(RunState) - {RunState.PENDING}:
        assert not store.move_run("a", target)
    assert store.run("a").status == state
    assert store.move_run("a", RunState.PENDING) == (state is not RunState.COMPLETED)


def test_every_active_state_can_fail_and_leads_to_an_end() -> None:
    for state in ACTIVE:
        assert RunState.FAILED in TRANSITIONS[state]
    assert set(TRANSITIONS) == set(RunState)


def test_of_many_that_end_a_run_at_once_one_succeeds(tmp_path: Path) -> None:
    RunStore(_url(tmp_path)).add_run(**_values("a"))
    outcomes: list[bool] = []

    def end(reason: str) -> None:
        outcomes.append(RunStore(_url(tmp_path)).move_run("a", RunState.FAILED, reason=reason))

    threads = [threading.Thread(target=end, args=(f"reason {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def test_many_openers_of_a_new_store_do_not_disturb_each_other(tmp_path: Path) -> None:
    errors: list[Exception] = []
    url = _url(tmp_path)

    def open_and_add(number: int) -> None:
        try:
            RunStore(url).add_run(**_values(f"run-{number}"))
        except Exception as error:  # noqa: BLE001 - whatever it is fails the test
            errors.append(error)

    threads = [threading.Thread(target=open_and_add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(RunStore(_url(tmp_path)).all_runs()) == 12


def test_processes_are_written_and_then_changed(store: RunStore) -> None:
    store.add_run(**_values("a"))
    store.put_processes("a", {"api": {"pid": 1, "mark": "m", "state": ProcessState.STARTING}})
    store.put_processes("a", {"api": {"state": ProcessState.RUNNING}})
    (row,) = store.processes("a")
    assert (row.pid, row.state) == (1, ProcessState.RUNNING)
    store.move_run("a", RunState.FAILED)
    assert store.processes("a")[0].state == ProcessState.STOPPED


def test_only_the_process_that_answers_for_a_run_changes_it(store: RunStore) -> None:
    store.add_run(**_values("a"), supervisor_pid=1, supervisor_mark="the first")
    other, own = (1, "the second"), (1, "the first")
    row = {"pid": 5, "mark": "m", "state": ProcessState.STARTING}
    assert not store.move_run("a", RunState.STARTING, answered_by=other)
    assert not store.update_run("a", answered_by=other, phase="a")
    assert not store.put_processes("a", {"api": row}, answered_by=other)
    assert (store.run("a").status, store.run("a").phase, store.processes("a")) == ("pending", None, [])
    assert store.move_run("a", RunState.STARTING, answered_by=own)
    assert store.update_run("a", answered_by=own, phase="b")
    assert store.put_processes("a", {"api": row}, answered_by=own)
    assert (store.run("a").status, store.run("a").phase) == ("starting", "b")
    assert store.move_run("a", RunState.FAILED, answered_by=own)
    assert [process.state for process in store.processes("a")] == ["stopped"]
    assert not store.update_run("a", answered_by=own, phase="c"), "it has ended"
    assert not store.put_processes("a", {"api": row}, answered_by=own)


def test_a_run_that_nobody_answers_for_is_matched_by_nobody(store: RunStore) -> None:
    store.add_run(**_values("a"))
    assert not store.update_run("a", answered_by=(1, None), phase="a")
    assert store.update_run("a", answered_by=(None, None), phase="b")


def test_a_store_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    RunStore(_url(tmp_path))
    engine = sa.create_engine(_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text("update runs_schema set version = 99"))
    engine.dispose()
    with pytest.raises(WorkspaceError, match="schema version 99"):
        RunStore(_url(tmp_path))


@sqlite_only
def test_a_file_that_is_no_database_gives_an_error_to_act_on(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("this is not a database, it is a text of some length")
    with pytest.raises(WorkspaceError, match="cannot be used"):
        RunStore(_url(tmp_path))


@sqlite_only
def test_the_store_is_readable_by_its_owner_only(tmp_path: Path, store: RunStore) -> None:
    store.add_run(**_values("a"))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_a_log_with_a_nul_character_is_kept_without_it(store: RunStore) -> None:
    store.add_run(**_values("a"))
    assert store.move_run("a", RunState.FAILED, reason="killed\0", log_tail="line\n\0\0end")
    assert (store.run("a").reason, store.run("a").log_tail) == ("killed", "line\nend")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("no url", "such as"),
        ("nosuch://host/database", "such as"),
        ("postgresql+nosuchdriver://host/database", "driver"),
        ("postgresql+psycopg://127.0.0.1:9/database", "cannot be used"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_with_what_to_do(url: str, said: str) -> None:
    if "psycopg" in url:
        pytest.importorskip("psycopg")
    with pytest.raises(WorkspaceError, match=said):
        RunStore(url)


def test_ids_are_found_by_their_beginning_and_wildcards_mean_nothing(store: RunStore) -> None:
    for run_id in ("ab1", "ab2", "b_1", "bx1"):
        store.add_run(**_values(run_id))
    assert store.run_ids_from("ab") == ["ab1", "ab2"]
    assert store.run_ids_from("b_") == ["b_1"]
    assert store.run_ids_from("%") == []
    assert store.latest_run_id() == "bx1"


def test_two_hundred_runs_are_listed_well_within_a_second(store: RunStore) -> None:
    for number in range(200):
        store.add_run(**_values(f"run-{number:03}", search_id=f"search-{number % 2}", trial=number))
    taken = []
    for _ in range(5):  # one undisturbed of several will do
        began = time.perf_counter()
        assert len(store.all_runs()) == 200
        assert len(store.all_runs("search-1")) == 100
        taken.append(time.perf_counter() - began)
    assert min(taken) < 0.5
