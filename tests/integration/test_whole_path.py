"""The whole path, everything real: processes, sockets, the embedded model, gradients, Atropos, Tinker.

What a user loses if these fail: runs that train, that end with a reason when they cannot, and that
leave nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import discover, find
from hermes_rl.environments.inspection import environment_fields
from hermes_rl.runs import RunStatus

DATA = Path(__file__).resolve().parents[1] / "data" / "environments"
SMALL: dict[str, Any] = {
    "total_steps": 4,
    "steps_per_eval": 2,
    "num_requests_for_eval": 16,
    "group_size": 4,
    "batch_size": 8,
    "max_token_length": 128,
    "max_seconds_without_batch": 300,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace in a folder with a space in its name, into which outside environments were dropped."""
    workspace = Workspace.resolve(tmp_path_factory.mktemp("whole path"))
    for file in DATA.glob("*.py"):
        shutil.copy(file, workspace.environments)
    yield workspace
    for run in runs.list_runs(workspace):
        if not run.is_final:
            runs.stop(workspace, run.run_id)
    for engine in list_engines(workspace):
        stop_engine(workspace, engine.key)


def start(
    workspace: Workspace,
    environment: str,
    overrides: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    external: bool = False,
) -> str:
    found = find(workspace.environments_dirs, environment)
    config = build_run_config(
        found,
        overrides={**SMALL, **(overrides or {})},
        seed=seed,
        own_fields=lambda: environment_fields(workspace, found),
    )
    return runs.start(workspace, config, external_environment=external)


def finish(workspace: Workspace, run_id: str) -> RunStatus:
    return runs.wait(workspace, run_id, timeout=400)


def records(workspace: Workspace, run_id: str, kind: str) -> list[dict[str, Any]]:
    return [record for record in runs.read_metrics(workspace, run_id) if record["kind"] == kind]


def processes_of(workspace: Workspace, run_id: str) -> list[str]:
    """Command lines that still mention the run's folder."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(workspace.run_dir(run_id)) in line:
            found.append(line)
    return found


def test_a_run_trains_evaluates_and_leaves_nothing_behind(workspace: Workspace) -> None:
    run_id = start(workspace, "arithmetic_tinker")
    status = finish(workspace, run_id)
    assert (status.status, status.step) == ("completed", 4), status.reason
    trained = records(workspace, run_id, "train")
    assert [record["step"] for record in trained] == [1, 2, 3, 4]
    assert all(record["sequences"] > 0 and record["grad_norm"] > 0 for record in trained)
    assert all(abs(record["kl_sampler_trainer"]) < 1.0 for record in trained)
    assert all(record["logprobs_recomputed"] == 0 for record in trained)
    assert max(record["staleness_max"] for record in trained) <= 4
    evaluations = records(workspace, run_id, "eval")
    assert sorted(record["step"] for record in evaluations) == [0, 2, 4]
    assert all(record["eval_count"] == 16 for record in evaluations)
    for role in ("api", "trainer", "env"):
        assert (workspace.logs / f"{role}_{run_id}.log").exists()
    assert runs.results(workspace, run_id)["checkpoints"]
    assert processes_of(workspace, run_id) == []


def test_the_first_step_trains_on_the_weights_that_sampled(workspace: Workspace) -> None:
    run_id = start(workspace, "arithmetic_tinker", {"max_batches_offpolicy": 0, "total_steps": 2})
    assert finish(workspace, run_id).status == "completed"
    for record in records(workspace, run_id, "train"):
        assert record["staleness_max"] == 0
        assert record["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert record["kl_sampler_trainer"] == pytest.approx(0.0, abs=1e-3)


def test_the_same_seed_gives_the_same_metrics_and_another_seed_others(workspace: Workspace) -> None:
    alone = {"max_batches_offpolicy": 0, "max_num_workers": 1, "total_steps": 3}
    curves = []
    for seed in (5, 5, 6):
        run_id = start(workspace, "arithmetic_tinker", alone, seed=seed)
        assert finish(workspace, run_id).status == "completed"
        curves.append([record["batch_reward_mean"] for record in records(workspace, run_id, "train")])
        curves[-1] += [record["entropy"] for record in records(workspace, run_id, "train")]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)
    assert curves[0] != pytest.approx(curves[2], abs=1e-5)


def test_an_environment_from_outside_is_listed_selected_and_trained(workspace: Workspace) -> None:
    assert "full_stop" in {environment.name for environment in discover(workspace.environments_dirs)}
    run_id = start(workspace, "full_stop", {"total_steps": 2, "steps_per_eval": 1, "eval_items": 4})
    status = finish(workspace, run_id)
    assert status.status == "completed", status.reason
    assert len(records(workspace, run_id, "train")) == 2
    assert len(records(workspace, run_id, "eval")) == 3


def test_an_environment_trains_by_its_own_serve_command(workspace: Workspace) -> None:
    run_id = start(workspace, "full_stop", {"total_steps": 2}, external=True)
    settings = workspace.run_dir(run_id) / "environment.yaml"
    deadline = time.monotonic() + 400
    while not (settings.exists() and runs.status(workspace, run_id).status == "running"):
        assert time.monotonic() < deadline, runs.status(workspace, run_id)
        time.sleep(0.1)
    command = [
        sys.executable,
        str(workspace.environments / "full_stop.py"),
        "serve",
        "--config",
        str(settings),
    ]
    log = workspace.run_dir(run_id) / "serve.log"
    with log.open("wb") as output:
        environment = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "WANDB_MODE": "disabled"}
        )
    try:
        status = finish(workspace, run_id)
        assert status.status == "completed", f"{status.reason}\n{log.read_text()[-3000:]}"
        assert [record["step"] for record in records(workspace, run_id, "train")] == [1, 2]
    finally:
        environment.kill()
        environment.wait()


@pytest.mark.parametrize(
    ("misbehave", "said"),
    [
        ("raise in setup", "no data today"),
        ("raise in collect_trajectories", "cannot collect"),
        ("raise in evaluate", "no items"),
        ("wrong group size", "sequences"),
        ("equal scores", "equal scores"),
        ("never return", "No batch came"),
    ],
)
def test_an_environment_that_goes_wrong_ends_the_run_with_the_reason(
    workspace: Workspace, misbehave: str, said: str
) -> None:
    patience = 8 if misbehave == "never return" else 300
    overrides = {"misbehave": misbehave, "max_seconds_without_batch": patience, "max_equal_score_groups": 50}
    run_id = start(workspace, "misbehaving", overrides)
    status = finish(workspace, run_id)
    assert status.status == "failed"
    assert said in (status.reason or "")
    assert processes_of(workspace, run_id) == []


def test_a_stopped_run_goes_on_where_it_was_with_every_step_once(workspace: Workspace) -> None:
    overrides = {"total_steps": 60, "save_checkpoint_interval": 0, "steps_per_eval": 0}
    run_id = start(workspace, "arithmetic_tinker", overrides)
    deadline = time.monotonic() + 400
    while runs.glance(workspace, run_id).step < 3 or not records(workspace, run_id, "eval"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert runs.stop(workspace, run_id).status == "stopped"
    before = records(workspace, run_id, "train")
    assert 3 <= len(before) < 60
    # A step that takes too long to be waited for is broken off, and nothing is saved.
    saved = [checkpoint["step"] for checkpoint in runs.results(workspace, run_id)["checkpoints"]]
    assert saved in ([], [len(before)])
    runs.resume(workspace, run_id)
    status = finish(workspace, run_id)
    assert status.status == "completed", status.reason
    after = records(workspace, run_id, "train")
    assert [record["step"] for record in after] == list(range(1, 61))
    if saved:
        assert after[: len(before)] == before
    assert sorted(record["step"] for record in records(workspace, run_id, "eval")) == [0, 60]
