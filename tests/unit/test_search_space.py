"""Spaces, conditions and definitions: what a user writes is what is searched, or is refused with a reason."""

from __future__ import annotations

import random

import pytest

from hermes_rl.errors import SearchError
from hermes_rl.search.definition import define_search, read_definition_file
from hermes_rl.search.expression import Condition
from hermes_rl.search.space import (
    Choice,
    Int,
    LogUniform,
    Range,
    Space,
    Uniform,
    build_space,
    format_value,
    parse_parameter,
    parse_shorthand,
)


def test_the_three_ways_to_write_a_parameter_mean_the_same() -> None:
    python = LogUniform("learning_rate", 1e-5, 2e-4)
    assert parse_shorthand("learning_rate", "log:1e-5..2e-4") == python
    assert parse_parameter("learning_rate", {"log_uniform": [1e-5, 2e-4]}) == python
    assert parse_parameter("learning_rate", "log:1e-5..2e-4") == python
    assert parse_shorthand("group_size", "int:4..16:4") == Int("group_size", 4, 16, step=4)
    assert parse_parameter("group_size", {"int": [4, 16], "step": 4}) == Int("group_size", 4, 16, step=4)
    assert parse_shorthand("x", "0.1..0.5") == Uniform("x", 0.1, 0.5)
    assert parse_shorthand("lora_rank", "16,32,64") == Choice("lora_rank", (16, 32, 64))
    assert parse_shorthand("flag", "true,false") == Choice("flag", (True, False))
    assert parse_shorthand("loss_fn", "ppo,cispo") == Choice("loss_fn", ("ppo", "cispo"))


@pytest.mark.parametrize(
    "text",
    ["", "log:3..1", "log:0..1", "int:1..2.5", "int:1..8:0", "log:", "a..b", "1,1", "log:1,2", "0.5..0.5"],
)
def test_a_parameter_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(SearchError):
        parse_shorthand("x", text)


def test_the_article_grid_is_its_27_configurations() -> None:
    definition = define_search({"preset": "article-grid", "environment": "e"})
    points = list(definition.build_space().grid())
    assert len(points) == 27 == definition.planned_trials()
    assert {p["learning_rate"] for p in points} == {0.00002, 0.00004, 0.00006}
    assert {p["batch_size"] for p in points} == {p["lora_rank"] for p in points} == {16, 32, 64}


def test_a_constraint_removes_what_breaks_it_and_reads_fields_that_are_not_searched() -> None:
    space = build_space(
        {"group_size": [4, 8, 16]}, ["batch_size % group_size == 0", "group_size < batch_size"]
    )
    assert [p["group_size"] for p in space.with_context({"batch_size": 16}).grid()] == [4, 8]
    with pytest.raises(SearchError, match="batch_size"):
        list(space.grid())


def test_a_conditional_parameter_exists_only_under_its_condition() -> None:
    space = build_space(
        {"loss_fn": ["ppo", "cispo"], "clip": {"choice": [0.1, 0.2], "when": "loss_fn == 'ppo'"}}
    )
    assert list(space.grid()) == [
        {"loss_fn": "ppo", "clip": 0.1},
        {"loss_fn": "ppo", "clip": 0.2},
        {"loss_fn": "cispo"},
    ]
    with pytest.raises(SearchError, match="before"):
        build_space({"clip": {"choice": [0.1], "when": "loss_fn == 'ppo'"}, "loss_fn": ["ppo", "cispo"]})


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "a[0]", "f(x)", "lambda: 1", "x ==", "x := 3", "2 ** 9"]
)
def test_a_condition_is_never_code(text: str) -> None:
    with pytest.raises(SearchError):
        Condition.parse(text)


def test_conditions_compute() -> None:
    values = {"a": 6, "b": 3, "c": "ppo"}
    for text in (
        "a % b == 0",
        "a // b == 2 and not a < b",
        "1 < b < a",
        "c in ('ppo', 'cispo')",
        "-a + 9 == b",
    ):
        assert Condition.parse(text).holds(values)
    with pytest.raises(SearchError, match="'d'"):
        Condition.parse("d > 1").holds(values)
    with pytest.raises(SearchError):
        Condition.parse("a % 0 == 0").holds(values)


def test_a_neighbourhood_stays_in_the_range_and_near() -> None:
    rng = random.Random(0)
    rate = LogUniform("learning_rate", 1e-5, 1e-3)
    for _ in range(200):
        value = rate.near(1e-4, 0.2, rng)
        assert isinstance(value, float)
        assert 1e-4 / 1.6 <= value <= 1e-4 * 1.6
        assert rate.contains(rate.near(1e-5, 0.5, rng))
        whole = Int("g", 4, 17, step=4).near(8, 0.5, rng)
        assert whole in (4, 8, 12, 16)
        assert Choice("r", (64, 16, 32)).near(16, 0.1, rng) in (16, 32)


def test_a_typo_in_a_definition_is_named_with_what_was_meant(tmp_path) -> None:
    file = tmp_path / "search.toml"
    file.write_text('environment = "e"\ntrails = 3\n[space]\nlora_rank = [16, 32]\n')
    with pytest.raises(SearchError, match=r"trails.*trials"):
        define_search(read_definition_file(file))
    file.write_text("environment = \n")
    with pytest.raises(SearchError, match="not valid TOML"):
        define_search(read_definition_file(file))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"preset": "article-gird"}, "no preset"),
        ({"space": {}}, "no parameters"),
        ({"space": {"a": [1]}, "set": {"a": 2}}, "both searched and set"),
        ({"space": {"a": "log:1..2"}}, "continuous"),
        ({"space": {"a": [1, 2]}, "strategy": "annealing"}, "strategy"),
        ({"space": {"a": [1, 2]}, "trials": 0}, "trials"),
        ({"space": {"a": [1, 2]}, "objective": "x:median"}, "median"),
        ({"space": {"a": [1, 2]}, "constraints": ["a > 5"]}, "No configuration"),
        ({"space": {"a": [1, 2]}, "objectives": ["x", "y:min"], "pruner": "asha"}, "one objective"),
        ({}, "no space"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_it_starts(fields: dict, reason: str) -> None:
    with pytest.raises(SearchError, match=reason):
        define_search({"environment": "e", **fields})


def test_values_read_as_people_write_them() -> None:
    values = [0.00004, 0.0000314159, 1.5, 32, 123456.0, True, 0.0, None, "ppo"]
    assert list(map(format_value, values)) == [
        "0.00004",
        "0.00003142",
        "1.5",
        "32",
        "123456",
        "True",
        "0",
        "None",
        "ppo",
    ]


def test_the_default_is_recognised_in_a_space_whatever_the_rounding() -> None:
    space = Space((Choice("learning_rate", (2e-5, 4e-5)), Range("n", 1, 9, whole=True)))
    assert space.contains({"learning_rate": 0.1 * 0.0004, "n": 9})
    assert space.snap({"learning_rate": 0.1 * 0.0004, "n": 9})["learning_rate"] == 4e-5
    assert not space.contains({"learning_rate": 3e-5, "n": 2})
