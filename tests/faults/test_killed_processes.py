"""A real run whose processes are killed, one after the other: what is left is true, clean and resumable.

What a resumed run has learned: its optimizer has taken as many steps as the run, so it goes on from the state
that was saved; with a learning rate of zero from there on its weights are those of the checkpoint, to the
bit; and the evaluation at its end is as that of a run nobody disturbed, within four standard errors of the
difference of two binomial shares.

``$HERMES_RL_FAULT_ROUNDS`` sets how often each process is killed (1), each time at another moment; five
rounds see each process killed, by each signal, at every kind of moment.
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
from hermes_rl.config import RunConfig, Workspace, build_run_config
from hermes_rl.engine.checkpoints import CheckpointStore, Loaded
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.process_identity import is_alive, processes_with, signal_process
from hermes_rl.runs.files import read_progress
from hermes_rl.runs.run_status import RUN_ID_VARIABLE, RunStatus
from hermes_rl.runs.store import open_store

ROUNDS = int(os.environ.get("HERMES_RL_FAULT_ROUNDS", "1"))
STEPS = 12
EVALUATED = 128
SECONDS_TO_THE_TRUTH = 45.0
"""Each of three processes has ten seconds to end by itself, and the machine may be busy."""
SECONDS_FOR_A_RUN = 300.0
ROLES = ("supervisor", "api", "trainer", "env", "engine")
MOMENTS = ("training", "starting", "evaluating", "ending", "stopping")
"""Between two steps or in one; before every process is ready; in the last evaluation; while the last
checkpoint is saved or everything ends; after someone has asked the run to stop."""
FIRST_MOMENTS = {
    signal.SIGKILL: ("stopping", "evaluating", "ending", "starting", "training"),
    signal.SIGTERM: ("training", "training", "starting", "stopping", "evaluating"),
}
"""Of each role, in the order of :data:`ROLES`."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path_factory.mktemp("faults") / "w")
    yield made
    for engine in list_engines(made):
        stop_engine(made, engine.key)


def _start(workspace: Workspace, **more: Any) -> str:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    overrides = {
        "total_steps": STEPS,
        "save_checkpoint_interval": 3,
        "steps_per_eval": 0,
        "num_requests_for_eval": EVALUATED,
        **more,
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
    shared = {engine.address.pid for engine in list_engines(workspace)}
    recorded = open_store(workspace.state_url).processes(run_id)
    alive = [row.role for row in recorded if row.pid not in shared and is_alive(row.pid, row.mark)]
    return alive + [f"pid {pid}" for pid in processes_with(RUN_ID_VARIABLE, run_id)]


def _process(workspace: Workspace, run_id: str, role: str) -> tuple[int, str]:
    """Pid and mark, as soon as they are recorded."""
    store = open_store(workspace.state_url)

    def recorded() -> tuple[int | None, str | None]:
        if role == "supervisor":
            row = store.run(run_id)
            return row.supervisor_pid, row.supervisor_mark
        found = [(row.pid, row.mark) for row in store.processes(run_id) if row.role == role]
        return found[0] if found else (None, None)

    _until(workspace, run_id, lambda status: status.status != "pending" and recorded()[0] is not None)
    pid, mark = recorded()
    assert pid is not None
    assert mark is not None
    return pid, mark


def _until_phase(workspace: Workspace, run_id: str, phases: set[str]) -> None:
    """Wait for what the trainer says it does; some of it takes hundredths of a second."""
    run_dir = workspace.run_dir(run_id)
    deadline = time.monotonic() + SECONDS_FOR_A_RUN
    while read_progress(run_dir).get("phase") not in phases:
        assert time.monotonic() < deadline, runs.status(workspace, run_id)
        time.sleep(0.005)


def _strike(
    workspace: Workspace, run_id: str, role: str, number: int, moment: str, chance: random.Random
) -> None:
    """Send a process of a run a signal at a moment."""
    step = chance.randint(0, STEPS // 2)
    if moment == "starting":
        pid, mark = _process(workspace, run_id, role)
        time.sleep(chance.uniform(0.0, 1.0))
    else:
        _until(workspace, run_id, lambda status: status.status == "running" and status.step >= step)
        pid, mark = _process(workspace, run_id, role)
    if moment == "stopping":
        runs.stop(workspace, run_id, wait=False)
        while runs.glance(workspace, run_id).status == "running":
            time.sleep(0.005)
    elif moment == "evaluating":
        _until_phase(workspace, run_id, {"evaluating", "saving", "completed"})
    elif moment == "ending":
        _until_phase(workspace, run_id, {"saving", "completed"})
    was_there = signal_process(pid, mark, number)
    assert was_there or moment in ("ending", "stopping")


def _saved(workspace: Workspace, run_id: str) -> Loaded:
    """The last checkpoint of a run."""
    path = runs.results(workspace, run_id)["checkpoints"][-1]["state_path"]
    return CheckpointStore(workspace.checkpoints).load(path, optimizer=True)


def _steps_of_the_optimizer(saved: Loaded) -> int:
    assert saved.optimizer is not None
    return int(saved.optimizer["steps"])


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
@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_costs_only_the_steps_since_the_checkpoint(
    workspace: Workspace, undisturbed: float, role: str, number: signal.Signals, attempt: int
) -> None:
    first = MOMENTS.index(FIRST_MOMENTS[number][ROLES.index(role)])
    moment = MOMENTS[(first + attempt) % len(MOMENTS)]
    # An engine that ends before it is used is started again.
    may_go_on = role == "engine" and moment == "starting"
    patience = SECONDS_FOR_A_RUN if may_go_on else SECONDS_TO_THE_TRUTH
    run_id = _start(workspace)
    _strike(workspace, run_id, role, number, moment, random.Random(f"{role} {number} {attempt}"))
    killed = time.monotonic()
    status = runs.wait(workspace, run_id, timeout=patience)
    assert status.is_final, status
    assert time.monotonic() - killed < patience + 5
    told_to_stop = moment == "stopping" or (role == "supervisor" and number == signal.SIGTERM)
    expected = {"stopped" if told_to_stop else "failed"}
    if may_go_on or moment in ("evaluating", "ending"):  # all was done before the signal took effect
        expected |= {"completed"}
    assert status.status in expected, status
    assert status.reason
    assert not _left(workspace, run_id)

    if status.status != "completed":
        runs.resume(workspace, run_id)
        status = runs.wait(workspace, run_id, timeout=SECONDS_FOR_A_RUN)
    assert (status.status, status.step) == ("completed", STEPS), status
    assert not _left(workspace, run_id)
    assert [record["step"] for record in _records(workspace, run_id, "train")] == list(range(1, STEPS + 1))
    evaluated = _records(workspace, run_id, "eval")
    assert [record["step"] for record in evaluated] == [0, STEPS]
    assert _steps_of_the_optimizer(_saved(workspace, run_id)) == STEPS
    reached = evaluated[-1]["eval_percent_correct"]
    error = math.sqrt((reached * (1 - reached) + undisturbed * (1 - undisturbed)) / EVALUATED)
    assert abs(reached - undisturbed) < 4 * error


def test_a_resumed_run_has_the_weights_of_its_checkpoint_to_the_bit(workspace: Workspace) -> None:
    run_id = _start(workspace, num_requests_for_eval=8)
    _until(workspace, run_id, lambda status: status.step >= 4)
    assert signal_process(*_process(workspace, run_id, "trainer"), signal.SIGKILL)
    assert runs.wait(workspace, run_id, timeout=SECONDS_TO_THE_TRUTH).status == "failed"
    before = _saved(workspace, run_id)
    assert 3 <= _steps_of_the_optimizer(before) < STEPS
    assert any(tensor.any() for name, tensor in before.adapter.items() if "lora_B" in name), "nothing learned"

    path = workspace.run_dir(run_id) / "run.yaml"
    config = RunConfig.from_yaml(path)
    config.tinker.learning_rate = 0.0
    config.to_yaml(path)
    runs.resume(workspace, run_id)
    assert runs.wait(workspace, run_id, timeout=SECONDS_FOR_A_RUN).status == "completed"
    after = _saved(workspace, run_id)
    assert _steps_of_the_optimizer(after) == STEPS
    assert set(after.adapter) == set(before.adapter)
    assert all(after.adapter[name].equal(before.adapter[name]) for name in before.adapter)
