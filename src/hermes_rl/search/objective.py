"""What a search looks for: one number, with its standard error, from a run's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hermes_rl.errors import SearchError

REDUCTIONS = "last, best, mean-K (of the last K), area (under the curve), sum"


@dataclass(frozen=True)
class CurvePoint:
    """One value of a metric.

    Attributes:
        step: optimizer steps taken when it was measured.
        value: the value.
        count: number of items it is the average of, when known.
    """

    step: int
    value: float
    count: int | None = None


Curves = dict[str, list[CurvePoint]]
"""Metric → its points by step."""


@dataclass(frozen=True)
class Measured:
    """An objective's value for one trial.

    Attributes:
        value: the value.
        standard_error: from the number of evaluated items alone (binomial), or None when unknown; of a mean
            an upper bound.
        step: the last step that it took into account.
        count: number of items of one evaluation, or None.
    """

    value: float
    standard_error: float | None
    step: int
    count: int | None


@dataclass(frozen=True)
class Objective:
    """A metric, how its curve becomes one number, and which way is better.

    Attributes:
        metric: name of any logged metric, as in the run's metrics.
        reduction: ``last``, ``best``, ``mean``, ``area`` or ``sum``.
        last_k: how many values ``mean`` averages.
        direction: ``max`` or ``min``.
    """

    metric: str = "eval_percent_correct"
    reduction: Literal["last", "best", "mean", "area", "sum"] = "last"
    last_k: int = 3
    direction: Literal["max", "min"] = "max"

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read ``metric[:reduction][:max|min]``, such as ``loss:mean-3:min``.

        Raises:
            SearchError: an unknown reduction or direction.
        """
        metric, *options = [part.strip() for part in text.split(":")]
        reduction, last_k, direction = "last", 3, "max"
        for option in options:
            head, _, count = option.partition("-")
            if option in ("max", "min"):
                direction = option
            elif option in ("last", "best", "area", "sum"):
                reduction = option
            elif head == "mean" and (not count or (count.isdigit() and int(count) > 0)):
                reduction, last_k = "mean", int(count or 3)
            else:
                raise SearchError(
                    f"The objective {text!r} has an unknown part {option!r}.",
                    allowed=f"{REDUCTIONS}; max, min",
                )
        if not metric:
            raise SearchError("The objective names no metric.", allowed="metric[:reduction][:max|min]")
        return cls(metric, reduction, last_k, direction)  # type: ignore[arg-type]

    def __str__(self) -> str:
        reduction = f"mean-{self.last_k}" if self.reduction == "mean" else self.reduction
        text = self.metric if reduction == "last" else f"{self.metric}:{reduction}"
        return text if self.direction == "max" else f"{text}:min"

    @property
    def sign(self) -> float:
        """1 when larger is better, -1 when smaller is."""
        return 1.0 if self.direction == "max" else -1.0

    def measure(self, points: Sequence[CurvePoint]) -> Measured | None:
        """The objective of one curve; None when the curve is empty or not finite at its end.

        The standard error treats each value as the fraction right of ``count`` independent items
        (binomial). The values of different steps are taken to err together, as they are of the same items:
        averaging them does not make the error smaller. That is an upper bound; how much they share is
        unknown.
        """
        if not points or not math.isfinite(points[-1].value):
            return None
        finite = [point for point in points if math.isfinite(point.value)]
        if self.reduction == "last":
            used, weights = finite[-1:], [1.0]
        elif self.reduction == "best":
            best = max(finite, key=lambda point: self.sign * point.value)
            used, weights = [best], [1.0]
        elif self.reduction == "mean":
            used = finite[-self.last_k :]
            weights = [1 / len(used)] * len(used)
        elif self.reduction == "sum":
            used, weights = finite, [1.0] * len(finite)
        else:
            used, weights = finite, _trapezoid_weights([point.step for point in finite])
        value = math.fsum(w * point.value for w, point in zip(weights, used, strict=True))
        variances = [binomial_variance(point) for point in used]
        error = None
        if all(variance is not None for variance in variances):
            error = math.fsum(w * math.sqrt(v or 0.0) for w, v in zip(weights, variances, strict=True))
        return Measured(value, error, points[-1].step, used[-1].count)


def binomial_variance(point: CurvePoint) -> float | None:
    """Variance of a fraction right of ``count`` items, by Agresti and Coull's adjusted fraction.

    The adjustment (two successes and two failures more) keeps the error above 0 at 0 % and 100 %
    (Agresti and Coull, 1998, The American Statistician 52).
    """
    if not point.count or not 0.0 <= point.value <= 1.0:
        return None
    fraction = (point.value * point.count + 2) / (point.count + 4)
    return fraction * (1 - fraction) / (point.count + 4)


def _trapezoid_weights(steps: Sequence[int]) -> list[float]:
    """Weights of the trapezoid rule over ``steps``, that add up to 1."""
    if len(steps) == 1 or steps[-1] == steps[0]:
        return [1 / len(steps)] * len(steps)
    weights = [0.0] * len(steps)
    for i in range(len(steps) - 1):
        width = (steps[i + 1] - steps[i]) / (steps[-1] - steps[0])
        weights[i] += width / 2
        weights[i + 1] += width / 2
    return weights


_NOT_METRICS = frozenset({"kind", "step", "time", "metrics"})


def read_curves(records: Iterable[Mapping[str, Any]]) -> Curves:
    """The curves in a run's metric records.

    Args:
        records: lines of ``metrics.jsonl``: ``{"kind", "step", metric: number, …}``, evaluations with
            ``eval_count``, the environment's own under ``"metrics"``, those that were no number by name
            under ``"not_finite"``.

    Returns:
        Metric → points in the order of their steps; of two records of one step the later counts (a run
        that went on from a checkpoint repeats steps).
    """
    curves: dict[str, dict[int, CurvePoint]] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        count = record.get("eval_count") if record.get("kind") == "eval" else None
        own = record.get("metrics")
        for name, value in [*record.items(), *(own.items() if isinstance(own, Mapping) else ())]:
            if name in _NOT_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            size = int(count) if count and name != "eval_count" else None
            curves.setdefault(name, {})[step] = CurvePoint(step, float(value), size)
        for name in record.get("not_finite") or ():
            curves.setdefault(name, {})[step] = CurvePoint(step, math.nan)
    return {name: [points[step] for step in sorted(points)] for name, points in curves.items()}
