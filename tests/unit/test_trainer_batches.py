"""When a run ends because its batches teach nothing, and when it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.config import build_run_config
from hermes_rl.errors import RunFailedError
from hermes_rl.trainer.batches import BatchSource
from hermes_rl.trainer.datums import Assembled, assemble
from hermes_rl.trainer.ledger import SamplingLedger

ENVIRONMENT = SimpleNamespace(name="x", file_path="/none", class_name="None")
TEACHES: dict[str, Any] = {
    "tokens": [[1, 2], [1, 3]],
    "masks": [[-100, 2], [-100, 3]],
    "scores": [0.0, 1.0],
}
NOTHING: dict[str, dict[str, Any]] = {
    "equal": {**TEACHES, "scores": [1.0, 1.0]},
    "masked": {**TEACHES, "masks": [[-100, -100]] * 2},
    "zero": {**TEACHES, "advantages": [[0.0, 0.0]] * 2},
}


def source(most: int) -> BatchSource:
    config = build_run_config(ENVIRONMENT, overrides={"max_equal_score_groups": most})
    unused: Any = None  # noting a batch asks nobody
    return BatchSource(unused, unused, unused, config)


def batch(*groups: dict[str, Any]) -> Assembled:
    return assemble(groups, SamplingLedger(), max_token_length=64, normalize_advantages=False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("equal", r"^6 groups in a row had equal scores. The last 3 batches"),
        (
            "masked",
            r"^6 groups in a row taught nothing: 0 had equal scores.*12 had a mask that trains no token",
        ),
        ("zero", r"^6 groups in a row taught nothing: 0 had equal scores.*12 had no advantage but zero"),
    ],
)
def test_batches_that_teach_nothing_end_the_run_with_the_reason(kind: str, reason: str) -> None:
    batches = source(most=6)
    batches.note(batch(NOTHING[kind], NOTHING[kind]))
    batches.note(batch(NOTHING[kind], NOTHING[kind]))
    with pytest.raises(RunFailedError, match=reason):
        batches.note(batch(NOTHING[kind], NOTHING[kind]))


def test_a_batch_that_teaches_starts_the_count_anew() -> None:
    batches = source(most=4)
    for _ in range(5):
        batches.note(batch(NOTHING["equal"], NOTHING["zero"], NOTHING["masked"]))
        batches.note(batch(NOTHING["equal"], TEACHES))
    batches.check_end()


def test_a_short_run_that_was_taught_nothing_is_not_complete() -> None:
    batches = source(most=2000)
    batches.note(batch(NOTHING["equal"], NOTHING["masked"]))
    with pytest.raises(RunFailedError, match=r"2 groups in a row taught nothing: 1 had equal scores"):
        batches.check_end()
