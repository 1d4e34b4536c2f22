"""Which paused trial goes on: asynchronous successive halving of the promoting kind.

Every trial pauses at a rung; whenever a place is free, the best third (one in ``reduction_factor``) of those
that reached a rung is promoted to the next, and only if there is nobody to promote a new trial begins (Li et
al., 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2). A promoted trial goes on
from its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hermes_rl.search.objective import Objective
from hermes_rl.search.trial import TrialRecord


def rung_levels(first: int, reduction_factor: int, total_steps: int) -> list[int]:
    """Steps of the rungs below the end of a trial: ``first``, then each ``reduction_factor`` times as far."""
    levels: list[int] = []
    level = first
    while level < total_steps:
        levels.append(level)
        level *= reduction_factor
    return levels


def value_at(record: TrialRecord, objective: Objective, level: int) -> float | None:
    """A trial's value at a rung: the first of its curve at or after that step."""
    return next((p.value for p in record.points(objective.metric) if p.step >= level), None)


def may_go_on(
    record: TrialRecord,
    records: Sequence[TrialRecord],
    objective: Objective,
    level: int,
    reduction_factor: int,
) -> bool:
    """Whether a trial is in the best part of those that reached a rung so far.

    One whose value is no finite number has reached the rung and never goes on.
    """
    reached = {
        r.trial: value
        for r in records
        if r.stage in ("search", "refine") and (value := value_at(r, objective, level)) is not None
    }
    places = len(reached) // reduction_factor
    finite = [trial for trial, value in reached.items() if math.isfinite(value)]
    best = sorted(finite, key=lambda trial: (-objective.sign * reached[trial], trial))[:places]
    return record.trial in best


def next_promotion(
    records: Sequence[TrialRecord], objective: Objective, levels: Sequence[int], reduction_factor: int
) -> TrialRecord | None:
    """The paused trial to go on with: of the highest rung that has one, the best."""
    for rung in reversed(range(len(levels))):
        paused = [
            r
            for r in records
            if r.state == "paused"
            and r.rung == rung
            and may_go_on(r, records, objective, levels[rung], reduction_factor)
        ]
        if paused:
            return max(paused, key=lambda r: objective.sign * (value_at(r, objective, levels[rung]) or 0.0))
    return None


def furthest(paused: Sequence[TrialRecord], objective: Objective) -> TrialRecord:
    """The paused trial that came furthest, the best of several; one without a finite value comes last."""

    def place(record: TrialRecord) -> tuple[bool, int, float]:
        finite = record.value is not None and math.isfinite(record.value)
        return finite, record.rung, objective.sign * (record.value or 0.0) if finite else 0.0

    return max(paused, key=place)
