"""A run that begins where another one stands, under other fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from short_runs import end_everything

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace, build_run_config
from hermes_rl.environments.discovery import find
from hermes_rl.errors import ConfigError, UnknownRunError

TINY = {"group_size": 4, "batch_size": 8, "num_requests_for_eval": 16, "steps_per_eval": 0}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    workspace = Workspace.resolve(tmp_path_factory.mktemp("branching"))
    yield workspace
    end_everything(workspace)


@pytest.fixture(scope="module")
def earlier(workspace: Workspace) -> str:
    """A run of two steps, completed."""
    run_id = runs.start(workspace, config(workspace, total_steps=2))
    assert runs.wait(workspace, run_id, timeout=240).status == "completed"
    return run_id


def config(workspace: Workspace, seed: int = 0, **overrides: Any) -> RunConfig:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    return build_run_config(environment, overrides={**TINY, **overrides}, seed=seed)


def test_a_run_goes_on_from_another_runs_weights_under_its_own_fields(
    workspace: Workspace, earlier: str
) -> None:
    later = config(workspace, total_steps=4, learning_rate=6e-5, seed=1)
    run_id = runs.start(workspace, later, from_checkpoint=earlier)
    status = runs.wait(workspace, run_id, timeout=240)
    assert status.status == "completed", status.reason
    steps = [r["step"] for r in runs.read_metrics(workspace, run_id) if r["kind"] == "train"]
    assert steps == [3, 4]
    rates = {r["learning_rate"] for r in runs.read_metrics(workspace, run_id) if r["kind"] == "train"}
    assert rates == {6e-5}
    assert [saved["step"] for saved in runs.results(workspace, run_id)["checkpoints"]] == [4]
    kept = RunConfig.from_yaml(workspace.run_dir(run_id) / "run.yaml").run
    assert kept.from_step == 2
    assert kept.from_checkpoint == runs.results(workspace, earlier)["checkpoints"][-1]["state_path"]


@pytest.mark.parametrize(
    ("source", "overrides", "said"),
    [
        ("{earlier}", {"total_steps": 4, "lora_rank": 16}, "the adapter's matrices"),
        ("{earlier}", {"total_steps": 2}, "total_steps"),
        ("{earlier}@1", {"total_steps": 4}, "{earlier}@2"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused_with_the_reason(
    workspace: Workspace, earlier: str, source: str, overrides: dict[str, Any], said: str
) -> None:
    before = len(runs.list_runs(workspace))
    with pytest.raises(ConfigError) as refused:
        runs.start(workspace, config(workspace, **overrides), from_checkpoint=source.format(earlier=earlier))
    assert said.format(earlier=earlier) in str(refused.value)
    assert len(runs.list_runs(workspace)) == before


def test_a_run_that_does_not_exist_cannot_be_begun_from(workspace: Workspace) -> None:
    with pytest.raises(UnknownRunError):
        runs.start(workspace, config(workspace, total_steps=4), from_checkpoint="no-such-run")
    assert not Path(workspace.run_dir("no-such-run")).exists()
