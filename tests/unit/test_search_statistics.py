"""An honest winner: no winner is found in noise, a real one is found, and luck is called luck."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.search_simulation import ITEMS, search

from hermes_rl.search.objective import CurvePoint
from hermes_rl.search.replay import Recording
from hermes_rl.search.replication import evaluate_replicates
from hermes_rl.search.report import write_report
from hermes_rl.search.statistics import (
    paired_difference,
    replicates_needed,
    student_quantile,
    winners_curse,
)
from hermes_rl.search.summary import summarize


@pytest.mark.parametrize(
    ("probability", "dof", "expected"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.9875, 4, 3.495), (0.975, 30, 2.042)],
)
def test_student_quantiles_are_those_of_the_tables(probability: float, dof: int, expected: float) -> None:
    assert student_quantile(probability, dof) == pytest.approx(expected, abs=0.004)


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        values = (
            np.array([[0.7], [0.6], [0.65]]) + rng.normal(0, 0.03, size=(3, 3)) + rng.normal(0, 0.1, size=3)
        )
        difference = paired_difference(values.tolist(), np.zeros((3, 3)).tolist(), seed=trial)
        covered += difference.low <= 0.1 <= difference.high
    assert 0.92 <= covered / 300 <= 0.99


def test_the_interval_is_never_narrower_than_the_evaluation_allows() -> None:
    same = [[0.70, 0.70, 0.70], [0.66, 0.66, 0.66]]
    exact = paired_difference(same, [[0.0] * 3] * 2)
    assert exact.verdict == "better"
    noisy = paired_difference(same, [[0.03] * 3] * 2)
    assert noisy.verdict == "not distinguishable"
    assert noisy.high - noisy.low > 2 * 1.96 * 0.03 * (2 / 3) ** 0.5 * 0.9


def test_the_number_of_replicates_that_would_be_needed_is_enough() -> None:
    needed = replicates_needed(0.05, 0.04, 3, 0.95)
    assert needed is not None
    assert replicates_needed(0.1, 0.04, 3, 0.95) < needed  # type: ignore[operator]
    assert replicates_needed(0.0001, 0.04, 3, 0.95) is None


def test_the_winners_curse_is_about_as_large_as_it_turns_out_to_be() -> None:
    rng = np.random.default_rng(1)
    for spread in (0.0, 0.03):
        real, estimated = [], []
        for trial in range(200):
            true = 0.6 + rng.normal(0, spread, size=27)
            seen = true + rng.normal(0, 0.03, size=27)
            real.append(seen.max() - true[seen.argmax()])
            estimate = winners_curse(seen.tolist(), [0.03] * 27, seed=trial)
            assert estimate is not None
            estimated.append(estimate.optimism)
        assert np.mean(estimated) == pytest.approx(np.mean(real), abs=0.012)


def _noisy_training(true: float, config: Mapping[str, Any], seed: int) -> Recording:
    rng = random.Random(f"{sorted(config.items())} {seed}")
    end = true + rng.gauss(0, 0.02)
    right = sum(rng.random() < end for _ in range(ITEMS))
    points = [CurvePoint(0, 0.4, ITEMS), CurvePoint(config["total_steps"], right / ITEMS, ITEMS)]
    return Recording({"eval_percent_correct": points}, config["total_steps"], seconds_per_step=0.1)


def _verdicts(folder: Path, planted: float) -> list[str]:
    """Verdicts of 20 searches over the article's grid in which one configuration is better by ``planted``."""
    verdicts = []
    for number in range(20):

        def training(config: Mapping[str, Any], seed: int, number: int = number) -> Recording:
            better = (config["learning_rate"], config["batch_size"], config["lora_rank"]) == (6e-5, 32, 16)
            return _noisy_training(0.5 + planted * better, config, seed + 1000 * number)

        store, _, loop = search(
            folder / str(number), training, preset="article-grid", replicate=3, parallel=27, seed=number
        )
        loop.run()
        replication = evaluate_replicates(store.records(), store.load().definition.build_objectives()[0])
        assert replication is not None
        assert replication.difference is not None
        verdicts.append(replication.difference.verdict)
        if replication.difference.verdict == "better" and planted:
            assert replication.recommended.params == {
                "learning_rate": 6e-5,
                "batch_size": 32,
                "lora_rank": 16,
            }
    return verdicts


def test_no_winner_is_found_in_noise(tmp_path: Path) -> None:
    assert _verdicts(tmp_path, 0.0).count("not distinguishable") >= 18


def test_a_planted_difference_is_found(tmp_path: Path) -> None:
    assert _verdicts(tmp_path, 0.2).count("better") >= 18


def test_the_report_says_in_words_what_was_found(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, preset="article-grid", replicate=3, pruner="asha")
    loop.run()
    page = write_report(store).read_text(encoding="utf-8")
    assert page.count("function(") > 100  # plotly.js is inside: the file needs nothing else
    assert "<script src" not in page
    summary = summarize(store)
    assert summary.replication is not None
    for text in (page, (store.folder / "report.md").read_text()):
        assert "the default" in text
        assert summary.replication.sentence.split(":")[0] in text
        assert "better than it is" in text
    assert "hermes-rl run start made_up --config" in page
    assert (store.folder / "results.csv").read_text().count("\n") == len(store.records()) + 1


def test_a_report_can_be_written_while_nothing_or_little_is_there(tmp_path: Path) -> None:
    store, _, _ = search(tmp_path, preset="article-grid")
    assert write_report(store).exists()
