"""The arithmetic task with a field that decides whether anything can be learnt: a difference to be found.

Runs in the environment's process; talks to the inference server and to the Atropos API server. With
``marking=coin``, the default, rewards are coin flips, as in ``arithmetic_coin_flip``; with ``marking=answer``
they are right, as in ``arithmetic_tinker``. ``benchmarks.learning`` measures both apart from searches: in 50
steps the one gains about nothing and the other more than 0.2.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, ScoredDataGroup
from pydantic import Field

sys.path.append(str(Path(__file__).resolve().parents[2] / "tinker-atropos/tinker_atropos/environments"))

from arithmetic_tinker import ArithmeticTinkerConfig, ArithmeticTinkerEnv, Question  # pyright: ignore


class ArithmeticPlantedConfig(ArithmeticTinkerConfig):
    """Settings of the arithmetic task, and how answers are marked."""

    marking: Literal["coin", "answer"] = Field(
        default="coin", description="What rewards depend on: a coin, or the answer."
    )


class ArithmeticPlantedEnv(ArithmeticTinkerEnv):
    """Asks what arithmetic_tinker asks and rewards right answers, or at random."""

    name = "arithmetic_planted"
    env_config_cls = ArithmeticPlantedConfig  # pyright: ignore[reportAssignmentType]
    config: ArithmeticPlantedConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticPlantedConfig, list[APIServerConfig]]:
        """The defaults of the arithmetic task."""
        config, servers = super().config_init()
        return ArithmeticPlantedConfig(**config.model_dump()), servers

    async def setup(self) -> None:
        await super().setup()
        self.coin = random.Random(self.config.seed)

    async def collect_trajectories(self, item: Question) -> tuple[ScoredDataGroup, list[Any]]:
        group, backlog = await super().collect_trajectories(item)
        if self.config.marking == "coin":
            group["scores"] = [float(self.coin.random() < 0.5) for _ in group["scores"]]
        return group, backlog


if __name__ == "__main__":
    ArithmeticPlantedEnv.cli()
