from __future__ import annotations

import json
from pathlib import Path

from hermes_rl.runs.files import METRICS
from hermes_rl.runs.metrics import MetricsFollower, best_evaluation, curves, last_of, read_records


def _write(folder: Path, *records: object, rest: str = "") -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with (folder / METRICS).open("a") as file:
        file.write(lines + rest)


def test_a_step_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {"kind": "train", "step": 1, "reward_mean": 0.1},
        {"kind": "train", "step": 2, "reward_mean": 0.2},
        {"kind": "train", "step": 2, "reward_mean": 0.25},
    )
    assert [(r["step"], r["reward_mean"]) for r in read_records(tmp_path)] == [(1, 0.1), (2, 0.25)]


def test_a_half_written_last_line_is_not_a_record(tmp_path: Path) -> None:
    _write(tmp_path, {"kind": "train", "step": 1}, rest='{"kind": "train", "st')
    assert len(read_records(tmp_path)) == 1


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    assert curves([]) == {"step": []}


def test_curves_have_a_row_a_step_and_gaps_where_nothing_was_measured() -> None:
    columns = curves(
        [
            {"kind": "eval", "step": 0, "eval_percent_correct": 0.3},
            {"kind": "train", "step": 1, "reward_mean": 0.1, "phase": "x", "flag": True},
            {"kind": "eval", "step": 1, "eval_percent_correct": 0.4},
            {"kind": "env", "step": 1, "metrics": {"a": 1}},
        ]
    )
    assert columns == {"step": [0, 1], "eval_percent_correct": [0.3, 0.4], "reward_mean": [None, 0.1]}


def test_the_best_evaluation_is_the_earliest_of_equals() -> None:
    records = [
        {"kind": "eval", "step": step, "eval_percent_correct": v}
        for step, v in ((0, 0.1), (5, 0.6), (9, 0.6))
    ]
    assert best_evaluation(records)["step"] == 5
    assert last_of(records, "eval")["step"] == 9
    assert best_evaluation([]) == {}


def test_following_gives_each_record_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    follower = MetricsFollower(tmp_path)
    assert follower.new_records() == []
    _write(tmp_path, {"step": 1}, rest='{"step": ')
    assert follower.new_records() == [{"step": 1}]
    assert follower.new_records() == []
    _write(tmp_path, rest="2}\n")
    assert follower.new_records() == [{"step": 2}]
