"""The loop of a search: keep N trials running, learn from each, replicate the best.

It runs in the process that asked for the search (``hermes-rl search start``) or in a detached one
(:mod:`hermes_rl.search.process`), and talks to runs only through a
:class:`hermes_rl.search.runner.TrialRunner`.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hermes_rl.errors import HermesRLError, SearchError, TrialRefusedError
from hermes_rl.search.chooser import Chooser, Proposal
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.population import Population
from hermes_rl.search.promotion import furthest, may_go_on, next_promotion, rung_levels, value_at
from hermes_rl.search.pruning import first_rung, make_pruner
from hermes_rl.search.ranking import candidates, default_record
from hermes_rl.search.runner import Observation, TrialRequest, TrialRunner
from hermes_rl.search.space import format_params, params_key
from hermes_rl.search.store import SearchFile, SearchStore
from hermes_rl.search.strategy import Strategy
from hermes_rl.search.sweep_service import WandbSweep, full_path, require_wandb
from hermes_rl.search.sweep_strategy import SweepStrategy
from hermes_rl.search.sweeps import check_sweep, to_sweep
from hermes_rl.search.trial import FINISHED, Stage, TrialRecord, curve_rows
from hermes_rl.search.warm_start import resolve_warm_start, warm_records

_REPLICATION_SEED = 1_000_003
"""Distance of the first replication seed from the tuning seed, so that the two never meet."""
KEPT_CURVES = frozenset({"eval_percent_correct", "reward_mean", "percent_correct", "loss"})
"""Curves that a trial's record keeps beside the objectives'; the run itself has them all."""
EVALUATIONS_PER_TRIAL = 8
"""With early stopping, a trial is evaluated about so many times, unless ``steps_per_eval`` is set."""
_SEGMENT_SEEDS = 1_009
"""Distance between the seeds of a population's segments: a later one does not begin with the same items."""
_SAVE_SECONDS = 10.0
"""The time that a search took is kept so often, because a kill loses what was not."""
_CHECKED_POINTS = 2000
"""Grids up to this size are checked point by point before anything starts."""
_CHECKED_DRAWS = 100
"""Configurations on which the constraints of other strategies are tried."""


@dataclass(frozen=True)
class Snapshot:
    """A search as it stands, for whoever shows it.

    Attributes:
        file: definition and state.
        records: every trial.
        planned: number of trials, replicates included.
        elapsed: seconds of this sitting.
        remaining: estimated seconds to the end, or None.
    """

    file: SearchFile
    records: Sequence[TrialRecord]
    planned: int
    elapsed: float
    remaining: float | None


class Observer(Protocol):
    """Whoever shows a search."""

    def tick(self, snapshot: Snapshot) -> None:
        """Something may have changed."""
        ...

    def finished(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A trial ended."""
        ...


def check_space(definition: SearchDefinition, runner: TrialRunner) -> SearchDefinition:
    """Check a search against the fields' bounds before anything starts.

    Every value of a choice and both ends of a range, alone and, for grids, every point.

    Returns:
        the definition with the values in force that its constraints and conditions read.

    Raises:
        ConfigError: an unknown field, or a value out of its bounds.
        SearchError: a constraint cannot be computed, or points of the grid contradict the fields' rules.
    """
    runner.check({})
    definition = _with_values_in_force(definition, runner)
    space = definition.build_space()
    for parameter in space.parameters:
        for value in parameter.edges():
            try:
                runner.check({parameter.name: value})
            except HermesRLError as error:
                if not _is_joint(error, parameter.name, len(space.parameters)):
                    raise
    if definition.strategy != "grid":
        rng = random.Random(definition.seed)
        for _ in range(_CHECKED_DRAWS):  # what compares a number with a text fails here, not later
            space.feasible(space.random(rng))
        return definition
    for at, params in enumerate(space.grid()):
        if at >= _CHECKED_POINTS:
            break
        try:
            runner.check(params)
        except HermesRLError as error:
            raise SearchError(
                f"The grid holds {format_params(params)}, which is not allowed: {error.message}",
                hint="Leave the value out, or add a constraint such as 'group_size <= batch_size'.",
            ) from error
    return definition


def _with_values_in_force(definition: SearchDefinition, runner: TrialRunner) -> SearchDefinition:
    """The definition with the values of the fields that its constraints and conditions read.

    Also of those that are searched: a trial in which such a field does not exist has the value in force.

    Raises:
        ConfigError: there is no such field.
        SearchError: the grid has no point that satisfies the constraints.
    """
    names = _context_names(definition)
    values = runner.defaults(names)
    for name in names:
        runner.check({name: values[name]})
    fields = {**definition.model_dump(), "in_force": values}
    return SearchDefinition.model_validate(fields)


def _is_joint(error: HermesRLError, name: str, parameters: int) -> bool:
    """Whether a value was refused only because of another field that the search may set as well."""
    return parameters > 1 and any(
        sign in f"{error.message} {error.allowed}" for sign in ("<=", "multiple of", "larger than")
    )


def _context_names(definition: SearchDefinition) -> list[str]:
    return sorted(definition.build_space().read_names())


def create_search(workspace, definition: SearchDefinition, runner: TrialRunner) -> SearchStore:
    """Check a search and make its folder; nothing is started."""
    if definition.strategy == "wandb":
        require_wandb()
    definition = prepare_search(workspace, definition, runner)
    return SearchStore.create(workspace, definition, runner.defaults(definition.build_space().names))


def prepare_search(workspace, definition: SearchDefinition, runner: TrialRunner) -> SearchDefinition:
    """Check a search before anything of it exists.

    Returns:
        the definition as it is kept: with the values in force, and evaluations often enough.

    Raises:
        ConfigError: an unknown field, or a value out of its bounds.
        SearchError: parts of it do not fit together.
    """
    definition = resolve_warm_start(workspace, check_space(definition, runner), runner)
    check_sweep(definition)
    later = _evaluate_often_enough(definition, runner)
    changed = {
        name: value
        for name, value in later.overrides.items()
        if name in definition.in_force and name not in definition.overrides
    }
    return later.model_copy(update={"in_force": {**definition.in_force, **changed}})


def _evaluate_often_enough(definition: SearchDefinition, runner: TrialRunner) -> SearchDefinition:
    """The definition, with evaluations close enough for its pruner unless somebody has said how close."""
    said = "steps_per_eval" in definition.overrides or "steps_per_eval" in definition.space
    schedule = runner.defaults(["total_steps", "steps_per_eval"])
    total, between = int(schedule["total_steps"] or 1), int(schedule["steps_per_eval"] or 1)
    if definition.strategy == "pbt" and not said:
        return definition.model_copy(
            update={
                "overrides": {**definition.overrides, "steps_per_eval": max(1, total // definition.segments)}
            }
        )
    if definition.pruner == "none" or said or total >= between * EVALUATIONS_PER_TRIAL:
        return definition
    overrides = {**definition.overrides, "steps_per_eval": max(1, total // EVALUATIONS_PER_TRIAL)}
    if definition.pruner == "promote" and "save_checkpoint_interval" not in overrides:
        overrides["save_checkpoint_interval"] = overrides["steps_per_eval"]  # a checkpoint at every rung
    last_counts = all(objective.reduction == "last" for objective in definition.build_objectives())
    at_rungs = last_counts and definition.pruner != "median"
    return definition.model_copy(update={"overrides": overrides, "evaluate_at_rungs": at_rungs})


class Orchestrator:
    """Drives one search to its end.

    Args:
        store: the search's folder.
        runner: tries configurations.
        observer: shows progress; None shows nothing.
    """

    def __init__(self, store: SearchStore, runner: TrialRunner, observer: Observer | None = None) -> None:
        self._store = store
        self._runner = runner
        self._observer = observer
        self._file = store.load()
        self._definition = self._file.definition
        self._objectives = self._definition.build_objectives()
        self._records: dict[int, TrialRecord] = {r.trial: r for r in store.records()}
        self._reported: dict[int, int] = {}
        self._queue: list[Proposal] = []
        self._again: list[TrialRecord] = []
        self._exhausted = False
        self._used: str | None = None
        self._only_replicates = False
        self._ended_here: list[TrialRecord] = []
        self._begun = self._counted = self._saved = runner.now()

    def run(self) -> SearchFile:
        """Run until the search is done, stopped or out of budget.

        ``KeyboardInterrupt`` stops the running trials cleanly and is raised on.

        Returns:
            the search's final state.

        Raises:
            SearchError: another process drives it, no trial can be started, or every trial fails.
        """
        with self._store.writing():
            self._file.state, self._file.reason = "running", None
            self._save()
            state, reason = "stopped", "interrupted"
            try:
                self._strategy = self._make_strategy()
                self._adopt()
                state, reason = self._loop()
            except KeyboardInterrupt:
                self._stop_running(self._running(), "the search was interrupted")
                raise
            except HermesRLError as error:
                state, reason = "failed", error.message
                self._stop_running(self._running(), "the search failed")
                raise
            except OSError as error:
                state, reason = "failed", str(error)
                with contextlib.suppress(OSError, HermesRLError):  # on a full disk this fails as well
                    self._stop_running(self._running(), "the search failed")
                raise SearchError(
                    f"The search cannot go on: {error}.",
                    hint=f"Remove the cause. Then {self._how_to_go_on()}",
                ) from error
            finally:
                self._file.state, self._file.reason = state, reason
                try:
                    self._count_time()
                    self._save()
                except OSError:
                    if state != "failed":  # else what is raised already says more
                        raise
        return self._file

    def _how_to_go_on(self) -> str:
        return f"go on with: hermes-rl search resume {self._store.search_id}"

    def _count_time(self) -> None:
        """Add the time since the last look to the search's; what only replicates took apart."""
        now = self._runner.now()
        passed, self._counted = max(0.0, now - self._counted), now
        self._file.seconds += passed
        if self._only_replicates:
            self._file.replicate_seconds += passed
        if now - self._saved >= _SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        """Keep state and time."""
        self._saved = self._runner.now()
        self._store.save(self._file)

    def _make_strategy(self) -> Chooser:
        definition, runner = self._definition, self._runner
        schedule = runner.defaults(["total_steps", "steps_per_eval"])
        self._total_steps = int(schedule["total_steps"] or 1)
        steps_per_eval = int(schedule["steps_per_eval"] or self._total_steps)
        rungs = rung_levels(
            first_rung(definition, self._total_steps, steps_per_eval),
            definition.reduction_factor,
            self._total_steps,
        )
        self._levels = rungs if definition.pruner == "promote" else []
        self._evaluation_steps = tuple(rungs) if definition.evaluate_at_rungs else None
        space = definition.build_space().with_context(runner.defaults(_context_names(definition)))
        if definition.strategy == "wandb":
            return self._join_sweep()
        if definition.strategy == "pbt":
            return Population(definition, space, self._total_steps, self._file.default_params, runner.check)
        strategy = Strategy(
            definition,
            space,
            self._store.study_storage(),
            self._store.search_id,
            make_pruner(definition, self._total_steps, steps_per_eval),
            self._file.default_params,
            runner.check,
        )
        if definition.warm_start:
            earlier = warm_records(self._store.workspace, definition, runner)
            strategy.warm_start(definition.warm_start, earlier)
        return strategy

    def _join_sweep(self) -> SweepStrategy:
        """The strategy that asks the search's W&B sweep, which is created once."""
        definition = self._definition
        project = str(definition.overrides.get("wandb_project") or "hermes-rl")
        if self._file.sweep is not None:
            sweep = WandbSweep(self._file.sweep)
        elif definition.sweep is not None:
            sweep = WandbSweep(full_path(definition.sweep, project))
        else:
            sweep = WandbSweep.create(to_sweep(definition), project)
        self._file.sweep = sweep.path
        self._store.save(self._file)
        return SweepStrategy(definition, sweep, sweep.path, self._file.default_params)

    def _adopt(self) -> None:
        """Take over what an interrupted sitting left: finished, still running, or to be run again."""
        self._queue = self._strategy.adopt(list(self._records.values()))
        for record in list(self._records.values()):
            if record.state not in ("running", "stopped"):
                continue
            if record.run_id is None:  # its run may have been started an instant before the end
                record.run_id = self._runner.find(record.trial)
            if record.run_id is not None:
                observation = self._runner.observe(record.run_id)
                if observation.state in ("running", "completed"):
                    record.state, record.reason = "running", None
                    continue
                if observation.step < (record.unwanted_at or 0):  # it was lost, and begins anew
                    record.unwanted_at = None
                if record.unwanted_at is not None and observation.state == "stopped":
                    self._copy(observation, record)
                    if not self._is_measured_at_end(record):
                        self._prune(record, "stopped early")
                        continue
            record.state = "stopped"
            self._again.append(record)

    def _loop(self) -> tuple[str, str | None]:
        while True:
            self._count_time()
            if self._store.stop_file.exists():
                self._stop_running(self._running(), "stopped on request")
                return "stopped", "stopped on request"
            if self._used is None:
                self._used = self._budget_used()
                if self._used is not None:
                    self._stop_running(self._searching(), self._used)
            self._fill()
            self._only_replicates = bool(self._running()) and not self._searching()
            if not self._running() and (self._used is not None or not self._strategy.waiting()):
                if self._used is None:
                    self._let_go()
                return "completed", self._used
            self._runner.wait()
            for record in self._running():
                self._look(record)
            if self._observer:
                self._observer.tick(self.snapshot())

    def _budget_used(self) -> str | None:
        """Which budget is used, in words; the replicates have none."""
        budget = self._definition.budget
        records = [record for record in self._records.values() if record.stage != "replicate"]
        minutes = (self._file.seconds - self._file.replicate_seconds) / 60
        if budget.minutes is not None and minutes >= budget.minutes:
            return f"the budget of {budget.minutes:g} minutes is used"
        if budget.steps is not None and sum(r.steps_taken for r in records) >= budget.steps:
            return f"the budget of {budget.steps} steps is used"
        if budget.tokens is not None and sum(r.tokens or 0 for r in records) >= budget.tokens:
            return f"the budget of {budget.tokens} tokens is used"
        return None

    def _check_failures(self) -> None:
        """Give up when the first trials of this sitting all failed.

        Raises:
            SearchError: they did.
        """
        failed = [record for record in self._ended_here if record.state == "failed"]
        if len(failed) > max(2, self._definition.parallel) and len(failed) == len(self._ended_here):
            hint = f"hermes-rl run logs {failed[-1].run_id} says more; " if failed[-1].run_id else ""
            raise SearchError(
                f"The first {len(failed)} trials all failed. The last one: {failed[-1].reason}",
                hint=f"{hint}with the cause removed, {self._how_to_go_on()}",
            )

    def _running(self) -> list[TrialRecord]:
        return [r for r in self._records.values() if r.state == "running"]

    def _searching(self) -> list[TrialRecord]:
        """The running trials that are no replicates."""
        return [r for r in self._running() if r.stage != "replicate"]

    def _fill(self) -> None:
        while len(self._running()) < self._definition.parallel:
            self._check_failures()
            record = self._next_replicate() if self._used is not None else self._next()
            if record is None:
                return
            self._launch(record)

    def _next(self) -> TrialRecord | None:
        """The trial to start now, if there is one."""
        if self._again:
            return self._again.pop(0)
        promoted = self._promotion()
        if promoted is not None:
            promoted.rung += 1
            return promoted
        proposal = self._queue.pop(0) if self._queue else None
        if proposal is None and not self._exhausted:
            proposal = self._strategy.next(list(self._records.values()))
            self._exhausted = proposal is None and not self._searching() and not self._strategy.waiting()
        if proposal is not None:
            return self._proposed(proposal)
        return (self._unfinished_best() or self._next_replicate()) if self._exhausted else None

    def _proposed(self, proposal: Proposal) -> TrialRecord:
        """The record of a configuration that the strategy has chosen."""
        record = self._new_record(proposal.params, proposal.stage, proposal.study_number)
        record.sweep, record.sweep_run = proposal.sweep, proposal.run_id
        record.member, record.segment, record.parent = proposal.member, proposal.segment, proposal.parent
        if proposal.segment is not None:
            record.seed = (self._definition.seed + _SEGMENT_SEEDS * proposal.segment) % 2**31
            record.total_steps, record.is_default = proposal.until, False
        if proposal.parent is not None:
            record.from_step = record.step = self._records[proposal.parent].step
        return record

    def _new_record(
        self,
        params: dict,
        stage: Stage,
        study_number: int | None,
        *,
        seed: int | None = None,
        of: int | None = None,
    ) -> TrialRecord:
        default = self._file.default_params
        return TrialRecord(
            trial=max(self._records, default=-1) + 1,
            stage=stage,
            params=params,
            seed=self._definition.seed if seed is None else seed,
            study_number=study_number,
            replicate_of=of,
            is_default=params_key(params) == params_key({name: default[name] for name in params}),
            total_steps=self._total_steps,
        )

    def _launch(self, record: TrialRecord) -> None:
        record.state, record.reason, record.started_at, record.ended_at = (
            "running",
            None,
            self._runner.now(),
            None,
        )
        self._records[record.trial] = record
        # Known before it starts: whoever resumes a search that was killed in between finds the run.
        self._store.append(record)
        try:
            request = self._request(record)
            if record.run_id is None:
                record.run_id = self._runner.start(request)
            else:
                record.run_id = self._runner.resume(request, record.run_id)
        except TrialRefusedError as error:
            record.state, record.reason = "failed", error.message
            self._finish(record)
            return
        except HermesRLError as error:  # the next one could not be started either
            record.state, record.reason, record.ended_at = "stopped", error.message, self._runner.now()
            self._store.append(record)
            raise SearchError(
                f"Trial {record.trial} could not be started: {error.message}",
                allowed=error.allowed,
                hint=f"{error.hint or 'Remove the cause.'} Then {self._how_to_go_on()}",
            ) from error
        self._store.append(record)

    def _request(self, record: TrialRecord) -> TrialRequest:
        parent = None if record.parent is None else self._records[record.parent]
        return TrialRequest(
            record.trial,
            record.params,
            record.seed,
            run_id=record.sweep_run,
            sweep=record.sweep,
            from_run=None if parent is None else parent.run_id,
            until=None if record.segment is None else record.total_steps,
            evaluation_steps=self._evaluation_steps,
        )

    def _next_replicate(self) -> TrialRecord | None:
        """The replicate to start now, if there is one: when no trial of the search itself runs any more."""
        if self._searching():
            return None
        left = next((record for record in self._again if record.stage == "replicate"), None)
        if left is not None:
            self._again.remove(left)
            return left
        done = {(r.replicate_of, r.seed) for r in self._records.values() if r.stage == "replicate"}
        seeds = self._definition.fresh_seeds()
        originals = self._replicated() if seeds else []
        for number in range(seeds):
            seed = (self._definition.seed + _REPLICATION_SEED + number) % 2**31
            for original in originals:
                if (original.trial, seed) not in done:
                    params = dict(original.params)
                    return self._new_record(params, "replicate", None, seed=seed, of=original.trial)
        return None

    def _replicated(self) -> list[TrialRecord]:
        """The trials that are run again: the best and the default, and those that were so far."""
        records = list(self._records.values())
        best = [r for r in candidates(records, self._objectives[0]) if not r.is_default]
        default = default_record(records)
        chosen = best[: self._definition.replicate_top]
        if chosen and default is not None:
            chosen.append(default)
        known = {record.trial for record in chosen}
        already = {r.replicate_of for r in records if r.stage == "replicate"} - known
        return chosen + [record for record in records if record.trial in already]

    def _promotion(self) -> TrialRecord | None:
        """The paused trial to go on with, if there is one."""
        if not self._levels:
            return None
        factor = self._definition.reduction_factor
        return next_promotion(list(self._records.values()), self._objectives[0], self._levels, factor)

    def _unfinished_best(self) -> TrialRecord | None:
        """The best paused trial, to be run to its end, when no trial but the default came that far."""
        records = list(self._records.values())
        paused = [r for r in records if r.state == "paused"]
        ended = any(
            r.state == "completed" and r.stage in ("search", "refine") for r in records if not r.is_default
        )
        if ended or not paused or self._searching():
            return None
        best = furthest(paused, self._objectives[0])
        best.rung = len(self._levels)
        return best

    def _pauses(self, record: TrialRecord) -> bool:
        """Whether a running trial has reached a rung that it may not pass yet; counts those it may."""
        if record.is_default or record.stage == "replicate":
            return False
        records, objective = list(self._records.values()), self._objectives[0]
        while record.rung < len(self._levels):
            level = self._levels[record.rung]
            if value_at(record, objective, level) is None:
                return False
            if not may_go_on(record, records, objective, level, self._definition.reduction_factor):
                return True
            record.rung += 1
        return False

    def _let_go(self) -> None:
        """The search is over: trials that still wait at a rung are not promoted any more."""
        for record in self._records.values():
            if record.state == "paused":
                record.state, record.reason = "pruned", f"not promoted past step {self._levels[record.rung]}"
                self._finish(record)

    def _look(self, record: TrialRecord) -> None:
        """Read a running trial; prune or finish it."""
        assert record.run_id is not None
        observation = self._runner.observe(record.run_id)
        self._copy(observation, record)
        metric = self._objectives[0].metric
        for point in observation.curves.get(metric, []):
            if point.step > max(0, self._reported.get(record.trial, 0)) and math.isfinite(point.value):
                self._reported[record.trial] = point.step
                unwanted = self._strategy.report(record, point.step, point.value)
                # Of several new values the first that speaks against the trial decides.
                if unwanted and record.unwanted_at is None and not record.is_default:
                    record.unwanted_at = point.step
        reason = "stopped early" if record.unwanted_at is not None else self._strategy.stopped(record)
        if observation.state != "running":
            self._close(record, observation)
        elif self._is_measured_at_end(record):
            return
        elif reason is not None:
            self._store.append(record)  # the pruner says it once: it must survive a kill before the stop
            if self._stop_early(record):
                self._prune(record, reason)
        elif self._pauses(record) and self._stop_early(record):
            record.state = "paused"
            self._store.append(record)

    def _prune(self, record: TrialRecord, reason: str) -> None:
        record.state, record.reason = "pruned", f"{reason} at step {record.step}"
        self._finish(record)

    def _is_measured_at_end(self, record: TrialRecord) -> bool:
        """Whether a trial has its last value: nothing is saved by stopping it."""
        points = record.points(self._objectives[0].metric)
        return bool(points) and record.total_steps is not None and points[-1].step >= record.total_steps

    def _stop_early(self, record: TrialRecord) -> bool:
        """Stop a running trial; False when it came to its end all the same, before it could be stopped."""
        assert record.run_id is not None
        self._runner.stop([record.run_id])
        observation = self._runner.observe(record.run_id)
        self._copy(observation, record)
        if observation.state != "stopped":
            self._close(record, observation)
        elif self._is_measured_at_end(record):  # only its last checkpoint was broken off
            record.state = "stopped"
            self._store.append(record)
            self._again.append(record)
        else:
            return True
        return False

    def _close(self, record: TrialRecord, observation: Observation) -> None:
        if observation.state == "completed":
            if record.values is not None and all(map(math.isfinite, record.values)):
                record.state = "completed"
            elif any(observation.curves.get(o.metric) for o in self._objectives):
                record.state, record.reason = "diverged", "the objective is not a finite number"
            else:
                missing = ", ".join(
                    o.metric for o in self._objectives if not observation.curves.get(o.metric)
                )
                known = ", ".join(sorted(observation.curves))[:300] or "none"
                record.state, record.reason = "failed", f"the run logged no {missing} (it logged: {known})"
        else:
            record.reason = observation.reason or f"the run was {observation.state} from outside"
            # As the trainer's watchdogs and its client of the Tinker server say it.
            record.state = "diverged" if "training has diverged" in record.reason.lower() else "failed"
        self._finish(record)

    def _copy(self, observation: Observation, record: TrialRecord) -> None:
        record.step = max(observation.step, record.from_step)
        record.total_steps = observation.total_steps or record.total_steps
        record.seconds = observation.seconds
        kept = KEPT_CURVES | {o.metric for o in self._objectives}
        record.curves = curve_rows(
            {name: curve for name, curve in observation.curves.items() if name in kept}
        )
        if record.parent is not None:  # a member's curve began with the trial whose weights it has
            earlier = self._records[record.parent].curves
            record.curves = {
                name: [row for row in earlier.get(name, []) if row[0] <= record.from_step]
                + [row for row in rows if row[0] > record.from_step]
                for name, rows in {**earlier, **record.curves}.items()
            }
        tokens = observation.curves.get("trained_tokens")
        record.tokens = round(sum(point.value for point in tokens)) if tokens else None
        measured = [o.measure(record.points(o.metric)) for o in self._objectives]
        record.values = [m.value for m in measured if m is not None] if all(measured) else None
        if measured[0] is not None:
            record.standard_error, record.eval_count = measured[0].standard_error, measured[0].count

    def _finish(self, record: TrialRecord) -> None:
        record.ended_at = self._runner.now()
        self._store.append(record)
        self._ended_here.append(record)
        self._strategy.tell(record)
        if self._observer:
            self._observer.finished(record, self.snapshot())

    def _stop_running(self, running: Sequence[TrialRecord], reason: str) -> None:
        """Stop trials; they are run again when the search is resumed."""
        for record in running:
            if record.run_id is None:  # broken off while it was started: its run may be there
                record.run_id = self._runner.find(record.trial)
        self._runner.stop([r.run_id for r in running if r.run_id is not None])
        for record in running:
            if record.run_id is not None:
                observation = self._runner.observe(record.run_id)
                self._copy(observation, record)
                if observation.state == "completed":
                    self._close(record, observation)
                    continue
            record.state, record.reason, record.ended_at = "stopped", reason, self._runner.now()
            self._store.append(record)

    def snapshot(self) -> Snapshot:
        """The search as it stands."""
        records = list(self._records.values())
        planned = self._strategy.planned()
        planned = max(len(records), planned + self._definition.planned_replicates(planned - 1))
        finished = [r for r in records if r.state in FINISHED]
        remaining = None
        if finished:
            mean = statistics.fmean(r.seconds for r in finished)
            under_way = sum(min(r.seconds, mean) for r in records if r.state == "running")
            left = max(0, planned - len(finished)) * mean - under_way
            remaining = max(0.0, left / self._definition.parallel)
        return Snapshot(self._file, records, planned, self._runner.now() - self._begun, remaining)
