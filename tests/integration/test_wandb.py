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
from hermes_rl.config.metric_schema import METRICS
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
    rows = synced(folder)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    records = runs.read_metrics(workspace, run_id)
    assert trained == [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 4]
    schema = {kind: {metric.name for metric in METRICS if metric.kind == kind} for kind in ("train", "eval")}
    for record in records:
        kind, step = record["kind"], record["step"]
        figures = {name: value for name, value in record.items() if name not in ("kind", "step", "time")}
        if kind == "train":
            assert figures.keys() <= schema[kind]
            shares = [figures[f"{part}_fraction"] for part in ("waiting", "training", "publishing")]
            assert 0.5 < sum(shares) <= 1.0
            for what in ("sampled", "trained"):
                speed = figures[f"{what}_tokens"] / figures["seconds"]
                assert figures[f"{what}_tokens_per_second"] == pytest.approx(speed)
        if kind == "eval":
            assert figures.keys() >= schema[kind]
        expected = {f"{kind}/{name}": pytest.approx(value) for name, value in figures.items()}
        assert any(
            row["step"] == step and all(row.get(name) == value for name, value in expected.items())
            for row in rows
        ), record


def test_a_run_that_was_killed_and_resumed_has_no_step_twice_in_wandb(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = start(workspace, total_steps=30, save_checkpoint_interval=4)
    trainer = _trainer_that_trains(workspace, run_id, step=6)
    trainer.kill()
    assert runs.wait(workspace, run_id, timeout=240).status == "failed"
    saved = max(checkpoint["step"] for checkpoint in runs.results(workspace, run_id)["checkpoints"])
    runs.resume(workspace, run_id)
    assert [record["step"] for record in completed(workspace, run_id)] == list(range(1, 31))
    both = folders(workspace, run_id)
    assert len(both) == 2
    steps = [row["step"] for folder in both for row in synced(folder) if "train/loss" in row]
    assert len(steps) == len(set(steps)), "a step stands twice"
    # The client may have been killed before it had written rows of steps before the checkpoint.
    assert set(steps) >= set(range(saved + 1, 31))


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


def _trainer_that_trains(workspace: Workspace, run_id: str, step: int = 1) -> psutil.Process:
    deadline = time.monotonic() + 240
    while runs.glance(workspace, run_id).step < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rows = open_store(workspace.state_url).processes(run_id)
    return psutil.Process(next(row.pid for row in rows if row.role == "trainer"))
