"""Whether the winner really beats the default: the replicates on fresh seeds, and what they allow to say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hermes_rl.search.objective import Objective
from hermes_rl.search.ranking import candidates, default_record
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
        difference: to the default, None for the default itself or without two common seeds.
    """

    record: TrialRecord
    values: dict[int, float]
    errors: dict[int, float]
    difference: Difference | None = None

    @property
    def mean(self) -> float:
        """Mean over the replicates."""
        return statistics.fmean(self.values.values())


@dataclass(frozen=True)
class Replication:
    """What the replicates of a search say.

    Attributes:
        arms: the candidates, the best on average first, then the default.
        recommended: the configuration to use.
        sentence: the verdict in plain words.
    """

    arms: list[Arm]
    recommended: TrialRecord
    sentence: str

    @property
    def difference(self) -> Difference | None:
        """The best candidate's difference to the default."""
        return self.arms[0].difference


def evaluate_replicates(records: Sequence[TrialRecord], objective: Objective) -> Replication | None:
    """Read the replicates; None while there are none."""
    by_trial = {record.trial: record for record in records}
    values: dict[int, dict[int, float]] = {}
    errors: dict[int, dict[int, float]] = {}
    for record in records:
        if record.stage == "replicate" and record.state == "completed" and record.value is not None:
            assert record.replicate_of is not None
            values.setdefault(record.replicate_of, {})[record.seed] = record.value
            errors.setdefault(record.replicate_of, {})[record.seed] = record.standard_error or 0.0
    if not values:
        return None
    default = default_record(records)
    arms = [Arm(by_trial[trial], values[trial], errors[trial]) for trial in values]
    rest = [arm for arm in arms if arm.record is not default]
    rest.sort(key=lambda arm: -objective.sign * arm.mean)
    base = next((arm for arm in arms if arm.record is default), None)
    if base is None:
        return Replication(
            rest, rest[0].record, "The default configuration has no replicates to compare with."
        )
    compared = [_compare(arm, base, rest, objective) for arm in rest]
    order = [*compared, base]
    if not compared:
        return Replication(order, base.record, "The default configuration is the best that was found.")
    best = compared[0]
    ahead = objective.sign * (best.mean - base.mean) > 0
    return Replication(order, best.record if ahead else base.record, _sentence(best))


def _compare(arm: Arm, base: Arm, others: Sequence[Arm], objective: Objective) -> Arm:
    """The arm with its difference to the default; every candidate helps to know the noise."""
    seeds = sorted(set(arm.values) & set(base.values))
    if len(seeds) < 2:
        return arm
    pooled = [arm, base, *(a for a in others if a is not arm and set(seeds) <= set(a.values))]
    difference = paired_difference(
        [[objective.sign * a.values[seed] for seed in seeds] for a in pooled],
        [[a.errors[seed] for seed in seeds] for a in pooled],
        comparisons=len(others),
    )
    return Arm(arm.record, arm.values, arm.errors, difference)


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
    """How much of the best trial's value is luck; the noise is the replicates' where there are any."""
    done = candidates(records, objective)
    measured = replication.difference.noise if replication and replication.difference else 0.0
    noise = [max(record.standard_error or 0.0, measured) for record in done]
    if not any(noise):
        return None
    return winners_curse([objective.sign * (record.value or 0.0) for record in done], noise)


def optimism_sentence(optimism: Optimism, count: int, objective: Objective) -> str:
    """The winner's optimism in plain words."""
    return (
        f"The best of {count} noisy trials looks about {optimism.optimism:.3f} better than it is: expect "
        f"{objective.sign * optimism.expected:.3f} rather than {objective.sign * optimism.observed:.3f} "
        "from another run."
    )
