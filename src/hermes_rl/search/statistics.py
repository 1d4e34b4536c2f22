"""What noisy trials allow to say: paired differences, their intervals, and the optimism of a winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

DRAWS = 20_000
MOST_REPLICATES = 200
"""Beyond this many replicates the advice is that the difference is too small to matter."""

Verdict = Literal["better", "worse", "not distinguishable"]


@dataclass(frozen=True)
class Difference:
    """A paired difference between two configurations over replication seeds.

    Attributes:
        mean: mean difference, positive where the first is better.
        low, high: its bootstrap confidence interval.
        level: the interval's confidence level.
        pairs: number of seeds on which both ran.
        noise: standard deviation of one run's value (seed and evaluation together).
        verdict: what the interval says.
        more_replicates: seeds still needed to tell the two apart if the mean stays; None when they are told
            apart, or when more than :data:`MOST_REPLICATES` would be needed.
    """

    mean: float
    low: float
    high: float
    level: float
    pairs: int
    noise: float
    verdict: Verdict
    more_replicates: int | None


def paired_difference(
    values: Sequence[Sequence[float]],
    standard_errors: Sequence[Sequence[float]],
    *,
    first: int = 0,
    second: int = 1,
    comparisons: int = 1,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Compare two configurations by runs on the same seeds.

    The interval is a residual bootstrap of the two-way layout configuration x seed (Davison and Hinkley,
    1997, "Bootstrap Methods and their Application", section 6.2.3): what a configuration and a seed add is
    taken out, and the residuals of all configurations are pooled, so that three seeds already say something
    about the noise. Each draw is widened by the chance that so few residuals are small by luck (a factor
    sqrt(dof / chi2(dof)), which gives Student's interval for normal residuals). The noise is never taken to
    be less than the evaluation's own binomial error. For several comparisons the level is Bonferroni's.

    Args:
        values: one row a configuration, one column a seed; larger is better.
        standard_errors: of each value, from its number of evaluated items; 0 where unknown.
        first, second: rows to compare.
        comparisons: number of comparisons that are made with these values.
        confidence: joint confidence of all comparisons.
        seed: of the bootstrap.

    Raises:
        ValueError: fewer than two configurations or seeds.
    """
    table_CS = np.asarray(values, dtype=float)
    errors_CS = np.asarray(standard_errors, dtype=float)
    configurations, seeds = table_CS.shape
    if configurations < 2 or seeds < 2:
        raise ValueError("a paired difference needs two configurations and two seeds")
    residuals_CS = (
        table_CS
        - table_CS.mean(axis=1, keepdims=True)
        - table_CS.mean(axis=0, keepdims=True)
        + table_CS.mean()
    )
    dof = (configurations - 1) * (seeds - 1)
    variance = float((residuals_CS**2).sum() / dof)
    binomial = float((errors_CS**2).mean())
    level = 1 - (1 - confidence) / comparisons
    mean = float((table_CS[first] - table_CS[second]).mean())

    rng = np.random.default_rng(seed)
    pool = residuals_CS.ravel() * math.sqrt(residuals_CS.size / dof)
    drawn_BS = rng.choice(pool, size=(DRAWS, seeds)) - rng.choice(pool, size=(DRAWS, seeds))
    deviations_B = drawn_BS.mean(axis=1) * np.sqrt(dof / rng.chisquare(dof, size=DRAWS))
    missing = math.sqrt(max(0.0, binomial - variance) * 2 / seeds)
    deviations_B = deviations_B + rng.normal(0.0, 1.0, size=DRAWS) * missing
    tail = (1 - level) / 2
    below, above = np.quantile(deviations_B, [tail, 1 - tail])
    low, high = mean - float(above), mean - float(below)
    verdict: Verdict = "better" if low > 0 else "worse" if high < 0 else "not distinguishable"
    noise = math.sqrt(max(variance, binomial))
    needed = None
    if verdict == "not distinguishable":
        total = replicates_needed(abs(mean), noise, configurations, level)
        needed = None if total is None else max(1, total - seeds)
    return Difference(mean, low, high, level, seeds, noise, verdict, needed)


def replicates_needed(difference: float, noise: float, configurations: int, level: float) -> int | None:
    """Seeds after which a difference of this size stands clear of 0; None beyond :data:`MOST_REPLICATES`.

    Args:
        difference: size of the mean difference.
        noise: standard deviation of one run's value.
        configurations: number of configurations whose residuals are pooled.
        level: confidence level.
    """
    for seeds in range(2, MOST_REPLICATES + 1):
        critical = student_quantile(1 - (1 - level) / 2, (configurations - 1) * (seeds - 1))
        if critical * noise * math.sqrt(2 / seeds) < difference:
            return seeds
    return None


def student_quantile(probability: float, dof: int) -> float:
    """Quantile of Student's t, by Cornish and Fisher's expansion (exact for 1 and 2 degrees of freedom).

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    if dof == 1:
        return math.tan(math.pi * (probability - 0.5))
    if dof == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof ** (power + 1) for power, term in enumerate(terms))


@dataclass(frozen=True)
class Optimism:
    """How much better the best of many noisy trials looks than it is.

    Attributes:
        observed: the best trial's value.
        expected: the value that a repetition of it would have on average.
        spread: standard deviation of the trials' true values, by the same estimate.
        trials: how many the best was picked from.
        stopped: how many of them were stopped early.
    """

    observed: float
    expected: float
    spread: float
    trials: int
    stopped: int = 0

    @property
    def optimism(self) -> float:
        """Observed less expected, positive whichever way is better."""
        return abs(self.observed - self.expected)


def winners_curse(values: Sequence[float], noise: Sequence[float], *, seed: int = 0) -> Optimism | None:
    """The optimism of picking the largest of several noisy values.

    Empirical Bayes: the true values are taken as normal, with the variance that is left of the observed one
    after the noise; the values are drawn again from that, noise is added, the largest is picked, and how
    much of it was noise is averaged (Smith and Winkler, 2006, "The Optimizer's Curse", Management
    Science 52).

    Args:
        values: one value a configuration; larger is better.
        noise: standard deviation of each value.
        seed: of the simulation.

    Returns:
        the estimate, or None for fewer than three values.
    """
    if len(values) < 3:
        return None
    observed_N, noise_N = np.asarray(values, dtype=float), np.asarray(noise, dtype=float)
    spread = max(0.0, float(observed_N.var(ddof=1) - (noise_N**2).mean()))
    total_N = spread + noise_N**2
    weight_N = np.divide(spread, total_N, out=np.ones_like(total_N), where=total_N > 0)
    centre_N = observed_N.mean() + weight_N * (observed_N - observed_N.mean())
    rng = np.random.default_rng(seed)
    draws = max(500, min(4000, 1_000_000 // len(values)))  # in a blink also for many values
    true_BN = centre_N + rng.normal(size=(draws, len(values))) * np.sqrt(weight_N) * noise_N
    seen_BN = true_BN + rng.normal(size=true_BN.shape) * noise_N
    picked_B = seen_BN.argmax(axis=1)
    rows = np.arange(draws)
    excess = float((seen_BN[rows, picked_B] - true_BN[rows, picked_B]).mean())
    best = float(observed_N.max())
    return Optimism(best, best - max(0.0, excess), math.sqrt(spread), len(values))
