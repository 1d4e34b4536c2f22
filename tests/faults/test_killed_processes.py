"""A real run whose processes are killed, one after the other: what is left is true, clean and resumable.

The evaluation at the end of a resumed run is as that of a run nobody disturbed, within four standard errors
of the difference of two binomial shares.

``$HERMES_RL_FAULT_ROUNDS`` sets how often each process is killed (1), each time at another moment.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.process_identity import is_alive, processes_with
from hermes_rl.runs.run_status import RUN_ID_VARIABLE, RunStatus
from hermes_rl.runs.store import open_store

ROUNDS = int(os.environ.get("HERMES_RL_FAULT_ROUNDS", "1"))
STEPS = 12
EVALUATED = 128
SECONDS_TO_THE_TRUTH = 45.0
"""Each of three processes has ten seconds to end by itself, and the machine may be busy."""
SECONDS_FOR_A_RUN = 300.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path_factory.mktemp("faults") / "w")
    yield made
    for engine in list_engines(made):
        stop_engine(made, engine.key)


def _start(workspace: Workspace) -> str:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    overrides = {
        "total_steps": STEPS,
        "save_checkpoint_interval": 3,
        "steps_per_eval": 0,
        "num_requests_for_eval": EVALUATED,
    }
    return runs.start(workspace, build_run_config(environment, overrides=overrides))


def _until(workspace: Workspace, run_id: str, condition: Callable[[RunStatus], bool]) -> RunStatus:
    deadline = time.monotonic() + SECONDS_FOR_A_RUN
    while time.monotonic() < deadline:
        status = runs.glance(workspace, run_id)
        if condition(status):
            return status
        assert not status.is_final, status
        time.sleep(0.05)
    raise AssertionError(runs.status(workspace, run_id))


def _left(workspace: Workspace, run_id: str) -> list[str]:
    recorded = open_store(workspace.state_url).processes(run_id)
    alive = [row.role for row in recorded if row.role != "engine" and is_alive(row.pid, row.mark)]
    return alive + [f"pid {pid}" for pid in processes_with(RUN_ID_VARIABLE, run_id)]


def _pid(workspace: Workspace, run_id: str, role: str) -> int:
    if role == "supervisor":
        return open_store(workspace.state_url).run(run_id).supervisor_pid
    return next(row.pid for row in open_store(workspace.state_url).processes(run_id) if row.role == role)


def _records(workspace: Workspace, run_id: str, kind: str) -> list[dict[str, Any]]:
    lines = (workspace.run_dir(run_id) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace) -> float:
    """What a run that nobody disturbs reaches in the end."""
    run_id = _start(workspace)
    status = runs.wait(workspace, run_id, timeout=SECONDS_FOR_A_RUN)
    assert status.status == "completed", status
    return _records(workspace, run_id, "eval")[-1]["eval_percent_correct"]


@pytest.mark.parametrize("attempt", range(ROUNDS))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize("role", ["supervisor", "api", "trainer", "env", "engine"])
def test_a_killed_process_costs_only_the_steps_since_the_checkpoint(
    workspace: Workspace, undisturbed: float, role: str, number: signal.Signals, attempt: int
) -> None:
    if number == signal.SIGTERM and role == "engine" and ROUNDS == 1:
        pytest.skip("an engine that is told to stop ends its runs as one that is killed does")
    moment = random.Random(f"{role} {number} {attempt}").randint(0, STEPS // 2)
    run_id = _start(workspace)
    _until(workspace, run_id, lambda status: status.status == "running" and status.step >= moment)
    os.kill(_pid(workspace, run_id, role), number)
    killed = time.monotonic()
    status = runs.wait(workspace, run_id, timeout=SECONDS_TO_THE_TRUTH)
    assert status.is_final, status
    assert time.monotonic() - killed < SECONDS_TO_THE_TRUTH + 5
    assert status.status == ("stopped" if role == "supervisor" and number == signal.SIGTERM else "failed")
    assert status.reason
    assert not _left(workspace, run_id)

    runs.resume(workspace, run_id)
    status = runs.wait(workspace, run_id, timeout=SECONDS_FOR_A_RUN)
    assert (status.status, status.step) == ("completed", STEPS), status
    assert not _left(workspace, run_id)
    assert [record["step"] for record in _records(workspace, run_id, "train")] == list(range(1, STEPS + 1))
    evaluated = _records(workspace, run_id, "eval")
    assert [record["step"] for record in evaluated] == [0, STEPS]
    reached = evaluated[-1]["eval_percent_correct"]
    error = math.sqrt((reached * (1 - reached) + undisturbed * (1 - undisturbed)) / EVALUATED)
    assert abs(reached - undisturbed) < 4 * error
