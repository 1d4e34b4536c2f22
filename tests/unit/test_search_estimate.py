"""What a dry run promises a search will cost."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.config import Workspace
from hermes_rl.search.definition import define_search
from hermes_rl.search.estimate import Rates, estimate, measured_rates


def test_tokens_and_time_grow_with_the_sequences_and_time_shrinks_with_parallel_trials() -> None:
    rates = Rates(tokens_per_sequence=4.0, seconds_per_sequence=0.1, runs=3)
    assert estimate(rates, steps=100, batch_size=16, parallel=1) == (6400, 160.0)
    assert estimate(rates, steps=100, batch_size=32, parallel=4) == (12800, 80.0)
    assert "3 earlier runs" in rates.source


def test_a_workspace_without_runs_says_that_it_guesses(tmp_path: Path) -> None:
    rates = measured_rates(Workspace.resolve(tmp_path), "arithmetic_tinker", "embedded", 16)
    assert rates.runs == 0
    assert "guess" in rates.source


def test_the_batch_size_is_the_mean_over_the_space() -> None:
    space = define_search({"space": {"batch_size": [16, 32, 64]}}).build_space()
    assert space.mean("batch_size", 16.0) == 112 / 3
    assert space.mean("group_size", 8.0) == 8.0
