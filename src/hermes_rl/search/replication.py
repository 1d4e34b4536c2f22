"""Whether the winner really beats the default: the replicates on fresh seeds, and what they allow to say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hermes_rl.search.objective import Objective
from hermes_rl.search.ranking import candidates, default_record, tuned
from hermes_rl.search.space import format_params
from hermes_rl.search.statistics import (
    MOST_REPLICATES,
    Difference,
    Optimism,
    paired_difference,
    winners_curse,
)
from hermes_rl.search.trial import TrialRecord


@dataclass(frozen=True)
class Arm:
    """One configuration's replicates.

    Attributes:
        record: the trial of the search that is repeated.
        values: seed → value.
        errors: seed → standard error of the evaluation, 0 where unknown.
        failed: seed → ``failed`` or ``diverged``, where the replicate did not complete.
        lead: mean difference to the default on the seeds that both completed, positive where it is better;
            None without such a seed, and for the default itself.
        difference: to the default, None for the default itself or without two common seeds. Never ``better``
            for a configuration that failed on a seed.
    """

    record: TrialRecord
    values: dict[int, float]
    errors: dict[int, float]
    failed: dict[int, str] = field(default_factory=dict)
    lead: float | None = None
    difference: Difference | None = None

    @property
    def mean(self) -> float:
        """Mean over the replicates."""
        return statistics.fmean(self.values.values())


@dataclass(frozen=True)
class Replication:
    """What the replicates of a search say.

    Attributes:
        arms: the candidates that completed a replicate, the best first, then the default. Those that failed
            on a seed come after all that did not.
        recommended: the configuration to use.
        sentence: the verdict in plain words.
    """

    arms: list[Arm]
    recommended: TrialRecord
    sentence: str

    @property
    def difference(self) -> Difference | None:
        """The best candidate's difference to the default."""
        return self.arms[0].difference if self.arms else None


def evaluate_replicates(records: Sequence[TrialRecord], objective: Objective) -> Replication | None:
    """Read the replicates; None while none has ended.

    Configurations are compared and ordered on common seeds only, so that nobody gains by the seeds on which
    another failed. A candidate that failed on a seed is not called better, and not recommended: the seeds
    that it completed are a choice in its favour. Seeds on which the default failed are left out, which can
    only favour the default.
    """
    every = _arms(records)
    if not every:
        return None
    default = default_record(records)
    note = _failures(every)
    arms = [arm for arm in every if arm.values]
    if not arms:
        best = candidates(records, objective)[0]
        return Replication([], best, f"No replicate completed, so nothing is known of the winner.{note}")
    rest = [arm for arm in arms if arm.record is not default]
    base = next((arm for arm in arms if arm.record is default), None)
    if base is None:
        common = set.intersection(*(set(arm.values) for arm in rest))
        rest.sort(
            key=lambda arm: (
                bool(arm.failed),
                -objective.sign * statistics.fmean(arm.values[seed] for seed in common or arm.values),
            )
        )
        missing = "The default configuration has no replicates to compare with."
        return Replication(rest, rest[0].record, missing + note)
    comparisons = sum(arm.record is not default for arm in every)
    compared = [_compare(arm, base, rest, objective, comparisons) for arm in rest]
    compared.sort(key=lambda arm: (bool(arm.failed), arm.lead is None, -(arm.lead or 0.0), arm.record.trial))
    order = [*compared, base]
    if not compared:
        said = (
            "No other configuration completed a replicate: keep the default."
            if comparisons
            else "The default configuration is the best that was found."
        )
        return Replication(order, base.record, said + note)
    best = compared[0]
    ahead = (best.lead or 0.0) > 0 and not best.failed
    return Replication(order, best.record if ahead else base.record, _sentence(best) + note)


def _arms(records: Sequence[TrialRecord]) -> list[Arm]:
    """The configurations that have a replicate which has ended."""
    by_trial = {record.trial: record for record in records}
    arms: dict[int, Arm] = {}
    for record in records:
        if record.stage != "replicate" or record.state not in ("completed", "failed", "diverged"):
            continue
        assert record.replicate_of is not None
        arm = arms.setdefault(record.replicate_of, Arm(by_trial[record.replicate_of], {}, {}))
        if record.state == "completed" and record.value is not None:
            arm.values[record.seed] = record.value
            arm.errors[record.seed] = record.standard_error or 0.0
        else:
            arm.failed[record.seed] = record.state
    return list(arms.values())


def _failures(arms: Sequence[Arm]) -> str:
    """A sentence that names the replicates which did not complete; empty when all did."""
    named = [
        f"trial {arm.record.trial}{' (the default)' if arm.record.is_default else ''} {state} on seed {seed}"
        for arm in arms
        for seed, state in sorted(arm.failed.items())
    ]
    return f" Replicates that did not complete: {', '.join(named)}." if named else ""


def _compare(arm: Arm, base: Arm, others: Sequence[Arm], objective: Objective, comparisons: int) -> Arm:
    """The arm with its difference to the default; every candidate helps to know the noise."""
    seeds = sorted(set(arm.values) & set(base.values))
    if not seeds:
        return arm
    lead = statistics.fmean(objective.sign * (arm.values[seed] - base.values[seed]) for seed in seeds)
    if len(seeds) < 2:
        return replace(arm, lead=lead)
    pooled = [arm, base, *(a for a in others if a is not arm and set(seeds) <= set(a.values))]
    difference = paired_difference(
        [[objective.sign * a.values[seed] for seed in seeds] for a in pooled],
        [[a.errors[seed] for seed in seeds] for a in pooled],
        comparisons=comparisons,
    )
    if arm.failed and difference.verdict == "better":
        difference = replace(difference, verdict="not distinguishable")
    return replace(arm, lead=lead, difference=difference)


def _sentence(best: Arm) -> str:
    """The verdict on the best candidate, in plain words."""
    name = f"Trial {best.record.trial} ({format_params(best.record.params)})"
    difference = best.difference
    if difference is None:
        return f"{name}: at least two replicates on common seeds are needed to compare it with the default."
    interval = (
        f"{difference.mean:+.3f}, {100 * difference.level:.3g} % interval {difference.low:+.3f} to "
        f"{difference.high:+.3f}, over {difference.pairs} fresh seeds"
    )
    if best.failed and difference.low > 0:
        return f"{name} is not shown to be better than the default, as it failed on a seed: {interval}."
    if difference.verdict == "better":
        return f"{name} is better than the default: {interval}."
    if difference.verdict == "worse":
        return f"{name} is worse than the default: {interval}. Keep the default."
    if difference.more_replicates is None:
        needed = f"even {MOST_REPLICATES} replicates would not tell so small a difference from none"
    else:
        count = difference.more_replicates
        needed = f"about {count} more replicate{'s' if count > 1 else ''} of each would be needed"
    return f"{name} is not distinguishable from the default with this budget: {interval}; {needed}."


def estimate_optimism(
    records: Sequence[TrialRecord], objective: Objective, replication: Replication | None
) -> Optimism | None:
    """How much of the best trial's value is luck; the noise is the replicates' where there are any.

    Trials that were stopped early competed as well, with the values that they had then, and the winner was
    picked from them all. Each enters with its value and what the completed trials gained on average after
    that step, but not above the best. What noise the values at different steps share is unknown; as the
    items are the same, all of it is taken to be shared, so that with early stopping the estimate is an upper
    one.
    """
    done = candidates(records, objective)
    if not done:
        return None
    stopped = [r for r in tuned(records) if r.state in ("pruned", "paused") and r.value is not None]
    measured = replication.difference.noise if replication and replication.difference else 0.0
    noise = [max(record.standard_error or 0.0, measured) for record in [*done, *stopped]]
    if not any(noise):
        return None
    values = [objective.sign * (record.value or 0.0) for record in done]
    values += [min(values[0], _projected(record, done, objective)) for record in stopped]
    found = winners_curse(values, noise)
    return None if found is None else replace(found, stopped=len(stopped))


def _projected(record: TrialRecord, done: Sequence[TrialRecord], objective: Objective) -> float:
    """What a stopped trial would have come to with the gain of the others; larger is better."""
    reached = record.points(objective.metric)[-1].step
    gains = []
    for other in done:
        then = objective.measure([p for p in other.points(objective.metric) if p.step <= reached])
        if then is not None and other.value is not None:
            gains.append(other.value - then.value)
    gain = statistics.fmean(gains) if gains else 0.0
    return objective.sign * ((record.value or 0.0) + gain)


def optimism_sentence(optimism: Optimism, objective: Objective) -> str:
    """The winner's optimism in plain words."""
    stopped, about = "", "about"
    if optimism.stopped:
        stopped = f" ({optimism.stopped} of them stopped early, but in the race until then)"
        about = "up to about"
    return (
        f"The best of {optimism.trials} noisy trials{stopped} looks {about} {optimism.optimism:.3f} better "
        f"than it is: expect {objective.sign * optimism.expected:.3f} rather than "
        f"{objective.sign * optimism.observed:.3f} from another run."
    )
