"""What an agent loses if these fail: stopping without being held up until everything has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.patience import within
from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import call
from hermes_rl.config import Workspace
from hermes_rl.errors import SearchError
from hermes_rl.process_identity import process_mark
from hermes_rl.runs.states import RunState
from hermes_rl.runs.store import open_store
from hermes_rl.search.definition import define_search
from hermes_rl.search.store import SearchStore

SUPERVISOR = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("ready", flush=True)
sys.stdin.read()
"""
"""Takes note that it is to stop, and ends when its standard input does."""


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.resolve(tmp_path)


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(("patience", "given"), [(0, {}), (None, {"wait_seconds": 0})])
def test_a_run_is_told_to_stop_and_the_answer_does_not_wait(
    workspace: Workspace, supervisor: subprocess.Popen[str], patience: float | None, given: dict[str, Any]
) -> None:
    store = open_store(workspace.state_url)
    names: dict[str, Any] = {"run_id": "r1", "environment": "e", "profile": "embedded", "seed": 0}
    store.add_run(**names, overrides={}, external_environment=False, total_steps=10)
    mark = process_mark(supervisor.pid)
    store.move_run("r1", RunState.STARTING, supervisor_pid=supervisor.pid, supervisor_mark=mark)
    session = AgentSession(workspace, patience=patience)
    answer = call(session, "rl_stop_training", {"run_id": "r1", **given})
    assert answer["status"] == "stopping"
    assert answer["check_again_in_seconds"] > 0
    assert answer["next"] == "rl_check_status('r1')"
    assert supervisor.poll() is None
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "asked\n"
    again = call(session, "rl_stop_training", {"run_id": "r1", "wait_seconds": 0})
    assert again["status"] == "stopping"

    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait()
    assert call(session, "rl_stop_training", {"run_id": "r1", "wait_seconds": 60})["status"] == "stopped"


def test_a_search_is_told_to_stop_and_the_answer_does_not_wait(workspace: Workspace) -> None:
    store = SearchStore.create(workspace, define_search({"preset": "article-grid"}), {})
    driving, ended = threading.Event(), threading.Event()

    def drive() -> None:
        with store.writing():
            driving.set()
            eventually(store.stop_file.exists)
            ended.wait()
            file = store.load()
            file.state = "stopped"
            store.save(file)

    driver = threading.Thread(target=drive)
    driver.start()
    driving.wait()
    session = AgentSession(workspace, patience=0)
    answer = call(session, "rl_stop_search", {"search_id": store.search_id})
    assert answer["state"] == "stopping"
    assert answer["next"] == f"rl_check_search({store.search_id!r})"
    assert store.is_driven()
    assert call(session, "rl_check_search")["state"] == "stopping"
    ended.set()
    driver.join()
    waited = call(session, "rl_stop_search", {"search_id": store.search_id, "wait_seconds": 60})
    assert waited["state"] == "stopped"
    assert call(session, "rl_check_search")["state"] == "stopped"


def test_what_goes_wrong_is_said_to_whoever_waits_and_logged_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> str:
        raise SearchError("It did not stop.")

    for seconds in (None, 60.0):
        with pytest.raises(SearchError, match="did not stop"):
            within(seconds, fail, "stop-it")
    late = threading.Event()

    def fail_late() -> str:
        late.wait()
        return fail()

    assert within(0, fail_late, "stop-it") is None
    late.set()
    eventually(lambda: "stop-it: It did not stop." in caplog.text)
