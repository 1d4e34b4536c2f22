"""The trainer's watchdogs: what ends a run, with which numbers, and what does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.config import build_run_config
from hermes_rl.errors import RunFailedError
from hermes_rl.trainer.watchdogs import Watchdogs

ENVIRONMENT = SimpleNamespace(name="x", file_path="/none", class_name="None")


class SavedCheckpoints:
    """Keeps the steps that were saved."""

    def __init__(self, error: Exception | None = None) -> None:
        self.saved: list[int] = []
        self.error = error

    def has(self, step: int) -> bool:
        return step in self.saved

    async def save(self, step: int) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append(step)


def watchdogs(folder: Path, checkpoints: Any = None, **overrides: Any) -> Watchdogs:
    config = build_run_config(ENVIRONMENT, overrides=overrides)
    return Watchdogs(config, folder, checkpoints or SavedCheckpoints())


@pytest.mark.parametrize("name", ["loss", "grad_norm", "kl_sampler_trainer"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_figure_that_is_no_number_ends_the_run(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(RunFailedError, match=f"{name} is .* at step 3"):
        await watchdogs(tmp_path).after_step(3, {name: value})


async def test_only_a_lasting_divergence_ends_the_run(tmp_path: Path) -> None:
    watching = watchdogs(tmp_path, max_kl=1.0, max_kl_steps=3)
    for step, value in enumerate([50.0, 0.0, 0.0, 0.0, 2.9, 0.0], start=1):
        figures = {"kl_sampler_trainer": value}
        if step == 3:
            with pytest.raises(RunFailedError, match="mean of the last 3 steps"):
                await watching.after_step(step, figures)
        else:
            await watching.after_step(step, figures)


async def test_steps_that_trained_nothing_do_not_count(tmp_path: Path) -> None:
    watching = watchdogs(tmp_path, max_kl=1.0, max_kl_steps=2)
    await watching.after_step(1, {"kl_sampler_trainer": 5.0})
    await watching.after_step(2, {"empty_batch": 1.0})
    with pytest.raises(RunFailedError):
        await watching.after_step(3, {"kl_sampler_trainer": 5.0})


async def test_a_nearly_full_disk_costs_no_step(tmp_path: Path) -> None:
    checkpoints = SavedCheckpoints()
    with pytest.raises(RunFailedError, match="A checkpoint of step 4 was saved"):
        await watchdogs(tmp_path, checkpoints, min_free_disk_mb=10**9).after_step(4, {})
    assert checkpoints.saved == [4]


async def test_a_checkpoint_that_cannot_be_saved_leaves_the_reason_the_disk(tmp_path: Path) -> None:
    checkpoints = SavedCheckpoints(OSError("no space"))
    with pytest.raises(RunFailedError, match=r"nearly full.*No checkpoint of step 4 could be saved"):
        await watchdogs(tmp_path, checkpoints, min_free_disk_mb=10**9).check_disk(4)


async def test_the_disk_is_not_looked_at_when_nobody_wants_it(tmp_path: Path) -> None:
    await watchdogs(tmp_path, min_free_disk_mb=0).check_disk(4)
