"""What ends a run that has gone wrong although every process of it works.

The other watchdogs are where what they watch is: no batch and equal scores in
:mod:`hermes_rl.trainer.batches`, the environment's failures in its own process, silent servers in the
supervisor. ``docs/runs.md`` lists them all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from hermes_rl.config import RunConfig
from hermes_rl.errors import RunFailedError
from hermes_rl.trainer.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

_MUST_BE_FINITE = ("loss", "kl_sampler_trainer", "grad_norm")
_LAST_CHECKPOINT_SECONDS = 60.0
_MEGABYTE = 1_000_000


class Watchdogs:
    """Looks at a run's figures and at its disk.

    Args:
        config: the run's configuration, with the limits.
        run_dir: the run's folder; the file system it lies on is watched.
        checkpoints: saves a last one when the disk is nearly full.
    """

    def __init__(self, config: RunConfig, run_dir: Path, checkpoints: Checkpoints) -> None:
        self._max_kl = config.tinker.max_kl
        self._divergences: deque[float] = deque(maxlen=config.tinker.max_kl_steps)
        self._min_free = config.tinker.min_free_disk_mb * _MEGABYTE
        self._run_dir = run_dir
        self._checkpoints = checkpoints

    async def after_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Look at the figures of a step, not filtered, and at the disk.

        Raises:
            RunFailedError: a figure is not finite, sampler and trainer have drifted apart, or the disk is
                nearly full.
        """
        self._check_finite(step, figures)
        self._check_divergence(step, figures)
        await self.check_disk(step)

    def _check_finite(self, step: int, figures: Mapping[str, float]) -> None:
        for name in _MUST_BE_FINITE:
            value = figures.get(name)
            if value is not None and not math.isfinite(value):
                raise RunFailedError(
                    f"{name} is {value} at step {step}: training has diverged.",
                    hint="Lower learning_rate, or set grad_clip_norm.",
                )

    def _check_divergence(self, step: int, figures: Mapping[str, float]) -> None:
        value = figures.get("kl_sampler_trainer")
        if value is None:
            return
        self._divergences.append(value)
        mean = sum(self._divergences) / len(self._divergences)
        if len(self._divergences) == self._divergences.maxlen and mean > self._max_kl:
            raise RunFailedError(
                f"kl_sampler_trainer is {mean:.3g} nats/token, the mean of the last "
                f"{len(self._divergences)} steps, at step {step}: more than max_kl ({self._max_kl:g}).",
                hint="Lower learning_rate or max_batches_offpolicy: the weights that sample are no longer "
                "those that are trained.",
            )

    async def check_disk(self, step: int) -> None:
        """Save the state after ``step`` optimizer steps and end the run when space runs out.

        Raises:
            RunFailedError: less is free than ``min_free_disk_mb``.
        """
        free = free_bytes(self._run_dir)
        if free >= self._min_free:
            return
        outcome = await self._save_last(step)
        raise RunFailedError(
            f"The disk is nearly full: {free / _MEGABYTE:.0f} MB are free for {self._run_dir}, less than "
            f"min_free_disk_mb ({self._min_free // _MEGABYTE}). {outcome}",
            hint="Free some space, then `hermes-rl run resume` goes on.",
        )

    async def _save_last(self, step: int) -> str:
        if step == 0:
            return "Nothing had been learned yet."
        if self._checkpoints.has(step):
            return f"The checkpoint of step {step} is kept."
        try:
            async with asyncio.timeout(_LAST_CHECKPOINT_SECONDS):
                await self._checkpoints.save(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reason is the full disk
            logger.warning("No checkpoint of step %d could be saved: %r", step, error)
            return f"No checkpoint of step {step} could be saved ({error})."
        return f"A checkpoint of step {step} was saved."


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of ``folder``."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
