"""What a search will cost in tokens and time: from earlier runs of the workspace where there are any."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from hermes_rl import runs
from hermes_rl.config import DEFAULT_PROFILE, Workspace

_MOST_RUNS = 20
"""Only so many of the newest finished runs are read."""
_GUESSES = {DEFAULT_PROFILE: (4.0, 2.0)}
_OTHER_GUESS = (512.0, 30.0)
"""Trained tokens of a sequence and seconds of a step where nothing was measured: the embedded model on two
cores; for anything else hardly more than an order of magnitude."""


@dataclass(frozen=True)
class Rates:
    """What a step costs.

    Attributes:
        tokens_per_sequence: trained tokens of one sequence of a batch.
        seconds_per_sequence: wall time for one sequence of a batch, evaluations and start-up shared out.
        runs: number of finished runs it was measured on; 0 for the stated default.
    """

    tokens_per_sequence: float
    seconds_per_sequence: float
    runs: int

    @property
    def source(self) -> str:
        """Where the rates come from, in words."""
        if not self.runs:
            return (
                f"a guess, {self.tokens_per_sequence:g} trained tokens a sequence: no run of this "
                "environment and profile has finished here yet"
            )
        count = f"{self.runs} earlier run{'s' if self.runs > 1 else ''}"
        return f"by {count} of this environment and profile"


def measured_rates(workspace: Workspace, environment: str, profile: str, batch_size: int) -> Rates:
    """The rates of the workspace's finished runs of this environment and profile, medians over runs.

    Args:
        batch_size: sequences of a step; only the default's seconds depend on it.
    """
    finished = [
        run
        for run in runs.list_runs(workspace)
        if run.status == "completed" and run.environment == environment and run.profile == profile
    ]
    tokens, seconds = [], []
    for run in finished[-_MOST_RUNS:]:
        steps = [r for r in runs.read_metrics(workspace, run.run_id) if r.get("kind") == "train"]
        sequences = sum(r.get("sequences", 0) for r in steps)
        if sequences and run.started_at and run.ended_at:
            tokens.append(sum(r.get("trained_tokens", 0) for r in steps) / sequences)
            seconds.append((run.ended_at - run.started_at).total_seconds() / sequences)
    if not tokens:
        tokens_guess, step_guess = _GUESSES.get(profile, _OTHER_GUESS)
        return Rates(tokens_guess, step_guess / batch_size, 0)
    return Rates(statistics.median(tokens), statistics.median(seconds), len(tokens))


def estimate(rates: Rates, steps: int, batch_size: float, parallel: int) -> tuple[int, float]:
    """Trained tokens and wall seconds of so many optimizer steps.

    Args:
        steps: optimizer steps of all trials together.
        batch_size: sequences of a step, on average over the space.
        parallel: trials at a time. The rates were measured as the runs went, so that trials that shared
            the machine then are as slow here.
    """
    sequences = steps * batch_size
    return round(sequences * rates.tokens_per_sequence), sequences * rates.seconds_per_sequence / parallel
