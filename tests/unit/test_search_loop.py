"""The loop of a search over replayed trials: nothing is lost, nothing runs twice, nothing hangs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from tests.unit.search_simulation import DEFAULT, quality, search, training

from hermes_rl.errors import ConfigError, SearchError, TrialRefusedError, WorkspaceError
from hermes_rl.search.definition import define_search
from hermes_rl.search.drive import extend
from hermes_rl.search.objective import CurvePoint, Objective
from hermes_rl.search.orchestrator import Orchestrator
from hermes_rl.search.ranking import candidates, default_record
from hermes_rl.search.replay import Recording, ReplayTrials
from hermes_rl.search.runner import Observation, TrialRequest
from hermes_rl.search.space import params_key
from hermes_rl.search.store import SearchFile, SearchStore
from hermes_rl.search.summary import summarize, verdict_sentences
from hermes_rl.search.trial import TrialRecord

ACCURACY = Objective()


def keys(records: list) -> list[str]:
    return [params_key(record.params) for record in records]


def test_the_grid_tries_every_configuration_once_and_finds_a_good_one(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, preset="article-grid")
    assert loop.run().state == "completed"
    records = store.records()
    assert len(records) == len(set(keys(records))) == 27
    assert all(record.state == "completed" and record.seed == 0 for record in records)
    best = candidates(records, ACCURACY)[0]
    reachable = max(quality({**DEFAULT, **record.params}) for record in records)
    assert quality({**DEFAULT, **best.params}) > reachable - 0.08
    summary = summarize(store)
    assert summary.default is not None
    assert summary.default.params == {"learning_rate": 0.00004, "batch_size": 16, "lora_rank": 32}
    assert summary.default_rank is not None


def test_the_default_is_run_even_where_the_grid_does_not_hold_it(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, space={"batch_size": [32, 64]})
    loop.run()
    records = store.records()
    assert [record.stage for record in records] == ["default", "search", "search"]
    default = default_record(records)
    assert default is not None
    assert default.params == {"batch_size": 16}


@pytest.mark.parametrize("strategy", ["random", "tpe", "gp"])
def test_a_strategy_begins_with_the_default_and_repeats_nothing(tmp_path: Path, strategy: str) -> None:
    space = {"learning_rate": "log:1e-5..2e-4", "batch_size": [16, 32, 64]}
    store, _, loop = search(tmp_path, strategy=strategy, trials=12, space=space)
    loop.run()
    records = store.records()
    assert records[0].is_default
    assert len(records) == len(set(keys(records))) == 12
    assert all(1e-5 <= record.params["learning_rate"] <= 2e-4 for record in records)


def test_a_finite_space_ends_the_search_when_all_of_it_was_tried(tmp_path: Path) -> None:
    store, _, loop = search(
        tmp_path, strategy="tpe", trials=50, space={"batch_size": [16, 32], "lora_rank": [16, 32]}
    )
    assert loop.run().state == "completed"
    assert len(store.records()) == 4


def test_refinement_goes_near_the_best(tmp_path: Path) -> None:
    store, _, loop = search(
        tmp_path,
        strategy="random",
        trials=10,
        refine=3,
        refine_rounds=2,
        space={"learning_rate": "log:1e-6..1e-2"},
    )
    loop.run()
    records = store.records()
    refined = [record for record in records if record.stage == "refine"]
    assert len(records) == 16
    assert len(refined) == 6
    best = candidates([r for r in records if r.stage == "search"], ACCURACY)[0].params["learning_rate"]
    nearest = min(abs(math.log(record.params["learning_rate"] / best)) for record in refined)
    assert nearest <= 0.5 * 0.4 * math.log(1e4)


def test_constraints_hold_for_every_trial(tmp_path: Path) -> None:
    store, _, loop = search(
        tmp_path,
        strategy="tpe",
        trials=15,
        space={"batch_size": [16, 32, 64], "group_size": "int:2..64:2"},
        constraints=["group_size <= batch_size", "batch_size % group_size == 0"],
    )
    loop.run()
    records = store.records()
    assert len(records) == 15
    assert all(record.params["batch_size"] % record.params["group_size"] == 0 for record in records)


@pytest.mark.parametrize("pruner", ["asha", "promote", "median", "hyperband"])
def test_early_stopping_saves_steps_and_spares_the_best_and_the_default(tmp_path: Path, pruner: str) -> None:
    store, _, loop = search(tmp_path, preset="article-grid", pruner=pruner, parallel=3)
    loop.run()
    records = store.records()
    assert len(records) == 27
    assert sum(record.step for record in records) < 27 * 48 * 0.9
    assert default_record(records) is not None
    best = candidates(records, ACCURACY)[0]
    reachable = max(quality({**DEFAULT, **record.params}) for record in records)
    assert quality({**DEFAULT, **best.params}) > reachable - 0.1


class Interrupted(Exception):
    """Stands for the end of the process."""


class Keyless(ReplayTrials):
    """No run can be started until somebody removes the cause."""

    repaired = False

    def start(self, request: TrialRequest) -> str:
        if not self.repaired:
            raise WorkspaceError("No key: TINKER_API_KEY is not set.", hint="Set TINKER_API_KEY.")
        return super().start(request)


class DyingTrials(ReplayTrials):
    """Replays trials until the process that asks dies, after so many looks."""

    looks_left = 40

    def wait(self) -> None:
        super().wait()
        self.looks_left -= 1
        if self.looks_left == 0:
            raise Interrupted


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe", "gp"])
def test_a_search_killed_in_the_middle_goes_on_with_nothing_finished_lost(
    tmp_path: Path, strategy: str
) -> None:
    space = {"learning_rate": [2e-5, 4e-5, 6e-5], "batch_size": [16, 32, 64]}
    store, _, _ = search(tmp_path, strategy=strategy, trials=9, space=space, parallel=3)
    dying = DyingTrials(training, DEFAULT)
    before: list = []
    for looks in (60, 3, 70):
        dying.looks_left = looks
        with pytest.raises(Interrupted):
            Orchestrator(store, dying).run()
        finished = [record for record in store.records() if record.state == "completed"]
        assert len(finished) >= len(before)
        assert {record.trial for record in before} <= {record.trial for record in finished}
        before = finished
    assert 0 < len(before) < 9
    assert Orchestrator(store, dying).run().state == "completed"
    records = store.records()
    assert len(records) == len(set(keys(records))) == 9
    assert all(record.state == "completed" for record in records)


@pytest.mark.parametrize("pruner", ["none", "promote"])
def test_a_run_started_by_a_process_that_died_before_it_could_say_so_is_taken_over(
    tmp_path: Path, pruner: str
) -> None:
    class DyingAtStarts(ReplayTrials):
        """Dies right after each third start or resumption of a run."""

        launches = 0

        def start(self, request: TrialRequest) -> str:
            super().start(request)
            return self._die_or_return(super().find(request.trial))

        def resume(self, request: TrialRequest, run_id: str) -> str:
            return self._die_or_return(super().resume(request, run_id))

        def _die_or_return(self, run_id: str | None) -> str:
            self.launches += 1
            if self.launches % 3 == 0:
                raise Interrupted
            assert run_id is not None
            return run_id

    store, _, _ = search(tmp_path, preset="article-grid", pruner=pruner, rungs=8, parallel=2)
    dying = DyingAtStarts(training, DEFAULT)
    deaths = 0
    while True:
        try:
            Orchestrator(store, dying).run()
            break
        except Interrupted:
            deaths += 1
    assert deaths > 5
    records = store.records()
    assert len({record.run_id for record in records}) == len(dying._started) == 27
    assert {record.state for record in records} <= {"completed", "pruned"}


def test_a_search_resumed_after_its_runs_are_gone_runs_them_again(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid", parallel=2)
    dying = DyingTrials(training, DEFAULT)
    with pytest.raises(Interrupted):
        Orchestrator(store, dying).run()
    assert [r.state for r in store.records()].count("running") == 2
    Orchestrator(store, ReplayTrials(training, DEFAULT)).run()
    records = store.records()
    assert len(records) == len(set(keys(records))) == 27
    assert all(record.state == "completed" for record in records)


def test_a_cut_off_line_costs_only_that_line(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, space={"batch_size": [16, 32]})
    loop.run()
    with open(store.folder / "trials.jsonl", "a") as file:
        file.write('{"trial": 7, "stage": "sea')
    assert len(store.records()) == 2
    record = store.records()[0]
    store.append(record)
    assert len(store.records()) == 2


def failing(config: Mapping[str, Any], seed: int) -> Recording:
    recording = training(config, seed)
    if config["batch_size"] == 32:
        return Recording(recording.curves, recording.total_steps, fails_at=10, reason="out of memory")
    return recording


@pytest.mark.parametrize("strategy", ["grid", "tpe", "gp"])
def test_a_failed_trial_is_kept_as_failed_and_the_search_goes_on(tmp_path: Path, strategy: str) -> None:
    space = {"batch_size": [16, 32, 64], "lora_rank": [16, 32]}
    store, _, loop = search(tmp_path, failing, strategy=strategy, trials=6, space=space)
    assert loop.run().state == "completed"
    records = store.records()
    assert {r.state for r in records if r.params["batch_size"] == 32} == {"failed"}
    assert {r.reason for r in records if r.state == "failed"} == {"out of memory"}
    assert sum(r.state == "completed" for r in records) == 4


def test_a_diverged_trial_is_called_that_and_never_wins(tmp_path: Path) -> None:
    def diverging(config: Mapping[str, Any], seed: int) -> Recording:
        recording = training(config, seed)
        if config["batch_size"] == 64:
            points = [*recording.curves["eval_percent_correct"][:-1], CurvePoint(48, math.nan, 256)]
            return Recording({"eval_percent_correct": points}, recording.total_steps)
        return recording

    store, _, loop = search(tmp_path, diverging, strategy="tpe", trials=3, space={"batch_size": [16, 32, 64]})
    loop.run()
    states = {record.params["batch_size"]: record.state for record in store.records()}
    assert states == {16: "completed", 32: "completed", 64: "diverged"}


def test_a_search_in_which_everything_fails_stops_early_with_the_reason(tmp_path: Path) -> None:
    def broken(config: Mapping[str, Any], seed: int) -> Recording:
        return Recording({}, 48, fails_at=1, reason="no such file")

    store, _, loop = search(tmp_path, broken, preset="article-grid")
    with pytest.raises(SearchError, match="no such file"):
        loop.run()
    assert len(store.records()) < 8
    assert store.load().state == "failed"


def test_a_metric_that_no_run_logs_is_named_with_those_that_are(tmp_path: Path) -> None:
    _, _, loop = search(tmp_path, preset="article-grid", objective="eval_precent_correct")
    with pytest.raises(SearchError, match=r"eval_precent_correct.*eval_percent_correct"):
        loop.run()


def test_budgets_end_a_search(tmp_path: Path) -> None:
    for budget, limit in (({"steps": 500}, 500), ({"minutes": 4}, 600)):
        store, _, loop = search(tmp_path, preset="article-grid", budget=budget)
        file = loop.run()
        assert file.state == "completed"
        assert "budget" in (file.reason or "")
        assert sum(record.step for record in store.records()) <= limit
        assert not any(record.state == "running" for record in store.records())


def test_a_stop_request_ends_it_and_resume_finishes_it(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid")

    class Stopping(ReplayTrials):
        def wait(self) -> None:
            super().wait()
            if self.now() == 100:
                store.stop_file.touch()

    assert Orchestrator(store, Stopping(training, DEFAULT)).run().state == "stopped"
    assert not any(record.state == "running" for record in store.records())
    assert Orchestrator(store, ReplayTrials(training, DEFAULT)).run().state == "completed"
    assert sum(record.state == "completed" for record in store.records()) == 27


def test_two_processes_cannot_drive_one_search(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, preset="article-grid")
    with store.writing(), pytest.raises(SearchError, match="already running"):
        loop.run()


def test_bad_values_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_rnak"):
        search(tmp_path, space={"lora_rnak": [1, 2]})
    assert not list(tmp_path.glob("searches/*"))


def test_replicates_use_fresh_seeds_for_the_best_and_the_default(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, preset="article-grid", replicate=3, replicate_top=2)
    loop.run()
    replicates = [record for record in store.records() if record.stage == "replicate"]
    best = candidates(store.records(), ACCURACY)[:2]
    default = default_record(store.records())
    assert default is not None
    assert {record.replicate_of for record in replicates} == {*(r.trial for r in best), default.trial}
    seeds = {record.seed for record in replicates}
    assert len(seeds) == 3
    assert 0 not in seeds
    assert len(replicates) == 9


def test_several_objectives_give_a_pareto_front(tmp_path: Path) -> None:
    def costly(config: Mapping[str, Any], seed: int) -> Recording:
        recording = training(config, seed)
        tokens = [CurvePoint(step, 10.0 * config["batch_size"]) for step in range(1, 49)]
        return Recording({**recording.curves, "trained_tokens": tokens}, 48)

    store, _, loop = search(
        tmp_path, costly, preset="article-grid", objectives=["eval_percent_correct", "trained_tokens:sum:min"]
    )
    loop.run()
    summary = summarize(store)
    assert 1 < len(summary.front) < 27
    assert summary.best in summary.front
    assert summary.records[0].tokens == 48 * 10 * summary.records[0].params["batch_size"]


def test_a_draw_cut_off_by_a_kill_is_neither_lost_nor_run_twice(tmp_path: Path) -> None:
    space = {"learning_rate": [2e-5, 4e-5, 6e-5]}
    store, runner, loop = search(tmp_path, strategy="random", trials=3, space=space, parallel=1)
    with store.writing():
        strategy = loop._make_strategy()
        first = strategy.next([])
        assert first is not None
        strategy.study.enqueue_trial({"learning_rate": 4e-5})
        strategy.study.ask()  # the process dies here, before any value was drawn
    assert Orchestrator(store, runner).run().state == "completed"
    records = store.records()
    assert len(records) == len(set(keys(records))) == 3


def test_a_warm_start_begins_with_what_an_earlier_search_found(tmp_path: Path) -> None:
    space = {"learning_rate": "log:1e-6..1e-3"}
    earlier, _, loop = search(tmp_path, strategy="random", trials=20, space=space)
    loop.run()
    fields = {"strategy": "tpe", "trials": 6, "space": space, "warm_start": earlier.search_id}
    store, _, loop = search(tmp_path, **fields)
    loop.run()
    records = store.records()
    assert len(records) == 6
    # The default first, then where the earlier search was good rather than anywhere.
    rates = [record.params["learning_rate"] for record in records[1:]]
    assert sum(1e-5 < rate < 4e-4 for rate in rates) >= 4


def test_optuna_and_its_dashboard_can_read_the_study(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, preset="article-grid")
    loop.run()
    backend = optuna.storages.journal.JournalFileBackend(str(store.folder / "study.log"))
    study = optuna.load_study(study_name=store.search_id, storage=optuna.storages.JournalStorage(backend))
    best = candidates(store.records(), ACCURACY)[0]
    assert study.best_value == best.value
    assert len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) >= 27
    assert study.best_trial.intermediate_values[48] == best.value


def test_a_search_can_be_extended_once_it_is_done(tmp_path: Path) -> None:
    store, runner, loop = search(
        tmp_path, strategy="random", trials=4, space={"learning_rate": "log:1e-6..1e-3"}
    )
    loop.run()
    before = store.records()
    extend(store, trials="+3", replicate="2")
    assert Orchestrator(store, runner).run().state == "completed"
    after = store.records()
    assert after[:4] == before
    assert [record.stage for record in after[4:7]] == ["search"] * 3
    assert {record.stage for record in after[7:]} == {"replicate"}
    with pytest.raises(SearchError, match="not a number"):
        extend(store, trials="many")


@pytest.mark.parametrize("pruner", ["asha", "promote", "median", "hyperband"])
@pytest.mark.parametrize("ends", ["before the stop", "all but its last checkpoint"])
def test_a_trial_that_ends_while_it_is_being_stopped_has_completed(
    tmp_path: Path, pruner: str, ends: str
) -> None:
    overtaken: set[str] = set()

    class Overtaken(ReplayTrials):
        """A stop comes too late: the run has evaluated its last weights by then."""

        def stop(self, run_ids: Iterable[str]) -> None:
            overtaken.update(run_ids)
            if ends != "before the stop":
                super().stop(run_ids)

        def observe(self, run_id: str) -> Observation:
            seen = super().observe(run_id)
            if run_id not in overtaken:
                return seen
            _, recording = self._started[run_id]
            state = seen.state if ends != "before the stop" else "completed"
            return replace(seen, state=state, step=recording.total_steps, curves=recording.curves)

    store, _, _ = search(tmp_path, preset="article-grid", pruner=pruner, rungs=8)
    assert Orchestrator(store, Overtaken(training, DEFAULT)).run().state == "completed"
    records = store.records()
    assert overtaken
    assert {record.state for record in records} == {"completed"}
    assert all(record.points("eval_percent_correct")[-1].step == 48 for record in records)


def test_a_promoted_trial_goes_on_where_it_paused(tmp_path: Path) -> None:
    started: list[int] = []
    resumed: list[int] = []

    class Counting(ReplayTrials):
        def start(self, request: TrialRequest) -> str:
            started.append(request.trial)
            return super().start(request)

        def resume(self, request: TrialRequest, run_id: str) -> str:
            resumed.append(request.trial)
            return super().resume(request, run_id)

    store, _, _ = search(tmp_path, preset="article-grid", pruner="promote", rungs=8)
    runner = Counting(training, DEFAULT)
    assert Orchestrator(store, runner).run().state == "completed"
    records = store.records()
    assert sorted(started) == list(range(27))
    assert resumed
    states = [record.state for record in records]
    assert set(states) == {"completed", "pruned"}
    # A third of 27 passes the first rung, a third of those the second; the default runs to its end anyway.
    assert 3 <= states.count("completed") <= 6
    assert sum(record.step for record in records) < 27 * 48 * 0.45
    assert all(record.points("eval_percent_correct")[-1].step == record.step for record in records)


def test_trials_that_wait_at_a_rung_survive_a_kill(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid", pruner="promote", rungs=8)
    dying = DyingTrials(training, DEFAULT)
    dying.looks_left = 60
    with pytest.raises(Interrupted):
        Orchestrator(store, dying).run()
    paused = {record.trial for record in store.records() if record.state == "paused"}
    assert paused
    assert Orchestrator(store, dying).run().state == "completed"
    records = store.records()
    assert len(records) == len(set(keys(records))) == 27
    assert {record.state for record in records} == {"completed", "pruned"}


def test_promotion_among_a_few_still_ends_with_a_trial_that_went_all_the_way(tmp_path: Path) -> None:
    space = {"batch_size": [32, 64]}
    store, _, loop = search(tmp_path, space=space, pruner="promote", rungs=8, replicate=2, replicate_top=1)
    assert loop.run().state == "completed"
    records = store.records()
    ended = [record for record in records if record.stage == "search" and record.state == "completed"]
    assert len(ended) == 1
    assert ended[0].step == 48
    assert {record.replicate_of for record in records if record.stage == "replicate"} == {0, ended[0].trial}


@pytest.mark.parametrize("begun", [0, 3])
def test_runs_that_cannot_be_started_end_the_search_and_cost_it_nothing(tmp_path: Path, begun: int) -> None:
    class LaterKeyless(Keyless):
        def start(self, request: TrialRequest) -> str:
            self.repaired = self.repaired or request.trial < begun
            try:
                return super().start(request)
            finally:
                self.repaired = False

    store, _, _ = search(tmp_path, preset="article-grid")
    with pytest.raises(SearchError, match=r"could not be started: No key") as caught:
        Orchestrator(store, LaterKeyless(training, DEFAULT)).run()
    assert "Set TINKER_API_KEY." in str(caught.value)
    assert f"search resume {store.search_id}" in str(caught.value)
    assert (store.load().state, store.load().reason) == ("failed", caught.value.message)
    states = [record.state for record in store.records()]
    assert states[begun:] == ["stopped"]
    assert "running" not in states
    Orchestrator(store, ReplayTrials(training, DEFAULT)).run()
    records = store.records()
    assert len(records) == len(set(keys(records))) == 27
    assert {record.state for record in records} == {"completed"}


def test_a_trial_that_alone_cannot_be_started_fails_alone(tmp_path: Path) -> None:
    class Refusing(ReplayTrials):
        def start(self, request: TrialRequest) -> str:
            if request.params["batch_size"] == 32:
                raise TrialRefusedError("batch_size 32 is not allowed.")
            return super().start(request)

    store, _, _ = search(tmp_path, space={"batch_size": [16, 32, 64]})
    assert Orchestrator(store, Refusing(training, DEFAULT)).run().state == "completed"
    found = {record.params["batch_size"]: (record.state, record.reason) for record in store.records()}
    assert found[32] == ("failed", "batch_size 32 is not allowed.")
    assert found[16] == found[64] == ("completed", None)


def test_failures_of_an_earlier_sitting_do_not_end_the_next(tmp_path: Path) -> None:
    def broken(config: Mapping[str, Any], seed: int) -> Recording:
        return Recording({}, 48, fails_at=1, reason="out of memory")

    store, _, loop = search(tmp_path, broken, preset="article-grid")
    with pytest.raises(SearchError, match="out of memory"):
        loop.run()
    lost = len(store.records())
    assert Orchestrator(store, ReplayTrials(training, DEFAULT)).run().state == "completed"
    states = [record.state for record in store.records()]
    assert states.count("completed") == 27 - lost
    assert states.count("failed") + states.count("stopped") == lost


def test_a_disk_that_fills_up_stops_the_runs_and_is_named(tmp_path: Path) -> None:
    stopped: list[str] = []

    class Stopping(ReplayTrials):
        def stop(self, run_ids: Iterable[str]) -> None:
            stopped.extend(run_ids)
            super().stop(stopped)

    store, _, _ = search(tmp_path, preset="article-grid")
    append = store.append

    def full(record: TrialRecord) -> None:
        if record.trial > 4:
            raise OSError(28, "No space left on device")
        append(record)

    store.append = full  # type: ignore[method-assign]
    with pytest.raises(SearchError, match="No space left on device"):
        Orchestrator(store, Stopping(training, DEFAULT)).run()
    assert "replay-4" in stopped
    store.append = append  # type: ignore[method-assign]
    assert Orchestrator(store, ReplayTrials(training, DEFAULT)).run().state == "completed"
    assert len(set(keys(store.records()))) == len(store.records()) == 27


@pytest.mark.parametrize(
    ("budget", "option"), [({"steps": 300}, {"max_steps": "+300"}), ({"minutes": 4}, {"max_minutes": "8"})]
)
def test_a_used_budget_leaves_the_replicates_and_can_be_raised(
    tmp_path: Path, budget: dict[str, float], option: dict[str, Any]
) -> None:
    store, runner, loop = search(tmp_path, preset="article-grid", budget=budget, replicate=3)
    file = loop.run()
    assert file.state == "completed"
    assert "budget" in (file.reason or "")
    first = store.records()
    replicates = [record for record in first if record.stage == "replicate"]
    assert [record.state for record in replicates] == ["completed"] * 9
    searched = [record for record in first if record.stage == "search"]
    assert 3 <= len(searched) < 12
    left = [record.trial for record in searched if record.state == "stopped"]

    assert Orchestrator(store, runner).run().reason == file.reason
    assert store.records() == first, "a used budget starts nothing"

    extend(store, **option)
    again = Orchestrator(store, runner).run()
    assert "budget" in (again.reason or "")
    more = [record for record in store.records() if record.stage == "search"]
    assert 1.7 * len(searched) <= len(more) <= 2.4 * len(searched)
    assert all(store.records()[trial].state == "completed" for trial in left)


def test_budgets_are_raised_by_numbers_only(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid", budget={"steps": 300})
    assert extend(store, max_steps="+50").budget.steps == 350
    assert extend(store, max_steps="400").budget.steps == 400
    assert extend(store, max_minutes="2.5").budget.minutes == 2.5
    assert extend(store).budget.steps == 400
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_steps": "many"}, "not a number"),
        ({"max_tokens": "+5"}, "no budget of tokens"),
        ({"max_steps": "0"}, "steps"),
        ({"replicate": "-1"}, "replicate"),
    ]
    for option, said in refused:
        with pytest.raises(SearchError, match=said):
            extend(store, **option)


def test_a_kill_loses_next_to_nothing_of_the_time_that_a_budget_counts(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid", budget={"minutes": 3})
    dying = DyingTrials(training, DEFAULT)
    for _ in range(3):
        dying.looks_left = 50
        with pytest.raises(Interrupted):
            Orchestrator(killed(store), dying).run()
    assert 110 <= store.load().seconds <= 150
    file = Orchestrator(store, dying).run()
    assert "3 minutes" in (file.reason or "")
    assert file.seconds == pytest.approx(180, abs=3)


def killed(store: SearchStore) -> SearchStore:
    """The store of a process that will be killed: it says nothing at its end."""
    other = SearchStore(store.workspace, store.search_id)

    def save(file: SearchFile) -> None:
        if file.state == "running":
            store.save(file)

    other.save = save  # type: ignore[method-assign]
    return other


def test_a_better_trial_found_after_the_replicates_is_replicated_too(tmp_path: Path) -> None:
    def rising(config: Mapping[str, Any], seed: int) -> Recording:
        place = order.setdefault(config["batch_size"], len(order))
        points = [CurvePoint(step, (0.5, 0.6, 0.9)[place], 256) for step in (0, 48)]
        return Recording({"eval_percent_correct": points}, 48)

    order: dict[int, int] = {}
    space = {"batch_size": [16, 32, 64]}
    store, runner, _ = search(tmp_path, rising, space=space, trials=2, replicate=2, replicate_top=1)
    Orchestrator(store, runner).run()
    assert len(store.records()) == 6
    extend(store, trials="+1")
    Orchestrator(store, runner).run()
    summary = summarize(store)
    replicates = [r.replicate_of for r in summary.records if r.stage == "replicate"]
    last = summary.records[6]
    assert sorted(replicates, key=str) == [0, 0, 1, 1, 6, 6]
    assert summary.best is last
    assert summary.recommended is last
    assert summary.replication is not None
    assert summary.replication.sentence.startswith("Trial 6 ")


def test_the_best_two_and_the_default_are_replicated_on_three_seeds_unless_one_says_otherwise(
    tmp_path: Path,
) -> None:
    store, _, loop = search(tmp_path, preset="article-grid", replicate=None)
    loop.run()
    summary = summarize(store)
    replicates = [record for record in summary.records if record.stage == "replicate"]
    assert len(replicates) == 9
    assert len({record.seed for record in replicates}) == 3
    assert summary.replication is not None
    assert not any("One run of each" in sentence for sentence in verdict_sentences(summary))

    store, _, loop = search(tmp_path, preset="article-grid", replicate=0)
    loop.run()
    assert len(store.records()) == 27
    assert any("One run of each" in sentence for sentence in verdict_sentences(summarize(store)))


def test_what_cannot_be_replicated_is_refused_only_where_it_is_asked_for() -> None:
    fields: dict[str, Any] = {"preset": "article-grid", "objectives": ["eval_percent_correct", "loss:min"]}
    assert define_search(fields).fresh_seeds() == 0
    assert define_search({**fields, "replicate": 0}).fresh_seeds() == 0
    with pytest.raises(SearchError, match="one objective"):
        define_search({**fields, "replicate": 3})
    population = {"strategy": "pbt", "space": {"learning_rate": "log:1e-5..1e-3"}}
    assert define_search(population).fresh_seeds() == 0
    assert define_search({"preset": "article-bayes"}).fresh_seeds() == 3


def test_the_first_value_that_speaks_against_a_trial_decides(tmp_path: Path) -> None:
    """Its driver was dead while the run passed two rungs; the second has nobody to compare with."""
    store, _, _ = search(
        tmp_path, strategy="random", trials=8, space={"learning_rate": "log:1e-5..2e-4"}, pruner="asha",
        rungs=6, parallel=1, set={"steps_per_eval": 6},
    )  # fmt: skip

    def falling(config: Mapping[str, Any], seed: int) -> Recording:
        rank = falling_ranks.setdefault(config["learning_rate"], len(falling_ranks))
        points = [CurvePoint(step, 0.9 - 0.05 * rank, 256) for step in range(0, 49, 6)]
        return Recording({"eval_percent_correct": points}, 48)

    falling_ranks: dict[float, int] = {}

    class Absent(ReplayTrials):
        """Looks at trials but for the default when 18 and more steps are taken."""

        def wait(self) -> None:
            super().wait()
            if len(falling_ranks) > 1:
                self._clock += 30.0

    Orchestrator(store, Absent(falling, {**DEFAULT, "steps_per_eval": 6})).run()
    states = [record.state for record in store.records()]
    assert states[0] == "completed"
    assert states[3:] == ["pruned"] * 5


@pytest.mark.parametrize("died", ["before the stop", "after the stop", "with its runs"])
def test_a_trial_that_was_to_be_stopped_when_the_search_was_killed_is_stopped(
    tmp_path: Path, died: str
) -> None:
    doomed: list[str] = []

    class DyingAtStop(ReplayTrials):
        def stop(self, run_ids: Iterable[str]) -> None:
            if doomed:
                return super().stop(run_ids)
            doomed.extend(run_ids)
            if died == "after the stop":
                super().stop(doomed)
            raise Interrupted

    store, _, _ = search(tmp_path, preset="article-grid", pruner="asha", rungs=8)
    runner = DyingAtStop(training, DEFAULT)
    with pytest.raises(Interrupted):
        Orchestrator(store, runner).run()
    if died == "with its runs":
        runner = DyingAtStop(training, DEFAULT)
        assert Orchestrator(store, runner).run().state == "completed"
        assert all(r.step >= 8 and r.values for r in store.records()), "what is run again is measured again"
        return
    assert Orchestrator(store, runner).run().state == "completed"
    record = next(r for r in store.records() if r.run_id in doomed)
    assert (record.state, record.unwanted_at) == ("pruned", 8)
    assert record.step < 24, "it did not go on to the next rung"


def test_a_run_that_was_being_started_at_ctrl_c_is_stopped_and_taken_up_again(tmp_path: Path) -> None:
    stopped: list[str] = []

    class Interrupting(ReplayTrials):
        interrupts = True

        def start(self, request: TrialRequest) -> str:
            run_id = super().start(request)
            if self.interrupts and request.trial == 3:
                self.interrupts = False
                raise KeyboardInterrupt
            return run_id

        def stop(self, run_ids: Iterable[str]) -> None:
            stopped.extend(run_ids)
            super().stop(stopped)

    store, _, _ = search(tmp_path, preset="article-grid")
    runner = Interrupting(training, DEFAULT)
    with pytest.raises(KeyboardInterrupt):
        Orchestrator(store, runner).run()
    assert "replay-3" in stopped
    # As if the search had been killed an instant earlier, with the run still going on.
    record = store.records()[3]
    assert (record.state, record.run_id) == ("stopped", "replay-3")
    store.append(record.model_copy(update={"run_id": None}))
    assert Orchestrator(store, runner).run().state == "completed"
    records = store.records()
    assert len(runner._started) == len(records) == 27
    assert records[3].run_id == "replay-3"
