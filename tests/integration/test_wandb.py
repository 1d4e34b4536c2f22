"""Weights & Biases beside a real run: offline folders that sync later, and a service that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_service import SweepService

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.runs.store import open_store

SMALL: dict[str, Any] = {
    "total_steps": 4,
    "steps_per_eval": 0,
    "num_requests_for_eval": 8,
    "group_size": 4,
    "batch_size": 8,
    "wandb_project": "arithmetic",
}
KEY = "w" * 40


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path_factory.mktemp("wandb") / "w")
    yield made
    for run in runs.list_runs(made):
        if not run.is_final:
            runs.stop(made, run.run_id)
    for engine in list_engines(made):
        stop_engine(made, engine.key)


def start(workspace: Workspace, **overrides: Any) -> str:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    return runs.start(workspace, build_run_config(environment, overrides=SMALL | overrides))


def completed(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    status = runs.wait(workspace, run_id, timeout=400)
    assert status.status == "completed", status
    return [record for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]


def folders(workspace: Workspace, run_id: str) -> list[Path]:
    return sorted((workspace.run_dir(run_id) / "wandb").glob("*run-*"))


def synced(folder: Path) -> list[dict[str, Any]]:
    """The rows that the service has after ``wandb sync FOLDER``."""
    with SweepService([]) as service:
        env = {**os.environ, "WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        env.pop("WANDB_MODE", None)
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--no-skip-online", str(folder)],
            capture_output=True,
            text=True,
            env=env,
            timeout=400,
            check=False,
        )
        rows = [row for run in service.runs.values() for row in run["history"]]
    assert rows, done.stdout + done.stderr
    return rows


def test_an_offline_run_is_there_to_sync_later_with_every_metric(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = start(workspace)
    trained = completed(workspace, run_id)
    (folder,) = folders(workspace, run_id)
    assert folder.name.startswith("offline-run-")
    assert list(folder.glob("*.wandb"))
    rows = {row["step"]: row for row in synced(folder) if "train/loss" in row}
    assert sorted(rows) == [1, 2, 3, 4]
    for record in trained:
        assert rows[record["step"]]["train/loss"] == pytest.approx(record["loss"])
        assert rows[record["step"]]["train/reward_mean"] == pytest.approx(record["reward_mean"])


def test_a_wandb_process_that_dies_costs_no_step(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = start(workspace, total_steps=40)
    trainer = _trainer_that_trains(workspace, run_id)
    killed = [child for child in trainer.children(recursive=True) if "wandb" in child.name()]
    assert killed
    for child in killed:
        child.kill()
    assert [record["step"] for record in completed(workspace, run_id)] == list(range(1, 41))


def test_a_service_that_goes_away_costs_no_step_and_its_rows_sync_later(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HERMES_RL_WANDB_FINISH_SECONDS", "3")
    with SweepService([]) as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        run_id = start(workspace, total_steps=40)
        _trainer_that_trains(workspace, run_id)
        assert run_id in service.runs
    assert [record["step"] for record in completed(workspace, run_id)] == list(range(1, 41))
    (folder,) = folders(workspace, run_id)
    steps = {row["step"] for row in synced(folder) if "train/loss" in row}
    assert steps == set(range(1, 41))


def test_a_service_that_never_answers_does_not_keep_a_run_from_starting(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HERMES_RL_WANDB_FINISH_SECONDS", "3")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert len(completed(workspace, start(workspace))) == 4


def _trainer_that_trains(workspace: Workspace, run_id: str) -> psutil.Process:
    deadline = time.monotonic() + 240
    while runs.glance(workspace, run_id).step < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rows = open_store(workspace.state_url).processes(run_id)
    return psutil.Process(next(row.pid for row in rows if row.role == "trainer"))
