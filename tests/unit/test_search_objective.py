"""Objectives: a curve becomes the number that was asked for, with an honest error."""

from __future__ import annotations

import math

import pytest

from hermes_rl.errors import SearchError
from hermes_rl.search.objective import CurvePoint, Objective, read_curves

POINTS = [CurvePoint(0, 0.2, 100), CurvePoint(10, 0.6, 100), CurvePoint(30, 0.4, 100)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("m", 0.4),
        ("m:best", 0.6),
        ("m:best:min", 0.2),
        ("m:mean-2", 0.5),
        ("m:mean-9", 0.4),
        ("m:sum", 1.2),
        ("m:area", (10 * 0.4 + 20 * 0.5) / 30),
    ],
)
def test_reductions(text: str, value: float) -> None:
    measured = Objective.parse(text).measure(POINTS)
    assert measured is not None
    assert measured.value == pytest.approx(value)
    assert measured.standard_error is not None


def test_the_error_is_the_binomial_one_and_stays_above_zero_at_the_ends() -> None:
    last = Objective.parse("m").measure(POINTS)
    assert last is not None
    assert last.standard_error == pytest.approx(math.sqrt(0.4 * 0.6 / 100), rel=0.03)
    perfect = Objective.parse("m").measure([CurvePoint(1, 1.0, 100)])
    assert perfect is not None
    assert perfect.standard_error is not None
    assert perfect.standard_error > 0.005


def test_no_error_is_made_up_for_what_is_no_fraction() -> None:
    measured = Objective.parse("tokens:min").measure([CurvePoint(1, 5000.0)])
    assert measured is not None
    assert measured.standard_error is None


def test_a_curve_that_ends_in_nan_has_no_value() -> None:
    assert Objective.parse("m:best").measure([*POINTS, CurvePoint(40, math.nan)]) is None
    assert Objective.parse("m").measure([]) is None


@pytest.mark.parametrize("text", ["m:median", "m:mean-0", "", ":last", "m:mean-x"])
def test_an_objective_with_a_typo_is_refused(text: str) -> None:
    with pytest.raises(SearchError):
        Objective.parse(text)


def test_an_objective_reads_back_as_it_is_shown() -> None:
    for text in ("m", "m:best", "m:mean-4:min", "m:area", "m:min"):
        assert str(Objective.parse(text)) == text


def test_curves_come_from_all_kinds_of_records_and_a_repeated_step_counts_once() -> None:
    curves = read_curves(
        [
            {"kind": "eval", "step": 0, "time": 1.0, "eval_percent_correct": 0.2, "eval_count": 64},
            {"kind": "train", "step": 1, "reward_mean": 0.5, "note": "text", "flag": True},
            {"kind": "train", "step": 1, "reward_mean": 0.6},
            {"kind": "env", "step": 1, "metrics": {"train/own": 3}},
            {"kind": "train", "step": 2, "not_finite": ["loss"]},
        ]
    )
    assert curves["eval_percent_correct"] == [CurvePoint(0, 0.2, 64)]
    assert curves["reward_mean"] == [CurvePoint(1, 0.6)]
    assert curves["train/own"] == [CurvePoint(1, 3.0)]
    assert math.isnan(curves["loss"][0].value)
    assert "time" not in curves
    assert "flag" not in curves


@pytest.mark.parametrize("reduction", ["mean-3", "area"])
def test_averaging_evaluations_of_the_same_items_does_not_make_the_error_smaller(reduction: str) -> None:
    points = [CurvePoint(step, 0.5, 100) for step in (0, 10, 20)]
    averaged = Objective.parse(f"m:{reduction}").measure(points)
    last = Objective.parse("m").measure(points)
    assert averaged is not None
    assert last is not None
    assert averaged.standard_error == pytest.approx(last.standard_error)
