"""W&B sweep files: what they say is what is searched, and what cannot be said is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import SearchError
from hermes_rl.search.definition import SearchDefinition, define_search
from hermes_rl.search.space import Choice, Int, LogUniform, Uniform
from hermes_rl.search.sweeps import (
    check_sweep,
    from_sweep,
    read_sweep_file,
    sweep_differences,
    sweep_notes,
    to_sweep,
)

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


LOGGED = {"name": "eval/eval_percent_correct", "goal": "maximize"}


def round_trip(folder: Path, sweep: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The sweep file that a search is written as which was read from a sweep file and kept on disk."""
    file, again = folder / "sweep.yaml", folder / "again.yaml"
    file.write_text(yaml.safe_dump(sweep))
    definition = define_search({**read_sweep_file(file), **fields})
    definition = SearchDefinition.model_validate_json(definition.model_dump_json())
    again.write_text(yaml.safe_dump(to_sweep(definition)))
    return yaml.safe_load(again.read_text())


@pytest.mark.parametrize("strategy", ["gp", "wandb"])
def test_a_sweep_file_is_the_same_file_when_it_is_written_again(tmp_path: Path, strategy: str) -> None:
    sweep = {
        **SWEEP,
        "name": "rates",
        "description": "which rate",
        "metric": {**LOGGED, "target": 0.9},
        "early_terminate": {"type": "hyperband", "min_iter": 3, "s": 2, "strict": True},
        "parameters": {
            **SWEEP["parameters"],
            "batch_size": {"values": [16, 32], "probabilities": [0.9, 0.1]},
            "weight_decay": {"distribution": "log_uniform", "min": -9, "max": -3},
            "loss_fn": {"value": "ppo"},
        },
    }
    assert round_trip(tmp_path, sweep, strategy=strategy) == sweep


def test_what_is_changed_on_the_command_line_is_changed_in_the_sweep(tmp_path: Path) -> None:
    written = round_trip(
        tmp_path,
        SWEEP,
        strategy="wandb",
        trials=7,
        reduction_factor=4,
        space={"lora_rank": [16, 64], "group_size": {"int": [4, 16], "step": 4}},
        overrides={"total_steps": 60},
    )
    assert written["run_cap"] == 7
    assert written["early_terminate"] == {"type": "hyperband", "min_iter": 1, "eta": 4}
    assert written["parameters"] == {
        "lora_rank": {"values": [16, 64]},
        "group_size": SWEEP["parameters"]["group_size"],
        "total_steps": {"value": 60},
    }
    assert written["metric"] == LOGGED


def test_a_search_written_as_a_sweep_reads_back_as_itself() -> None:
    for fields in (
        {"preset": "article-grid"},
        {"preset": "article-bayes", "pruner": "hyperband", "objective": "loss:min", "strategy": "gp"},
        {"space": {"group_size": "int:5..18:4", "lora_rank": "int:8..63:8"}, "strategy": "random"},
    ):
        definition = define_search(fields)
        again = define_search(from_sweep(to_sweep(definition)))
        points = [list(d.build_space().grid()) for d in (definition, again) if d.strategy != "gp"]
        assert points[:1] == points[1:]
        same = {"strategy", "objectives", "pruner", "reduction_factor"}
        assert again.model_dump(include=same) == definition.model_dump(include=same)
        assert again.planned_trials() == definition.planned_trials()


def test_what_only_the_service_does_is_refused_by_name_without_it() -> None:
    for change, reason in (
        (
            {"early_terminate": {"type": "hyperband", "max_iter": 27, "s": 2}},
            "early_terminate's max_iter, .*s",
        ),
        ({"parameters": {"lora_rank": {"values": [8, 16], "probabilities": [0.5, 0.5]}}}, "lora_rank's prob"),
        ({"metric": {**LOGGED, "target": 0.9}}, "target"),
    ):
        definition = define_search(from_sweep({**SWEEP, **change}))
        with pytest.raises(SearchError, match=reason):
            check_sweep(definition)
        check_sweep(define_search({**from_sweep({**SWEEP, **change}), "strategy": "wandb"}))
    definition = define_search(from_sweep(SWEEP))
    check_sweep(definition)
    assert "min_iter (3)" in sweep_notes(definition)[0]


def test_what_a_sweep_leaves_out_of_a_search_is_said_and_not_written_as_something_else() -> None:
    for pruner in ("median", "asha", "promote"):
        definition = define_search({"preset": "article-grid", "pruner": pruner})
        assert "early_terminate" not in to_sweep(definition)
        assert pruner in " ".join(sweep_differences(definition))
    fields = {"preset": "article-random", "strategy": "tpe", "objective": "loss:mean-3:min", "replicate": 2}
    told = " ".join(sweep_differences(define_search(fields)))
    for word in ("TPE", "mean-3", "refinement", "replicates"):
        assert word in told
    assert sweep_differences(define_search({"preset": "article-grid"})) == []
    averaged = {"preset": "article-grid", "strategy": "wandb", "objective": "eval_percent_correct:mean-3"}
    with pytest.raises(SearchError, match="last value"):
        check_sweep(define_search(averaged))


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["hyperband", "uniform", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["min", "max", "values", "value", "q", "distribution", "type", "eta", "name", "goal"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    sweep=st.fixed_dictionaries(
        {
            "method": st.sampled_from(["grid", "bayes"]) | _ANY,
            "parameters": st.dictionaries(st.just("a"), _ANY) | _ANY,
        },
        optional={"metric": _ANY, "early_terminate": _ANY, "run_cap": _ANY, "controller": _ANY},
    )
)
def test_whatever_a_sweep_file_holds_is_a_search_or_an_error_of_ours(sweep: dict[str, Any]) -> None:
    with contextlib.suppress(SearchError):
        definition = define_search(from_sweep(sweep))
        check_sweep(definition)
        to_sweep(definition)


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
        ({"early_terminate": {"type": "hyperband", "grace": 2}}, "grace"),
        ({"metric": {"name": "loss", "aim": "minimize"}}, "aim"),
        ({"parameters": {"x": {"values": [1], "weights": [1]}}}, "weights"),
        ({"parameters": {"x": {"distribution": "q_uniform", "min": 5, "max": 16, "q": 4}}}, "multiples"),
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
