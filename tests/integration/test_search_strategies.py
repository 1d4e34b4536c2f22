"""Every strategy and every way to stop early over real runs, killed in the middle and resumed."""

from __future__ import annotations

import pytest
from sweep_service import SweepService
from test_search_runs import TINY, hermes, kill_driver, newest, wait_until, workspace  # noqa: F401
from test_search_wandb import use

from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.search.store import SearchStore
from hermes_rl.search.trial import FINISHED

GRID = ["--space", "learning_rate=2e-5,4e-5,6e-5"]
RANGE = ["--space", "learning_rate=log:1e-5..2e-4", "--trials", "3"]


def _killed_and_resumed(workspace: Workspace, *options: str) -> SearchStore:  # noqa: F811
    hermes(workspace, "search", "start", *options, *TINY, "--detach")
    store = newest(workspace)
    wait_until(lambda: any(r.state in FINISHED or r.state == "paused" for r in store.records()), "a trial")
    kill_driver(store)
    before = [record for record in store.records() if record.state in FINISHED]
    assert store.state() == "interrupted"

    hermes(workspace, "search", "resume", store.search_id)
    assert store.state() == "completed", (store.folder / "search.log").read_text()
    records = store.records()
    by_trial = {record.trial: record for record in records}
    assert all(by_trial[record.trial] == record for record in before)
    assert {record.state for record in records} <= {"completed", "pruned"}, records
    assert len({str(sorted(record.params.items())) for record in records}) == len(records)
    assert all(run.is_final for run in runs.list_runs(workspace, store.search_id))
    return store


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe", "gp"])
def test_a_strategy_killed_in_the_middle_goes_on_and_loses_nothing(
    workspace: Workspace,  # noqa: F811
    strategy: str,
) -> None:
    space = GRID if strategy == "grid" else RANGE
    store = _killed_and_resumed(workspace, *space, "--strategy", strategy)
    searched = [record for record in store.records() if record.stage == "search"]
    assert len(searched) == 3
    assert {record.state for record in searched} == {"completed"}
    if strategy == "grid":
        assert sorted(record.params["learning_rate"] for record in searched) == [2e-5, 4e-5, 6e-5]
    else:
        assert all(1e-5 <= record.params["learning_rate"] <= 2e-4 for record in searched)


def test_a_refinement_killed_in_the_middle_goes_on_around_the_best(workspace: Workspace) -> None:  # noqa: F811
    store = _killed_and_resumed(workspace, *RANGE, "--strategy", "random", "--refine", "1")
    stages = [record.stage for record in store.records()]
    assert stages.count("search") == 3
    assert stages.count("refine") == 2


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median", "promote"])
def test_early_stopping_killed_in_the_middle_goes_on(workspace: Workspace, pruner: str) -> None:  # noqa: F811
    store = _killed_and_resumed(workspace, *GRID, "--pruner", pruner)
    records = store.records()
    assert sorted(record.params["learning_rate"] for record in records) == [2e-5, 4e-5, 6e-5]
    assert any(record.state == "completed" for record in records)
    for record in records:
        steps = [point.step for point in record.points("eval_percent_correct")]
        assert steps == ([0, 1, 2] if record.state == "completed" else [0, 1])


def test_a_sweep_killed_in_the_middle_goes_on(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [{"learning_rate": rate, "total_steps": 2} for rate in (6e-5, 2e-5)]
    with SweepService(wanted) as service:
        use(service, monkeypatch)
        options = ["--strategy", "wandb", "--sweep-method", "grid", "--space", "learning_rate=2e-5,6e-5"]
        store = _killed_and_resumed(workspace, *options, "--set", "wandb_project=tuning")
        assert sorted(r.params["learning_rate"] for r in store.records()) == [2e-5, 4e-5, 6e-5]
        assert list(service.sweeps) == ["sweep0"]
        assert sum(run.get("joined") == "sweep0" for run in service.runs.values()) == 2
