"""A made-up training run for the tests of searches: it rises to a quality that depends on the fields."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl.config import Workspace
from hermes_rl.search.definition import define_search
from hermes_rl.search.objective import CurvePoint
from hermes_rl.search.orchestrator import Orchestrator, create_search
from hermes_rl.search.replay import Recording, ReplayTrials
from hermes_rl.search.store import SearchStore

DEFAULT: dict[str, Any] = {
    "learning_rate": 0.00004,
    "batch_size": 16,
    "lora_rank": 32,
    "group_size": 8,
    "loss_fn": "importance_sampling",
    "total_steps": 48,
    "steps_per_eval": 8,
}
ITEMS = 256


def quality(config: Mapping[str, Any]) -> float:
    """What a run of this configuration ends at, without noise."""
    rate = math.exp(-(math.log(config["learning_rate"] / 0.00006) ** 2))
    return 0.4 + 0.4 * rate * (1 - 4 / config["batch_size"])


def training(config: Mapping[str, Any], seed: int) -> Recording:
    """A run: its training noise and its evaluation noise depend on configuration and seed alone."""
    rng = random.Random(f"{sorted(config.items())} {seed}")
    end = quality(config) + rng.gauss(0, 0.01)
    points = []
    for step in range(0, config["total_steps"] + 1, config["steps_per_eval"]):
        chance = 0.35 + (end - 0.35) * (1 - math.exp(-step / 12))
        points.append(CurvePoint(step, sum(rng.random() < chance for _ in range(ITEMS)) / ITEMS, ITEMS))
    return Recording({"eval_percent_correct": points}, config["total_steps"])


def search(
    folder: Path, source: Any = training, **fields: Any
) -> tuple[SearchStore, ReplayTrials, Orchestrator]:
    """A search over :func:`training`, made but not started; without replicates unless they are asked for."""
    runner = ReplayTrials(source, DEFAULT)
    definition = define_search({"environment": "made_up", "replicate": 0, **fields})
    store = create_search(Workspace.resolve(folder), definition, runner)
    return store, runner, Orchestrator(store, runner)
