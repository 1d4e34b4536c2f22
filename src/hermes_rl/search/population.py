"""Population-based training: members train side by side, and the worst go on as changed copies of the best.

The method of Jaderberg et al., 2017, "Population Based Training of Neural Networks". A trial is cut into
segments. When every member has finished a segment, the worst quarter copies weights and optimizer of members
of the best quarter (exploit) and changes their fields (explore): each number is multiplied by 1.2 or 0.8,
each choice moved to a neighbour, and one time in four drawn anew. The others go on as they are.

A segment is a run of its own that begins with the checkpoint at the end of another, so nothing here knows
more of a run than where it began, and an interrupted population goes on like any other search. Members wait
for each other at the end of a segment. That costs little, as segments are equally long, and makes the result
independent of how many run at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hermes_rl.errors import ConfigError, SearchError
from hermes_rl.search.chooser import Proposal
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.space import Choice, Parameter, Space
from hermes_rl.search.trial import FINISHED, TrialRecord

QUARTER = 0.25
RESAMPLED = 0.25
"""Share of the fields that are drawn anew rather than changed a little."""
FACTORS = (0.8, 1.2)
_MAX_DRAWS = 2000


class Population:
    """Chooses every member's fields, segment by segment, from the records alone.

    Args:
        definition: the search; ``trials`` is the number of members.
        space: its space, with the values of the fields that are not searched.
        total_steps: optimizer steps of a whole trial.
        default_params: the default configuration's values of the searched fields; the first member begins
            with them where the space holds them.
        check: raises ConfigError for a configuration that the fields' own rules refuse.
    """

    def __init__(
        self,
        definition: SearchDefinition,
        space: Space,
        total_steps: int,
        default_params: Mapping[str, Any],
        check: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._definition = definition
        self._space = space
        self._default = dict(default_params)
        self._check = check
        self._sign = definition.build_objectives()[0].sign
        self._members = definition.population()
        self._ends = segment_ends(total_steps, definition.segments)

    def adopt(self, records: Sequence[TrialRecord]) -> list[Proposal]:
        """Nothing is chosen that the records do not know."""
        return []

    def next(self, records: Sequence[TrialRecord]) -> Proposal | None:
        """The next member's segment; None while a segment is not finished by all, or after the last.

        Raises:
            SearchError: no member finished a segment.
        """
        if not any(r.stage == "default" for r in records):
            return Proposal(dict(self._default), "default", None)
        parts = {(r.segment, r.member): r for r in records if r.stage == "segment"}
        for segment, end in enumerate(self._ends):
            missing = [m for m in range(self._members) if (segment, m) not in parts]
            if missing:
                before = [parts[(segment - 1, m)] for m in range(self._members)] if segment else []
                if any(part.state not in FINISHED for part in before):
                    return None
                params, parent = self._choose(segment, missing[0], before)
                return Proposal(
                    params, "segment", None, member=missing[0], segment=segment, parent=parent, until=end
                )
        return None

    def _choose(
        self, segment: int, member: int, before: Sequence[TrialRecord]
    ) -> tuple[dict[str, Any], int | None]:
        """A member's fields for a segment, and the trial that it goes on from."""
        rng = random.Random(f"{self._definition.seed}-population-{segment}-{member}")
        if not before:
            if member == 0 and self._space.contains(self._default):
                return self._space.snap(self._default), None
            return self._allowed(lambda _: self._space.random(rng)), None
        own = before[member]
        ranked = sorted(
            (part for part in before if part.state == "completed" and part.value is not None),
            key=lambda part: (-self._sign * (part.value or 0.0), part.member),
        )
        if not ranked:
            raise SearchError(
                f"No member of the population finished segment {segment}.", hint=f"The last: {own.reason}"
            )
        count = max(1, round(QUARTER * self._members))
        best = ranked[:count]
        # With few members left, the best are not copied over themselves.
        worst = [part for part in ranked[-count:] if part not in best]
        if own in ranked and own not in worst:
            return dict(own.params), own.trial
        donor = rng.choice(best)
        return self._allowed(lambda attempt: self._explore(donor.params, rng, attempt)), donor.trial

    def _allowed(self, draw: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        for attempt in range(_MAX_DRAWS):
            params = draw(attempt)
            if self._space.feasible(params):
                try:
                    self._check(params)
                except ConfigError:
                    continue
                return params
        raise SearchError(f"{_MAX_DRAWS} configurations in a row broke a constraint or a rule of the fields.")

    def _explore(self, params: Mapping[str, Any], rng: random.Random, attempt: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for parameter in self._space.parameters:
            if self._space.active(parameter, changed):
                known = parameter.name in params and rng.random() >= RESAMPLED
                changed[parameter.name] = (
                    perturb(parameter, params[parameter.name], rng) if known else parameter.random(rng)
                )
        return changed

    def waiting(self) -> bool:
        """A population answers at once."""
        return False

    def report(self, record: TrialRecord, step: int, value: float) -> bool:
        """A segment is compared at its end only."""
        return False

    def stopped(self, record: TrialRecord) -> str | None:
        """Nobody stops a segment."""
        return None

    def tell(self, record: TrialRecord) -> None:
        """Everything is in the records."""

    def planned(self) -> int:
        """Every member's segments, and the default configuration as a whole trial."""
        return self._members * len(self._ends) + 1


def segment_ends(total_steps: int, segments: int) -> list[int]:
    """The optimizer steps at which segments end; as equal as whole steps allow."""
    return sorted({max(1, round(total_steps * (at + 1) / segments)) for at in range(segments)})


def perturb(parameter: Parameter, value: Any, rng: random.Random) -> Any:
    """A value a little away: a number times 0.8 or 1.2, within its bounds; a choice's neighbour."""
    if isinstance(parameter, Choice):
        values = list(parameter.values)
        at = next((i for i, known in enumerate(values) if known == value), 0)
        return values[min(max(at + rng.choice((-1, 1)), 0), len(values) - 1)]
    changed = min(max(value * rng.choice(FACTORS), parameter.low), parameter.high)
    if not parameter.whole:
        return changed
    step = parameter.step
    whole = int(parameter.low) + round((changed - parameter.low) / step) * step
    if whole == value:  # a small number times 1.2 is itself
        whole = int(value) + rng.choice((-1, 1)) * step
    last = int(parameter.low) + (int(parameter.high) - int(parameter.low)) // step * step
    return min(max(whole, int(parameter.low)), last)


def lineage(record: TrialRecord, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The segments that a member's weights went through, the first of them first."""
    by_trial = {r.trial: r for r in records}
    line = [record]
    while line[0].parent is not None:
        line.insert(0, by_trial[line[0].parent])
    return line


def schedule(record: TrialRecord, records: Iterable[TrialRecord]) -> list[dict[str, Any]]:
    """The fields that a member was trained with, segment by segment.

    Returns:
        ``{"from_step": a, "to_step": b, "trial": n, field: value, …}`` for each; steps ``a + 1`` to ``b``
        were taken with these values.
    """
    return [
        {"from_step": part.from_step, "to_step": part.step, "trial": part.trial, **part.params}
        for part in lineage(record, records)
    ]
