"""W&B sweep files: what they say is what is searched, and what cannot be said is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl.errors import SearchError
from hermes_rl.search.definition import define_search
from hermes_rl.search.space import Choice, Int, LogUniform, Uniform
from hermes_rl.search.sweeps import from_sweep, read_sweep_file, to_sweep

SWEEP: dict[str, Any] = {
    "program": "train.py",
    "method": "bayes",
    "metric": {"name": "eval_percent_correct", "goal": "maximize"},
    "parameters": {
        "learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 2e-4},
        "lora_rank": {"values": [16, 32, 64]},
        "max_batches_offpolicy": {"min": 1, "max": 4},
        "group_size": {"distribution": "q_uniform", "q": 4, "min": 4, "max": 16},
        "inference_weight": {"min": 0.5, "max": 1.0},
        "total_steps": {"value": 40},
    },
    "run_cap": 15,
    "early_terminate": {"type": "hyperband", "min_iter": 3, "eta": 2},
}


def test_a_sweep_file_is_the_search_it_describes(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(SWEEP))
    definition = define_search(read_sweep_file(file))
    assert definition.build_space().parameters == (
        Int("group_size", 4, 16, step=4),
        Uniform("inference_weight", 0.5, 1.0),
        LogUniform("learning_rate", 1e-5, 2e-4),
        Choice("lora_rank", (16, 32, 64)),
        Int("max_batches_offpolicy", 1, 4),
    )
    assert definition.strategy == "gp"
    assert definition.trials == 15
    assert definition.overrides == {"total_steps": 40}
    assert definition.pruner == "hyperband"
    assert definition.reduction_factor == 2
    assert definition.objectives == ["eval_percent_correct"]


def test_a_search_written_as_a_sweep_reads_back_as_itself() -> None:
    definition = define_search(from_sweep(SWEEP))
    assert define_search(from_sweep(to_sweep(definition))) == definition
    grid = define_search({"preset": "article-grid"})
    again = define_search(from_sweep(to_sweep(grid)))
    assert again.space == grid.space
    assert again.planned_trials() == 27


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "annealing"}, "annealing"),
        (
            {"parameters": {"x": {"distribution": "normal", "mu": 0, "sigma": 1, "min": 0, "max": 1}}},
            "normal",
        ),
        ({"parameters": {"x": {"min": 1}}}, "max"),
        ({"early_terminate": {"type": "envelope"}}, "envelope"),
        ({"schedule": {}}, "schedule"),
    ],
)
def test_what_cannot_be_done_here_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SearchError, match=reason):
        from_sweep({**SWEEP, **change})


def test_what_a_sweep_cannot_say_is_refused() -> None:
    definition = define_search({"space": {"batch_size": [16, 32]}, "constraints": ["batch_size > 8"]})
    with pytest.raises(SearchError, match="constraints"):
        to_sweep(definition)
