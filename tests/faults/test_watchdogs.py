"""Real runs that go wrong while every process works: each watchdog ends one, by name and with the numbers."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.environments.inspection import environment_fields
from hermes_rl.process_identity import is_alive, processes_with
from hermes_rl.runs import RunStatus
from hermes_rl.runs.run_status import RUN_ID_VARIABLE
from hermes_rl.runs.store import open_store

DATA = Path(__file__).resolve().parents[1] / "data" / "environments"
SMALL: dict[str, Any] = {
    "total_steps": 30,
    "steps_per_eval": 0,
    "num_requests_for_eval": 8,
    "group_size": 4,
    "batch_size": 8,
    "max_token_length": 128,
    "save_checkpoint_interval": 0,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path_factory.mktemp("watchdogs") / "w")
    for file in DATA.glob("*.py"):
        shutil.copy(file, made.environments)
    yield made
    for run in runs.list_runs(made):
        if not run.is_final:
            runs.stop(made, run.run_id)
    for engine in list_engines(made):
        stop_engine(made, engine.key)


def start(workspace: Workspace, environment: str, **overrides: Any) -> str:
    found = find(workspace.environments_dirs, environment)
    config = build_run_config(
        found,
        overrides=SMALL | overrides,
        own_fields=lambda: environment_fields(workspace, found),
    )
    return runs.start(workspace, config)


def failed(workspace: Workspace, run_id: str) -> RunStatus:
    status = runs.wait(workspace, run_id, timeout=240)
    assert status.status == "failed", status
    rows = open_store(workspace.state_url).processes(run_id)
    assert not any(is_alive(row.pid, row.mark) for row in rows if row.role != "engine")
    assert not processes_with(RUN_ID_VARIABLE, run_id)
    return status


def until_step(workspace: Workspace, run_id: str, step: int) -> RunStatus:
    deadline = time.monotonic() + 180
    while (status := runs.glance(workspace, run_id)).step < step:
        assert not status.is_final, status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def test_a_policy_that_runs_away_from_its_sampler_ends_the_run(workspace: Workspace) -> None:
    run_id = start(workspace, "arithmetic_tinker", learning_rate=1.0, max_kl=0.5, max_kl_steps=2)
    status = failed(workspace, run_id)
    assert "kl_sampler_trainer is" in (status.reason or "")
    assert "mean of the last 2 steps" in (status.reason or "")
    assert "max_kl (0.5)" in (status.reason or "")
    assert status.guilty_role == "trainer"


def test_numbers_that_are_no_longer_numbers_end_the_run(workspace: Workspace) -> None:
    status = failed(workspace, start(workspace, "misbehaving", misbehave="huge advantages"))
    assert "Training has diverged" in (status.reason or "")
    assert "not finite" in (status.reason or "")


def test_an_environment_that_fails_again_and_again_ends_the_run(workspace: Workspace) -> None:
    run_id = start(
        workspace, "misbehaving", misbehave="raise in collect_trajectories", max_environment_failures=4
    )
    status = failed(workspace, run_id)
    assert "failed 4 times in a row" in (status.reason or "")
    assert "cannot collect" in (status.reason or "")
    assert status.guilty_role == "env"


def test_rollouts_that_never_return_end_the_run(workspace: Workspace) -> None:
    run_id = start(
        workspace, "misbehaving", misbehave="never return", max_environment_timeouts=2, worker_timeout=1.0
    )
    assert "took longer than 1 s" in (failed(workspace, run_id).reason or "")


def test_an_evaluation_that_never_returns_ends_the_run(workspace: Workspace) -> None:
    run_id = start(
        workspace, "misbehaving", misbehave="hang in evaluate", max_evaluation_seconds=3.0, total_steps=2
    )
    reason = failed(workspace, run_id).reason or ""
    assert "evaluate did not return within 3 s (max_evaluation_seconds)" in reason


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"total_steps": 2}, "8 groups in a row had equal scores"),
        ({"max_equal_score_groups": 6}, "groups in a row had equal scores"),
    ],
)
def test_a_run_of_nothing_but_equal_groups_is_not_complete(
    workspace: Workspace, overrides: dict[str, Any], reason: str
) -> None:
    run_id = start(
        workspace,
        "misbehaving",
        **{"misbehave": "equal scores", "ensure_scores_are_not_same": False, "batch_size": 16, **overrides},
    )
    assert reason in (failed(workspace, run_id).reason or "")


def test_an_environment_cannot_end_or_reset_its_run(workspace: Workspace) -> None:
    run_id = start(workspace, "misbehaving", misbehave="ask for what is the trainer's", total_steps=3)
    status = runs.wait(workspace, run_id, timeout=240)
    assert (status.status, status.step) == ("completed", 3), status
    assert "answered [403, 403]" in workspace.log_path("env", run_id).read_text()


@pytest.mark.parametrize("role", ["api", "trainer", "engine"])
def test_a_server_that_does_not_answer_ends_the_run(workspace: Workspace, role: str) -> None:
    run_id = start(workspace, "arithmetic_tinker", total_steps=500, max_seconds_without_answer=6.0)
    until_step(workspace, run_id, 1)
    rows = open_store(workspace.state_url).processes(run_id)
    pid = next(row.pid for row in rows if row.role == role)
    os.kill(pid, signal.SIGSTOP)
    try:
        status = failed(workspace, run_id)
    finally:
        if role == "engine":
            os.kill(pid, signal.SIGKILL)
    assert "does not answer" in (status.reason or "")
    assert status.guilty_role == role


def test_a_disk_that_is_nearly_full_ends_the_run_and_costs_no_step(workspace: Workspace) -> None:
    run_id = start(workspace, "arithmetic_tinker", total_steps=8, min_free_disk_mb=1_000_000_000)
    status = failed(workspace, run_id)
    assert "The disk is nearly full" in (status.reason or "")
    assert "min_free_disk_mb" in (status.reason or "")
    assert [saved["step"] for saved in runs.results(workspace, run_id)["checkpoints"]] == [status.step][
        : status.step
    ]

    path = workspace.run_dir(run_id) / "run.yaml"
    config = RunConfig.from_yaml(path)
    config.tinker.min_free_disk_mb = 1
    config.to_yaml(path)
    runs.resume(workspace, run_id)
    status = runs.wait(workspace, run_id, timeout=240)
    assert status.status == "completed", status
    trained = [record["step"] for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]
    assert trained == list(range(1, 9))
