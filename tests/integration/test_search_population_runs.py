"""Population-based training on real runs: members copy better ones, and a killed search goes on."""

from __future__ import annotations

import pytest
import yaml
from test_search_runs import hermes, kill_driver, newest, wait_until, workspace  # noqa: F401

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace

PBT = ["--strategy", "pbt", "--trials", "2", "--segments", "3", "--space", "learning_rate=log:1e-5..2e-4"]
SHORT = ["--set", "total_steps=6", "--set", "num_requests_for_eval=16"]
SHORT += ["--set", "group_size=4", "--set", "batch_size=8"]


def test_a_population_killed_in_the_middle_goes_on_and_ends_with_a_schedule(
    workspace: Workspace,  # noqa: F811
) -> None:
    hermes(workspace, "search", "start", *PBT, *SHORT, "--detach")
    store = newest(workspace)
    wait_until(
        lambda: any(r.segment == 1 for r in store.records()) and store.is_driven(), "the second segment"
    )
    kill_driver(store)
    before = {r.trial: r for r in store.records() if r.state == "completed"}

    done = hermes(workspace, "search", "resume", store.search_id)
    records = store.records()
    assert store.state() == "completed", done.stdout
    assert all(r.state == "completed" for r in records), [(r.trial, r.reason) for r in records]
    assert {r.trial: r for r in records if r.trial in before} == before
    parts = {(r.segment, r.member): r for r in records if r.stage == "segment"}
    assert sorted(parts) == [(segment, member) for segment in range(3) for member in range(2)]
    by_trial = {r.trial: r for r in records}
    for (segment, member), part in parts.items():
        assert segment is not None
        assert (part.from_step, part.step) == (2 * segment, 2 * segment + 2)
        if segment == 0:
            assert part.parent is None
            continue
        assert part.parent is not None
        assert part.run_id is not None
        parent = by_trial[part.parent]
        # The run really began with the parent's weights and optimizer.
        began = RunConfig.from_yaml(workspace.run_dir(part.run_id) / "run.yaml").run.from_checkpoint
        assert parent.run_id is not None
        assert began == runs.results(workspace, parent.run_id)["checkpoints"][-1]["state_path"]
        rivals = [parts[(segment - 1, m)] for m in range(2)]
        best = max(rivals, key=lambda r: (r.value or 0.0, -(r.member or 0)))
        own = parts[(segment - 1, member)]
        if own is best:
            assert (parent, part.params) == (own, own.params)
        else:
            assert parent is best
            assert part.params != best.params
        assert [p.step for p in part.points("eval_percent_correct")] == [0, *range(2, part.step + 1, 2)]

    schedule = yaml.safe_load((store.folder / "schedule.yaml").read_text())
    assert [(part["from_step"], part["to_step"]) for part in schedule["segments"]] == [(0, 2), (2, 4), (4, 6)]
    best = max((parts[(2, m)] for m in range(2)), key=lambda r: (r.value or 0.0, -r.trial))
    assert schedule["segments"][-1]["trial"] == best.trial
    assert f"The best member, trial {best.trial}, was trained with" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--space", "lora_rank=8,16"], "a copied adapter has the rank"),
        (["--space", "group_size=4,8"], "steps of different size"),
        (["--space", "learning_rate=log:1e-5..2e-4", "--replicate", "3"], "schedule"),
        (["--space", "learning_rate=log:1e-5..2e-4", "--trials", "1"], "two members"),
    ],
)
def test_what_cannot_change_on_the_way_is_refused_with_the_reason(
    workspace: Workspace,  # noqa: F811
    arguments: list[str],
    said: str,
) -> None:
    done = hermes(workspace, "search", "start", "--strategy", "pbt", *arguments, check=False)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
