"""A run of which an attempt has died: what is found out about it never ends the next attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.config import Workspace, build_run_config
from hermes_rl.errors import WorkspaceError
from hermes_rl.process_identity import is_alive, process_mark
from hermes_rl.runs import run_status
from hermes_rl.runs.lifecycle import resume
from hermes_rl.runs.run_status import RUN_ID_VARIABLE, SUPERVISOR_VARIABLE, glance, settle
from hermes_rl.runs.states import RunState
from hermes_rl.runs.store import RunStore, open_store
from hermes_rl.runs.supervisor import Outcome, Recorder

GONE = (1, "a process that is gone")
HERE = (os.getpid(), process_mark(os.getpid()))
BY_US = {"supervisor_pid": HERE[0], "supervisor_mark": HERE[1]}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.resolve(tmp_path / "w")


@pytest.fixture
def store(workspace: Workspace) -> RunStore:
    return open_store(workspace.state_url)


def _dead_run(store: RunStore, *states: RunState) -> None:
    store.add_run(
        run_id="a", environment="count", profile="embedded", seed=0, overrides={}, total_steps=10,
        external_environment=False, supervisor_pid=GONE[0], supervisor_mark=GONE[1],
    )  # fmt: skip
    for state in states:
        assert store.move_run("a", state)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Lets something happen after the look at a run, before its end is recorded."""
    real = run_status.end_leftovers

    def arrange(what: Callable[[], object]) -> None:
        def end_leftovers(*arguments: Any) -> None:
            monkeypatch.setattr(run_status, "end_leftovers", real)
            real(*arguments)
            what()

        monkeypatch.setattr(run_status, "end_leftovers", end_leftovers)

    return arrange


def test_an_asker_that_is_slow_does_not_end_what_another_has_resumed(
    workspace: Workspace, store: RunStore, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    _dead_run(store, RunState.STARTING, RunState.RUNNING)

    def another_resumes_it() -> None:
        assert glance(workspace, "a").status == "failed"
        assert store.move_run("a", RunState.PENDING, reason=None, **BY_US)
        store.put_processes("a", {"api": {"state": "starting"}})

    meanwhile(another_resumes_it)
    row = settle(workspace, store, store.run("a"))
    assert (row.status, row.reason, row.supervisor_pid) == ("pending", None, os.getpid())
    assert [process.state for process in store.processes("a")] == ["starting"]


def test_a_supervisor_that_records_itself_after_its_starter_was_killed_keeps_its_run(
    workspace: Workspace, store: RunStore, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    _dead_run(store)
    recorder = Recorder(workspace, "a", GONE)
    meanwhile(lambda: recorder.starting({}))
    row = settle(workspace, store, store.run("a"))
    assert (row.status, row.reason, row.supervisor_pid) == ("starting", None, os.getpid())
    recorder.running()
    assert recorder.is_ours
    assert store.run("a").status == "running"


def test_a_supervisor_that_comes_after_its_run_was_resumed_leaves_it_alone(
    workspace: Workspace, store: RunStore
) -> None:
    _dead_run(store)
    assert glance(workspace, "a").reason == "its start was interrupted"
    assert store.move_run("a", RunState.PENDING, supervisor_pid=1, supervisor_mark="who resumes it")
    late = Recorder(workspace, "a", GONE)
    assert not late.starting({})
    late.ended(Outcome(RunState.FAILED, "by a supervisor that is late"), "")
    row = store.run("a")
    assert (row.status, row.supervisor_mark) == ("pending", "who resumes it")


def test_a_supervisor_that_has_lost_its_run_is_told_and_writes_nothing_more(
    workspace: Workspace, store: RunStore
) -> None:
    _dead_run(store)
    told: list[str] = []
    recorder = Recorder(workspace, "a", GONE)
    recorder.when_lost = lambda: told.append("lost")
    assert recorder.starting({})
    recorder.check()
    assert recorder.is_ours
    assert not told

    assert store.move_run("a", RunState.FAILED)
    assert store.move_run("a", RunState.PENDING, supervisor_pid=1, supervisor_mark="another")
    recorder.check()
    assert told == ["lost"]
    for write in (recorder.running, recorder.stopping, lambda: recorder.phase("training")):
        write()
    recorder.engine(1)
    recorder.ended(Outcome(RunState.COMPLETED, "all steps were taken"), "")
    row = store.run("a")
    assert (row.status, row.phase, store.processes("a")) == ("pending", "starting API server", [])
    assert told == ["lost"]


def test_a_run_whose_files_cannot_be_put_back_has_failed_and_says_why(
    workspace: Workspace, store: RunStore
) -> None:
    _dead_run(store, RunState.STARTING)
    run_dir = workspace.run_dir("a")
    (run_dir / "progress.json").mkdir(parents=True)  # what is to be written cannot take its place
    (run_dir / "checkpoints.json").write_text('[{"step": 3, "state_path": "tinker://a/weights/3"}]')
    environment = SimpleNamespace(name="count", file_path="/none", class_name="None")
    build_run_config(environment, run_id="a").to_yaml(run_dir / "run.yaml")
    with pytest.raises(WorkspaceError, match="its files cannot be written"):
        resume(workspace, "a")
    row = store.run("a")
    assert row.status == "failed"
    assert "its files cannot be written" in row.reason


@pytest.fixture
def sleepers() -> Iterator[Callable[[tuple[int, str | None]], subprocess.Popen[bytes]]]:
    """Starts processes that carry the run's id and were started by a supervisor."""
    started: list[subprocess.Popen[bytes]] = []

    def start(supervisor: tuple[int, str | None]) -> subprocess.Popen[bytes]:
        carried = {RUN_ID_VARIABLE: "a", SUPERVISOR_VARIABLE: f"{supervisor[0]}:{supervisor[1]}"}
        command = [sys.executable, "-c", "print(flush=True); input()"]
        process = subprocess.Popen(
            command, env={**os.environ, **carried}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_of_the_processes_of_a_run_only_those_of_the_dead_attempt_are_ended(
    workspace: Workspace, store: RunStore, sleepers: Callable[..., subprocess.Popen[bytes]]
) -> None:
    _dead_run(store, RunState.STARTING)
    orphan, recorded, of_the_next = sleepers(GONE), sleepers(GONE), sleepers(HERE)
    row = {"pid": recorded.pid, "mark": process_mark(recorded.pid), "state": "running"}
    store.put_processes("a", {"trainer": row})
    assert glance(workspace, "a").status == "failed"
    assert (orphan.wait(30), recorded.wait(30)) == (-signal.SIGTERM, -signal.SIGTERM)
    assert is_alive(of_the_next.pid, process_mark(of_the_next.pid))
    assert of_the_next.poll() is None
