"""Which configuration comes next: Optuna's samplers, the refinement of the best, and no run twice."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from hermes_rl.errors import ConfigError, SearchError
from hermes_rl.search.chooser import Proposal
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.space import Space, params_key
from hermes_rl.search.trial import FINISHED, Stage, TrialRecord

_CONSTRAINT = "allowed"
_WARM = "from_search"
_RECORD = "record"
_MAX_ASKED = 5
_MAX_DRAWS = 2000
FIRST_WIDTH = 0.4
"""Width of the first neighbourhood of a refinement, as a part of each parameter's range."""


def _good_trials(finished: int) -> int:
    """How many of the finished trials ``tpe`` models as good ones: a quarter.

    Optuna's tenth is one or two trials of a search of 24, and which one is ahead by so little is luck.
    """
    return min(max(2, finished // 4), 25)


class _Grid(optuna.samplers.GridSampler):
    """Optuna's grid sampler for ask and tell: the end of the grid is asked for, not raised."""

    def after_trial(self, *args: Any, **kwargs: Any) -> None:
        pass


def make_sampler(definition: SearchDefinition, space: Space, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler for a definition.

    ``grid`` is exhaustive, in shuffled order. ``tpe`` models good and bad configurations jointly over all
    parameters and counts running trials as bad ones, so that parallel trials spread out (Bergstra et al.,
    2011; Watanabe, 2023). ``gp`` fits a Gaussian process.
    """
    startup = min(10, max(4, 2 * len(space.parameters) + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "`gamma` has been deprecated", FutureWarning)  # gone in Optuna 6
        if definition.strategy == "grid":
            return _Grid({p.name: list(p.grid()) for p in space.parameters}, seed=seed)
        if definition.strategy == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed,
                multivariate=True,
                group=any(p.when for p in space.parameters),
                constant_liar=definition.parallel > 1,
                n_startup_trials=startup,
                gamma=_good_trials,
            )
        if definition.strategy == "gp":
            _need_scipy()
            return optuna.samplers.GPSampler(
                seed=seed,
                n_startup_trials=startup,
                deterministic_objective=False,
            )
    return optuna.samplers.RandomSampler(seed=seed)


def _need_scipy() -> None:
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        raise SearchError(
            "The strategy gp needs the package scipy.", hint="pip install scipy, or use --strategy tpe."
        ) from error


class Strategy:
    """Chooses configurations and learns from their results.

    Args:
        definition: the search.
        space: its space, with the values of the fields that are not searched.
        storage: Optuna's storage; None keeps the study in memory.
        study_name: name of the study.
        pruner: Optuna's pruner.
        default_params: the default configuration's values of the searched fields.
        check: raises ConfigError for a configuration that the fields' own rules refuse.
    """

    def __init__(
        self,
        definition: SearchDefinition,
        space: Space,
        storage: optuna.storages.BaseStorage | None,
        study_name: str,
        pruner: optuna.pruners.BasePruner,
        default_params: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._definition = definition
        self._space = space
        self._check = check
        self._default = dict(default_params)
        self.default_in_space = space.contains(default_params)
        self._objectives = definition.build_objectives()
        self._planned = definition.planned_trials() - definition.refine * definition.refine_rounds
        direction = optuna.study.StudyDirection
        directions = [
            direction.MAXIMIZE if o.direction == "max" else direction.MINIMIZE for o in self._objectives
        ]
        self.study = optuna.create_study(
            storage=storage,
            study_name=study_name,
            load_if_exists=True,
            directions=directions,
            pruner=pruner,
            sampler=optuna.samplers.RandomSampler(),
        )
        known = self.study.get_trials(deepcopy=False)
        # A sampler that goes on after an interruption must not draw its first draws again.
        grid = definition.strategy == "grid"
        self.study.sampler = make_sampler(definition, space, definition.seed + (0 if grid else len(known)))
        if not known and self.default_in_space:
            self.study.enqueue_trial(space.snap(default_params))
        self._open: dict[int, optuna.Trial] = {}
        self._reported: dict[int, set[int]] = {}
        self._untried = iter(space.grid()) if space.countable() else None
        self._ahead: dict[str, Any] | None = None

    def warm_start(self, search_id: str, earlier: Sequence[TrialRecord]) -> None:
        """Begin with completed trials of another search that lie in this space; each is added once.

        Args:
            search_id: the other search.
            earlier: its trials.
        """
        known = {t.user_attrs.get(_WARM) for t in self.study.get_trials(deepcopy=False)}
        for record in earlier:
            source = f"{search_id}/{record.trial}"
            if source not in known:
                params = self._space.snap(record.params)
                distributions = {p.name: p.distribution() for p in self._space.parameters if p.name in params}
                self.study.add_trial(
                    optuna.create_trial(
                        params=params,
                        distributions=distributions,
                        values=record.values,
                        user_attrs={_WARM: source},
                    )
                )

    def adopt(self, records: Sequence[TrialRecord]) -> list[Proposal]:
        """Bring the study in line with the records after an interruption.

        Returns:
            configurations that the study had chosen and no record knows: they come next.
        """
        by_number, claimed = self._match(records)
        drawn = [r for r in records if r.stage in ("search", "refine")]
        seen = {params_key(r.params): r for r in drawn}
        forgotten: list[Proposal] = []
        for frozen in self.study.get_trials(deepcopy=False):
            if frozen.state != optuna.trial.TrialState.RUNNING:
                continue
            trial = optuna.Trial(self.study, frozen._trial_id)
            record = by_number.get(frozen.number)
            if record is None and frozen.number in claimed:
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            if record is None:
                # Drawn, but the process ended before it was started or was found to be known already.
                proposal = self._settle(trial, seen, self._stage(len(drawn) + len(forgotten)))
                if proposal is not None:
                    forgotten.append(proposal)
                    key = params_key(proposal.params)
                    seen[key] = TrialRecord(trial=-1, stage=proposal.stage, params=proposal.params, seed=0)
                continue
            self._open[frozen.number] = trial
            self._reported[frozen.number] = set(frozen.intermediate_values)
            if record.state in FINISHED:
                self.tell(record)
        return forgotten

    def _match(self, records: Sequence[TrialRecord]) -> tuple[dict[int, TrialRecord], set[int]]:
        """The record of each of the study's trials that has one; what the study lost is told to it anew.

        The records wait for the disk and the study's journal does not: after a power cut the journal's end
        may be missing, and a number that a record has may be free, or be another configuration's by now.

        Returns:
            number → record, and the numbers that a record had and has no more.
        """
        claimed: set[int] = set()
        frozen = {t.number: t for t in self.study.get_trials(deepcopy=False)}
        again = {t.user_attrs[_RECORD]: t.number for t in frozen.values() if _RECORD in t.user_attrs}
        matched: dict[int, TrialRecord] = {}
        for record in records:
            if record.study_number is None:
                continue
            record.study_number = again.get(record.trial, record.study_number)
            known = frozen.get(record.study_number)
            same = known is not None and params_key(known.params) == params_key(record.params)
            if not same or record.study_number in matched:
                claimed.add(record.study_number)
                record.study_number = self._add(record)
            matched[record.study_number] = record
        return matched, claimed

    def _add(self, record: TrialRecord) -> int:
        """A trial of the study for a record that has none, running as yet; returns its number."""
        names = [p for p in self._space.parameters if p.name in record.params]
        reported = [p for p in record.points(self._objectives[0].metric) if math.isfinite(p.value)]
        single = len(self._objectives) == 1
        self.study.add_trial(
            optuna.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=dict(record.params),
                distributions={p.name: p.distribution() for p in names},
                intermediate_values={p.step: p.value for p in reported if p.step > 0} if single else {},
                user_attrs={_RECORD: record.trial},
            )
        )
        return self.study.get_trials(deepcopy=False)[-1].number

    def _stage(self, drawn: int) -> Stage:
        return "search" if drawn < self._planned else "refine"

    def next(self, records: Sequence[TrialRecord]) -> Proposal | None:
        """The next configuration, or None while (or because) there is none.

        Args:
            records: every trial of the search so far, the running ones too.

        Raises:
            SearchError: the constraints leave nothing to draw.
        """
        if not self.default_in_space and not any(r.stage == "default" for r in records):
            return Proposal(dict(self._default), "default", None)
        drawn = [r for r in records if r.stage in ("search", "refine")]
        if sum(r.stage == "search" for r in drawn) < self._planned:
            return self._draw(drawn)
        refined = sum(r.stage == "refine" for r in drawn)
        if refined < self._definition.refine * self._definition.refine_rounds:
            return self._refine(drawn, refined)
        return None

    def _draw(self, drawn: Sequence[TrialRecord]) -> Proposal | None:
        seen = {params_key(r.params): r for r in drawn}
        if isinstance(self.study.sampler, _Grid):
            while not self.study.sampler.is_exhausted(self.study):
                proposal = self._ask(seen, "search")
                if proposal is not None:
                    return proposal
            return None
        if self._untried is not None and self._next_untried(seen) is None:
            return None
        for _ in range(_MAX_ASKED):
            proposal = self._ask(seen, "search")
            if proposal is not None:
                return proposal
        # A sampler may insist on a configuration that is known or not allowed. Then chance decides.
        rng = random.Random(f"{self._definition.seed}-chance-{len(drawn)}")
        for _ in range(_MAX_DRAWS):
            params = self._space.random(rng)
            if params_key(params) not in seen and self._allowed(params):
                self.study.enqueue_trial(params)
                return self._ask(seen, "search")
        if self._ahead is not None:
            self.study.enqueue_trial(self._ahead)
            return self._ask(seen, "search")
        if self._space.finite() and drawn:
            return None
        raise SearchError(
            f"{_MAX_DRAWS} configurations in a row broke a constraint or a rule of the fields.",
            hint="Widen the space or loosen the constraints.",
        )

    def _next_untried(self, seen: Mapping[str, TrialRecord]) -> dict[str, Any] | None:
        """The first point of a small space that is allowed and was not tried; None when all were.

        What was passed over once is never looked at again: points are tried, or not allowed, for good.
        """
        while self._ahead is None or params_key(self._ahead) in seen:
            self._ahead = next((p for p in self._untried or () if self._allowed(p)), None)
            if self._ahead is None:
                return None
        return self._ahead

    def _allowed(self, params: Mapping[str, Any]) -> bool:
        if not self._space.feasible(params):
            return False
        try:
            self._check(params)
        except ConfigError:
            return False
        return True

    def _ask(self, seen: Mapping[str, TrialRecord], stage: Stage) -> Proposal | None:
        """One draw; None when it is no new configuration."""
        return self._settle(self.study.ask(), seen, stage)

    def _settle(self, trial: optuna.Trial, seen: Mapping[str, TrialRecord], stage: Stage) -> Proposal | None:
        """A trial's configuration, if it is new and allowed; if not, the study is told why not."""
        params = self._space.suggest(trial)
        known = seen.get(params_key(params))
        if known is None and self._allowed(params):
            self._open[trial.number] = trial
            return Proposal(params, stage, trial.number)
        if known is None:
            trial.set_constraint(_CONSTRAINT, 1.0)
            single = len(self._objectives) == 1
            state = optuna.trial.TrialState.PRUNED if single else optuna.trial.TrialState.FAIL
            self.study.tell(trial, state=state)
        elif known.state == "completed" and known.values:
            trial.set_user_attr("same_as_trial", known.trial)
            self.study.tell(trial, known.values)
        else:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None

    def _refine(self, drawn: Sequence[TrialRecord], refined: int) -> Proposal | None:
        """A configuration near one of the best so far, nearer in each round.

        None also while trials of the first phase run: which are the best is known when all have ended.
        """
        if any(r.stage == "search" and r.state in ("running", "stopped") for r in drawn):
            return None
        sign = self._objectives[0].sign
        done = [r for r in drawn if r.state == "completed" and r.value is not None]
        done.sort(key=lambda r: -sign * (r.value or 0.0))
        if not done:
            return None
        number, place = divmod(refined, self._definition.refine)
        width = FIRST_WIDTH * 0.5**number
        centre = done[min(place, len(done) - 1)].params
        rng = random.Random(f"{self._definition.seed}-refine-{refined}")
        seen = {params_key(r.params): r for r in drawn}
        for attempt in range(_MAX_DRAWS):
            near: dict[str, Any] = {}
            # A neighbourhood that holds nothing new grows until it does.
            reach = min(1.0, width * 1.1 ** max(0, attempt - 10))
            for parameter in self._space.parameters:
                if self._space.active(parameter, near):
                    known = parameter.name in centre
                    near[parameter.name] = (
                        parameter.near(centre[parameter.name], reach, rng) if known else parameter.random(rng)
                    )
            if params_key(near) not in seen and self._allowed(near):
                self.study.enqueue_trial(near)
                return self._ask(seen, "refine")
        return None

    def waiting(self) -> bool:
        """Optuna always answers at once."""
        return False

    def stopped(self, record: TrialRecord) -> str | None:
        """Only a trial's curve stops it."""
        return None

    def report(self, record: TrialRecord, step: int, value: float) -> bool:
        """Tell the study one value of a running trial's curve.

        Returns:
            whether the pruner wants the trial stopped.
        """
        trial = self._open.get(record.study_number) if record.study_number is not None else None
        if trial is None or len(self._objectives) > 1:
            return False
        reported = self._reported.setdefault(trial.number, set())
        if step not in reported:  # a run that went on after an interruption tells its steps again
            reported.add(step)
            trial.report(value, step)
        return self._definition.pruner != "none" and trial.should_prune()

    def tell(self, record: TrialRecord) -> None:
        """Tell the study how a trial ended, as what it is: value, stopped early, diverged, or failed.

        Optuna has no state for a diverged trial. Told as failed, the samplers never hear of it, find its
        region unexplored and go there again and again; told as stopped early alone, ``tpe`` takes its last
        finite value. So ``tpe`` is told that it was stopped early and broke a constraint, which it ranks
        behind everything, and ``gp``, which models completed trials only, the worst value seen so far.
        """
        trial = self._open.pop(record.study_number, None) if record.study_number is not None else None
        if trial is None:
            return
        states = optuna.trial.TrialState
        if record.state == "completed" and record.values:
            self.study.tell(trial, record.values)
        elif record.state in ("pruned", "diverged") and len(self._objectives) == 1:
            worst = self._worst(record) if self._diverged(record) else None
            if worst is not None and isinstance(self.study.sampler, optuna.samplers.GPSampler):
                trial.set_user_attr("diverged", True)
                self.study.tell(trial, worst)
                return
            if self._diverged(record):
                trial.set_constraint(_CONSTRAINT, 1.0)
            self.study.tell(trial, state=states.PRUNED)
        else:
            self.study.tell(trial, state=states.FAIL)

    def _diverged(self, record: TrialRecord) -> bool:
        """Whether the objective's last value was no finite number, also where a rung stopped the trial."""
        points = record.points(self._objectives[0].metric)
        return record.state == "diverged" or (bool(points) and not math.isfinite(points[-1].value))

    def _worst(self, record: TrialRecord) -> float | None:
        """The worst value of a completed trial or, where it compares with that, of a trial's own curve."""
        objective = self._objectives[0]
        states = (optuna.trial.TrialState.COMPLETE,)
        values = [float(t.value or 0.0) for t in self.study.get_trials(deepcopy=False, states=states)]
        if objective.reduction in ("last", "best", "mean"):
            values += [p.value for p in record.points(objective.metric) if math.isfinite(p.value)]
        return min(values, key=lambda value: objective.sign * value, default=None)

    def planned(self) -> int:
        """Number of configurations to be tried, the default outside the space included."""
        refine = self._definition.refine * self._definition.refine_rounds
        return self._planned + refine + (not self.default_in_space)
