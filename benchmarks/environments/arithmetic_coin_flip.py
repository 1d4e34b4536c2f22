"""The arithmetic task with rewards by coin flip: a run on it must not learn.

Runs in the environment's process; talks to the inference server and to the Atropos API server. Evaluation
and ``train/percent_correct`` still come from the true verifier: they tell whether anything was learnt.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from atroposlib.envs.base import ScoredDataGroup

sys.path.append(str(Path(__file__).resolve().parents[2] / "tinker-atropos/tinker_atropos/environments"))

from arithmetic_tinker import ArithmeticTinkerEnv, Question  # pyright: ignore


class ArithmeticCoinFlipEnv(ArithmeticTinkerEnv):
    """Asks what arithmetic_tinker asks and rewards at random, whatever is answered."""

    name = "arithmetic_coin_flip"

    async def setup(self) -> None:
        await super().setup()
        self.coin = random.Random(self.config.seed)

    async def collect_trajectories(self, item: Question) -> tuple[ScoredDataGroup, list[Any]]:
        group, backlog = await super().collect_trajectories(item)
        group["scores"] = [float(self.coin.random() < 0.5) for _ in group["scores"]]
        return group, backlog


if __name__ == "__main__":
    ArithmeticCoinFlipEnv.cli()
