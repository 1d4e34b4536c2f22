"""A run keeps its newest checkpoints and its best one, listed and on the disk, and what it keeps loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from short_runs import end_everything

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace, build_run_config
from hermes_rl.engine.checkpoints import CheckpointStore, parse_path
from hermes_rl.environments.discovery import find
from hermes_rl.trainer.retention import HOLDS

STEPS, NEWEST = 8, 2
TINY = {"group_size": 4, "batch_size": 8, "num_requests_for_eval": 16, "steps_per_eval": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace.resolve(tmp_path_factory.mktemp("retention"))
    yield workspace
    end_everything(workspace)


def config(workspace: Workspace, **overrides: Any) -> RunConfig:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    fields = {**TINY, "save_checkpoint_interval": 1, "keep_checkpoints": NEWEST, "total_steps": STEPS}
    return build_run_config(environment, overrides=fields | overrides)


def listed(workspace: Workspace, run_id: str) -> list[dict[str, Any]]:
    path = workspace.run_dir(run_id) / "checkpoints.json"
    return json.loads(path.read_text()) if path.exists() else []


def paths(entries: list[dict[str, Any]]) -> set[str]:
    return {entry[key] for entry in entries for key in ("state_path", "sampler_path") if entry[key]}


def on_disk(workspace: Workspace, run_id: str) -> set[str]:
    found = Path(workspace.checkpoints).glob(f"*/*/{run_id}-*")
    return {f"tinker://{path.parts[-3].replace('~', ':')}/{path.parts[-2]}/{path.name}" for path in found}


@pytest.fixture(scope="module")
def ended(workspace: Workspace) -> str:
    """A run that was stopped in the middle, resumed, and completed."""
    run_id = runs.start(workspace, config(workspace))
    while not any(entry["step"] >= 4 for entry in listed(workspace, run_id)):
        status = runs.wait(workspace, run_id, timeout=0.05)
        assert status.status not in ("failed", "stopped"), status
    stopped = runs.stop(workspace, run_id)
    assert stopped.status in ("stopped", "completed"), stopped
    if stopped.status == "stopped":
        runs.resume(workspace, run_id)
    status = runs.wait(workspace, run_id, timeout=240)
    assert (status.status, status.step) == ("completed", STEPS), status
    return run_id


def test_a_run_ends_with_exactly_the_checkpoints_of_the_policy(workspace: Workspace, ended: str) -> None:
    evaluated = {
        record["step"]: record["eval_percent_correct"]
        for record in runs.read_metrics(workspace, ended)
        if record["kind"] == "eval" and record["step"] > 0
    }
    assert sorted(evaluated) == list(range(1, STEPS + 1))
    newest = {STEPS - 1, STEPS}
    entries = listed(workspace, ended)
    kept = {entry["step"] for entry in entries}
    assert newest <= kept
    assert len(kept) <= NEWEST + 1
    if kept == newest:
        assert max(evaluated[step] for step in newest) >= max(evaluated.values())
    else:
        (best,) = kept - newest
        assert evaluated[best] == max(evaluated.values())
    assert on_disk(workspace, ended) == paths(entries)
    assert not list(workspace.run_dir(ended).glob("checkpoints.doomed*"))


def test_what_is_kept_loads(workspace: Workspace, ended: str) -> None:
    store = CheckpointStore(workspace.checkpoints)
    for entry in listed(workspace, ended):
        loaded = store.load(entry["state_path"], optimizer=True)
        assert loaded.adapter
        assert loaded.optimizer
    assert store.meta(*parse_path(listed(workspace, ended)[-1]["sampler_path"])).rank == 32


def test_a_checkpoint_that_a_run_began_with_outlives_the_policy(workspace: Workspace, ended: str) -> None:
    """The run that began with it is stopped at once, and goes on after the other has gone far beyond."""
    steps = 80
    source = runs.start(workspace, config(workspace, keep_checkpoints=1, steps_per_eval=0, total_steps=steps))
    while not listed(workspace, source):
        assert not runs.wait(workspace, source, timeout=0.05).is_final
    begun = runs.start(
        workspace,
        config(workspace, total_steps=steps, steps_per_eval=0, save_checkpoint_interval=steps),
        from_checkpoint=source,
    )
    runs.stop(workspace, begun)
    chosen = RunConfig.from_yaml(workspace.run_dir(begun) / "run.yaml").run
    while listed(workspace, source)[-1]["step"] < chosen.from_step + 4:
        assert not runs.wait(workspace, source, timeout=0.05).is_final
    runs.stop(workspace, source)
    newest = listed(workspace, source)[-1]["step"]
    assert [entry["step"] for entry in listed(workspace, source)] == [chosen.from_step, newest]
    assert on_disk(workspace, source) == paths(listed(workspace, source))
    assert (workspace.run_dir(source) / HOLDS / begun).exists()

    runs.resume(workspace, begun)
    while (
        not (status := runs.wait(workspace, begun, timeout=0.05)).is_final and status.step <= chosen.from_step
    ):
        assert not status.reason
    assert status.step > chosen.from_step, status.reason
    runs.stop(workspace, begun)
