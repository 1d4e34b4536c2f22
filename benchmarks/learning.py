"""Does it learn? The default configuration on several seeds, and the runs in which nothing may be learned.

Prints the gain in ``eval_percent_correct`` from step 0 to the last step: with the defaults, with learning
rate 0, with rewards replaced by coin flips, and with the other learning rates of the article's grid.
"""

from __future__ import annotations

import math
import time

from benchmarks.measuring import REPOSITORY, evaluations, finished_run, fresh_workspace
from benchmarks.reporting import Report

ENVIRONMENT = "arithmetic_tinker"
COIN_FLIP = "arithmetic_coin_flip"
SEEDS = (0, 1, 2)
GAIN_GOAL = 0.20
SECONDS_GOAL = 240.0
LEARNING_RATES = (2e-5, 4e-5, 6e-5)


def noise(share: float, items: float) -> float:
    """Three standard errors of the difference of two shares measured on ``items`` items each."""
    return 3.0 * math.sqrt(2.0 * max(share * (1.0 - share), 0.01) / items)


def main() -> None:
    report = Report()
    with fresh_workspace(REPOSITORY / "benchmarks" / "environments") as workspace:
        for seed in SEEDS:
            started = time.monotonic()
            curve = evaluations(finished_run(workspace, ENVIRONMENT, seed=seed))
            seconds = time.monotonic() - started
            report.at_least(f"default/seed{seed}/eval_count", curve[-1][2], 256)
            report.note(f"default/seed{seed}/start", curve[0][1])
            report.note(f"default/seed{seed}/end", curve[-1][1])
            report.at_least(f"default/seed{seed}/gain", curve[-1][1] - curve[0][1], GAIN_GOAL)
            report.at_most(f"default/seed{seed}/seconds", seconds, SECONDS_GOAL)

        curve = evaluations(finished_run(workspace, ENVIRONMENT, {"learning_rate": 0.0}))
        change = abs(curve[-1][1] - curve[0][1])
        report.at_most("learning_rate_0/change", change, noise(curve[0][1], curve[0][2]))

        curve = evaluations(finished_run(workspace, COIN_FLIP))
        report.at_most("coin_flip/gain", curve[-1][1] - curve[0][1], noise(curve[0][1], curve[0][2]))

        means: list[float] = []
        for rate in LEARNING_RATES:
            curve = evaluations(
                finished_run(workspace, ENVIRONMENT, {"learning_rate": rate, "steps_per_eval": 10})
            )
            mean = sum(share for _, share, _ in curve[1:]) / len(curve[1:])
            means.append(mean)
            report.note(f"learning_rate_{rate:g}/mean_of_curve", mean)
            report.note(f"learning_rate_{rate:g}/end", curve[-1][1])
        report.at_least("learning_rates/spread_of_curves", max(means) - min(means), 0.05)
    report.close()


if __name__ == "__main__":
    main()
