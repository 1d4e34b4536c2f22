"""What is tried, and what a strategy learns: spaces of any size, earlier results, failures, lost journals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from tests.unit.search_simulation import DEFAULT, quality, search, training
from tests.unit.test_search_loop import ACCURACY, DyingTrials, Interrupted, keys
from typer.testing import CliRunner

from hermes_rl.cli.search import app
from hermes_rl.config import Workspace
from hermes_rl.errors import ConfigError, SearchError
from hermes_rl.search.definition import define_search
from hermes_rl.search.objective import CurvePoint, Objective
from hermes_rl.search.orchestrator import Orchestrator, create_search
from hermes_rl.search.promotion import furthest
from hermes_rl.search.ranking import candidates
from hermes_rl.search.replay import Recording, ReplayTrials
from hermes_rl.search.report import write_report
from hermes_rl.search.space import params_key
from hermes_rl.search.trial import TrialRecord
from hermes_rl.search.warm_start import warm_records

RATES = {"learning_rate": "log:1e-6..1e-3"}


def test_a_warm_start_begins_with_what_an_earlier_search_found(tmp_path: Path) -> None:
    earlier, _, loop = search(tmp_path, strategy="random", trials=20, space=RATES)
    loop.run()

    def distance(**fields: Any) -> float:
        """How far from the best learning rate the first choices of three searches are, as a factor's log."""
        far = []
        for seed in (1, 2, 3):
            store, _, loop = search(tmp_path, strategy="tpe", trials=4, space=RATES, seed=seed, **fields)
            loop.run()
            far += [abs(math.log(r.params["learning_rate"] / 6e-5)) for r in store.records()[1:]]
        return statistics.median(far)

    assert distance(warm_start=earlier.search_id) < 0.5 * distance()
    store, _, loop = search(
        tmp_path, strategy="tpe", trials=2, space=RATES, warm_start=earlier.search_id[:-1]
    )
    assert store.load().definition.warm_start == earlier.search_id
    loop.run()
    assert len(store.records()) == 2
    assert {r.trial for r in store.records()} == {0, 1}
    told = [t for t in loop._strategy.study.get_trials() if "from_search" in t.user_attrs]  # type: ignore[attr-defined]
    assert [t.value for t in told] == [r.value for r in earlier.records()]


def test_the_last_search_is_the_one_before_and_one_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="no search"):
        search(tmp_path, strategy="tpe", space=RATES, warm_start="last")
    assert not list(tmp_path.glob("searches/*"))
    earlier, _, loop = search(tmp_path, strategy="random", trials=3, space=RATES)
    loop.run()
    store, _, _ = search(tmp_path, strategy="gp", space=RATES, warm_start="last")
    assert store.load().definition.warm_start == earlier.search_id


def test_an_earlier_search_whose_values_mean_something_else_is_refused(tmp_path: Path) -> None:
    space = {**RATES, "lora_rank": [16, 32]}
    earlier, _, loop = search(tmp_path, strategy="random", trials=6, space=space)
    loop.run()
    warm: dict[str, Any] = {"strategy": "tpe", "space": space, "warm_start": earlier.search_id}
    for change, reason in (
        ({"strategy": "grid", "space": {"lora_rank": [16, 32]}}, "grid has no warm start"),
        ({"strategy": "random", "refine": 2}, "random has no warm start"),
        ({"environment": "other"}, "environment is made_up, not other"),
        ({"profile": "qwen3-8b"}, "profile is embedded, not qwen3-8b"),
        ({"objective": "loss:min"}, "objective is eval_percent_correct, not loss:min"),
        ({"space": {"learning_rate": "log:2e-3..3e-3"}}, "None of the 6 completed"),
    ):
        with pytest.raises(SearchError, match=reason):
            search(tmp_path, **{**warm, **change})
    # Only what was tried with the rank that is in force now.
    store, runner, _ = search(tmp_path, **{**warm, "space": RATES})
    counted = warm_records(store.workspace, store.load().definition, runner)
    assert 0 < len(counted) < 6
    assert {record.params["lora_rank"] for record in counted} == {32}


def test_the_steps_of_the_two_searches_are_compared_before_anything_starts(tmp_path: Path) -> None:
    arguments = ["start", "--workspace", str(tmp_path), "-e", "arithmetic_tinker", "--dry-run"]
    arguments += ["--space", "learning_rate=log:1e-6..1e-3", "--strategy", "tpe"]
    workspace = Workspace.resolve(tmp_path)
    fields = {
        "environment": "arithmetic_tinker",
        "replicate": 0,
        "strategy": "random",
        "trials": 3,
        "space": RATES,
    }
    runner = ReplayTrials(training, DEFAULT)
    earlier = create_search(workspace, define_search({**fields, "set": {"total_steps": 48}}), runner)
    Orchestrator(earlier, runner).run()
    refused = CliRunner().invoke(app, [*arguments, "--warm-start", "last"])
    assert "its total_steps was 48, here it is 50" in str(refused.exception)
    refused = CliRunner().invoke(app, [*arguments, "--warm-start", "nothing"])
    assert "no search 'nothing'" in str(refused.exception)
    taken = CliRunner().invoke(app, [*arguments, "--warm-start", "last", "--set", "total_steps=48"])
    assert taken.exit_code == 0, taken.output


def test_a_kill_while_earlier_results_are_added_loses_none_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, _, loop = search(tmp_path, strategy="random", trials=8, space=RATES)
    loop.run()
    store, runner, loop = search(
        tmp_path, strategy="tpe", trials=3, space=RATES, warm_start=earlier.search_id
    )
    add, added = optuna.Study.add_trial, 0

    def dying(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        nonlocal added
        added += 1
        if added == 4:
            raise Interrupted
        add(study, trial)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "add_trial", dying)
        with pytest.raises(Interrupted):
            loop.run()
    loop = Orchestrator(store, runner)
    loop.run()
    told = [t for t in loop._strategy.study.get_trials() if "from_search" in t.user_attrs]  # type: ignore[attr-defined]
    assert sorted(t.user_attrs["from_search"] for t in told) == [f"{earlier.search_id}/{n}" for n in range(8)]


def test_a_constraint_may_read_a_field_that_is_not_searched(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "space": {"batch_size": [4, 16, 32]},
        "constraints": ["group_size <= batch_size"],
    }
    store, _, loop = search(tmp_path, **fields)  # group_size is 8
    definition = store.load().definition
    assert definition.in_force == {"group_size": 8, "batch_size": 16}
    assert definition.planned_trials() == 2
    loop.run()
    assert sorted(record.params["batch_size"] for record in store.records()) == [16, 32]
    with pytest.raises(ConfigError, match="grop_size"):
        search(tmp_path / "other", **{**fields, "constraints": ["grop_size <= batch_size"]})
    with pytest.raises(SearchError, match="No configuration"):
        search(tmp_path / "other", **{**fields, "constraints": ["group_size > batch_size + 8"]})
    for strategy in ("random", "grid"):
        with pytest.raises(SearchError, match="cannot be computed"):
            search(tmp_path / "other", **{**fields, "constraints": ["loss_fn > 3"], "strategy": strategy})
    assert not list(tmp_path.glob("other/searches/*"))


def test_a_condition_may_read_a_field_that_is_not_searched_and_the_report_is_written(tmp_path: Path) -> None:
    space = {
        "learning_rate": {"log_uniform": [1e-5, 2e-4], "when": "group_size == 8"},
        "batch_size": {"choice": [16, 32], "when": "loss_fn == 'importance_sampling'"},
        "lora_rank": {"choice": [16, 32], "when": "loss_fn == 'ppo'"},
    }
    store, _, loop = search(tmp_path, space=space, strategy="random", trials=12)
    loop.run()
    assert len(store.records()) == 12
    assert all(set(record.params) == {"learning_rate", "batch_size"} for record in store.records()[1:])
    assert "Importance" in write_report(store).read_text(encoding="utf-8")


@pytest.mark.parametrize("strategy", ["random", "tpe"])
def test_a_space_of_a_billion_points_is_searched_without_being_gone_through(
    tmp_path: Path, strategy: str
) -> None:
    checked = 0

    def check(_: Mapping[str, Any]) -> None:
        nonlocal checked
        checked += 1

    space = {"batch_size": "int:16..100000", "lora_rank": "int:4..100000"}
    runner = ReplayTrials(training, DEFAULT, check=check)
    fields = {"environment": "made_up", "replicate": 0, "strategy": strategy, "trials": 6, "space": space}
    store = create_search(Workspace.resolve(tmp_path), define_search(fields), runner)
    assert Orchestrator(store, runner).run().state == "completed"
    assert len(store.records()) == 6
    assert checked < 100


def test_a_small_space_is_not_checked_point_by_point_before_its_first_trial(tmp_path: Path) -> None:
    checked = 0

    def check(params: Mapping[str, Any]) -> None:
        nonlocal checked
        checked += 1
        if params["batch_size"] % 2:
            raise ConfigError("odd")

    runner = ReplayTrials(training, DEFAULT)
    space = {"batch_size": "int:16..25", "lora_rank": "int:1..500"}
    fields = {"environment": "made_up", "replicate": 0, "strategy": "random", "trials": 5000, "space": space}
    store = create_search(Workspace.resolve(tmp_path), define_search(fields), runner)
    runner._check = check
    with store.writing():
        strategy = Orchestrator(store, runner)._make_strategy()
        assert strategy.next([]) is not None
    assert checked < 10
    # And it ends when all that is allowed was tried.
    space = {"batch_size": "int:16..25", "lora_rank": [16, 32]}
    fields |= {"trials": 20, "space": space}
    store = create_search(Workspace.resolve(tmp_path), define_search(fields), ReplayTrials(training, DEFAULT))
    Orchestrator(store, runner).run()
    assert len(store.records()) == len(set(keys(store.records()))) == 10


def test_the_command_line_takes_constraints_on_fields_that_are_not_searched(tmp_path: Path) -> None:
    arguments = ["start", "--dry-run", "--space", "batch_size=16,32,64", "--workspace", str(tmp_path)]
    arguments += ["-e", "arithmetic_tinker", "--set", "group_size=16"]
    shown = CliRunner().invoke(app, [*arguments, "--constraint", "group_size < batch_size"])
    assert shown.exit_code == 0, shown.output
    assert "2 trials of" in shown.output
    assert "batch_size=16" not in shown.output
    refused = CliRunner().invoke(app, [*arguments, "--constraint", "grop_size <= batch_size"])
    assert "group_size" in str(refused.exception)


@pytest.mark.parametrize("parallel", [1, 5, 24])
def test_refinement_begins_when_the_first_trials_have_ended_and_goes_around_the_best(
    tmp_path: Path, parallel: int
) -> None:
    def uneven(config: Mapping[str, Any], seed: int) -> Recording:
        """The worse, the quicker: who does not wait refines around the worst."""
        return replace(training(config, seed), seconds_per_step=quality(config) ** 4)

    fields = {"strategy": "random", "trials": 12, "refine": 4, "space": RATES, "parallel": parallel}
    store, _, _ = search(tmp_path, **fields)
    assert Orchestrator(store, ReplayTrials(uneven, DEFAULT, tick=0.1)).run().state == "completed"
    records = store.records()
    assert [r.stage for r in records] == ["search"] * 12 + ["refine"] * 8
    assert min(r.started_at for r in records[12:]) >= max(r.ended_at or 0.0 for r in records[:12])
    best = [r.params["learning_rate"] for r in candidates(records[:12], ACCURACY)[:4]]
    for record in records[12:]:  # a window of 0.4 of the range, around the best and what is near them
        nearest = min(abs(math.log(record.params["learning_rate"] / centre)) for centre in best)
        assert nearest <= (0.2 + 0.1) * math.log(1e3)


def test_what_diverges_at_a_rung_is_never_promoted(tmp_path: Path) -> None:
    def losing(config: Mapping[str, Any], seed: int) -> Recording:
        recording = training(config, seed)
        points = [replace(p, value=4 * (1 - p.value)) for p in recording.curves["eval_percent_correct"]]
        if config["learning_rate"] > 5e-5:  # for the diverged, nothing is "smaller" than anything
            points = [replace(p, value=math.nan if p.step >= 8 else p.value) for p in points]
        return Recording({"loss": points}, recording.total_steps)

    space = {"learning_rate": [1e-5, 2e-5, 3e-5, 4e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4], "batch_size": [32, 64]}
    for seed in range(3):
        store, _, loop = search(
            tmp_path, losing, space=space, pruner="promote", rungs=8, objective="loss:min", seed=seed
        )
        loop.run()
        diverged = [r for r in store.records() if r.params["learning_rate"] > 5e-5]
        assert len(diverged) == 10
        assert {(r.state, r.step, r.rung) for r in diverged} == {("pruned", 8, 0)}
        assert sum(r.state == "completed" for r in store.records()) >= 2


def test_the_paused_trial_that_is_finished_at_the_end_is_one_that_has_a_value() -> None:
    def paused(trial: int, rung: int, value: float | None) -> TrialRecord:
        values = None if value is None else [value]
        return TrialRecord(trial=trial, stage="search", params={}, seed=0, rung=rung, values=values)

    loss = Objective.parse("loss:min")
    assert furthest([paused(0, 0, 3.1), paused(1, 0, None), paused(2, 0, 2.9)], loss).trial == 2
    assert furthest([paused(0, 0, 3.1), paused(1, 1, None), paused(2, 1, 3.5)], loss).trial == 2
    assert furthest([paused(0, 0, math.inf), paused(1, 0, 0.4)], ACCURACY).trial == 1


@pytest.mark.parametrize("strategy", ["tpe", "gp"])
def test_a_strategy_stays_away_from_where_trials_diverge(tmp_path: Path, strategy: str) -> None:
    def diverging(config: Mapping[str, Any], seed: int) -> Recording:
        recording = training(config, seed)
        if config["learning_rate"] > 1e-4:
            points = [*recording.curves["eval_percent_correct"][:-1], CurvePoint(48, math.nan, 256)]
            return Recording({"eval_percent_correct": points}, recording.total_steps)
        return recording

    trials = 24 if strategy == "tpe" else 12  # a Gaussian process takes its time
    space = {"learning_rate": "log:1e-6..1e-2"}
    fields = {"strategy": strategy, "trials": trials, "parallel": 1, "space": space}
    store, _, loop = search(tmp_path, diverging, **fields)
    loop.run()
    records = store.records()
    diverged = [record for record in records if record.state == "diverged"]
    assert 0 < len(diverged) < trials / 2  # half of the range; told as failed, 17 of 24 are
    told = loop._strategy.study.get_trials()  # type: ignore[attr-defined]
    for record in diverged:
        trial = told[record.study_number or 0]
        if strategy == "tpe":
            assert trial.state == optuna.trial.TrialState.PRUNED
            assert trial.constraints == {"allowed": 1.0}
        else:
            assert trial.user_attrs == {"diverged": True}
            assert trial.value <= min(r.value for r in records[: record.trial] if r.value is not None)


def test_a_run_that_its_trainer_ended_as_diverged_is_a_diverged_trial(tmp_path: Path) -> None:
    def ended(config: Mapping[str, Any], seed: int) -> Recording:
        recording = training(config, seed)
        said = "loss is nan at step 10: training has diverged."
        return replace(recording, fails_at=10, reason=said) if config["batch_size"] == 64 else recording

    store, _, loop = search(tmp_path, ended, space={"batch_size": [16, 64]})
    loop.run()
    assert {r.params["batch_size"]: r.state for r in store.records()} == {16: "completed", 64: "diverged"}


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe"])
@pytest.mark.parametrize("pruner", ["none", "asha"])
def test_a_study_that_lost_its_end_is_never_told_another_trials_value(
    tmp_path: Path, strategy: str, pruner: str
) -> None:
    space = {"learning_rate": [1e-5, 2e-5, 4e-5, 6e-5], "batch_size": [16, 32, 64]}
    store, _, _ = search(tmp_path, strategy=strategy, trials=12, space=space, parallel=3, pruner=pruner)
    journal = store.folder / "study.log"
    dying = DyingTrials(training, DEFAULT)
    for looks, kept in ((60 if pruner == "none" else 30, 0.5), (15, 0.9), (5, 0.6)):
        dying.looks_left = looks
        with pytest.raises(Interrupted):
            Orchestrator(store, dying).run()
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[: int(len(lines) * kept)]))  # the records' end was on the disk
    loop = Orchestrator(store, dying)
    assert loop.run().state == "completed"
    records = store.records()
    assert len(records) == len(set(keys(records))) == 12
    told = loop._strategy.study.get_trials()  # type: ignore[attr-defined]
    by_record = {t.user_attrs["record"]: t for t in told if "record" in t.user_attrs}
    assert by_record
    for record in records:
        trial = by_record.get(record.trial) or told[record.study_number or 0]
        assert params_key(trial.params) == params_key(record.params)
        assert trial.state.name == {"completed": "COMPLETE", "pruned": "PRUNED"}[record.state]
        if record.state == "completed":
            assert trial.value == record.value
    values = {params_key(record.params): record.value for record in records if record.state == "completed"}
    for trial in told:
        assert trial.state.is_finished()
        if trial.state == optuna.trial.TrialState.COMPLETE:
            assert trial.value == values[params_key(trial.params)]
