"""Spaces, conditions and definitions: what a user writes is what is searched, or is refused with a reason."""

from __future__ import annotations

import contextlib
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import HermesRLError, SearchError
from hermes_rl.search.definition import define_search, read_definition_file
from hermes_rl.search.expression import Condition
from hermes_rl.search.orchestrator import prepare_search
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


LARGE = {
    "group_size": "int:2..64",
    "batch_size": "int:16..512",
    "lora_rank": "int:4..128",
    "num_requests_for_eval": "int:32..512",
}


@pytest.mark.parametrize("strategy", ["random", "tpe", "gp", "pbt"])
def test_a_space_of_a_billion_points_is_not_gone_through(strategy: str) -> None:
    space: dict[str, str] = {"a": "int:1..1000000000"} if strategy == "pbt" else LARGE
    definition = define_search({"space": space, "strategy": strategy, "constraints": ["1 > 2"]})
    assert definition.build_space().size() >= 1_000_000_000
    assert definition.planned_trials() == (40 if strategy == "pbt" else 24)


def test_a_grid_of_a_billion_points_is_refused_with_their_number() -> None:
    with pytest.raises(SearchError, match=r"63 x 497 x 125 x 481 = 1,882,573,875 points") as caught:
        define_search({"space": LARGE})
    assert "--strategy random" in str(caught.value)
    # The service goes through a sweep's grid itself, and a limit says how far.
    swept = define_search({"space": LARGE, "strategy": "wandb", "sweep_method": "grid", "trials": 9})
    assert swept.planned_trials() == 9


def test_trials_are_counted_as_far_as_the_space_has_them() -> None:
    space = {"group_size": [4, 8, 16], "batch_size": [8, 16]}
    for constraints, count in (([], 6), (["group_size < batch_size"], 3)):
        for strategy in ("grid", "random"):
            fields = {"space": space, "constraints": constraints, "strategy": strategy}
            assert define_search(fields).planned_trials() == count
            assert define_search({**fields, "trials": 2}).planned_trials() == 2


def test_a_conditional_field_that_does_not_exist_has_its_value_in_force_in_a_constraint() -> None:
    space = build_space(
        {"loss_fn": ["ppo", "cispo"], "clip": {"choice": [0.1, 0.4], "when": "loss_fn == 'ppo'"}},
        ["clip < 0.3"],
    )
    assert space.unknown_names() == {"clip"}
    points = list(space.with_context({"clip": 0.2}).grid())
    assert points == [{"loss_fn": "ppo", "clip": 0.1}, {"loss_fn": "cispo"}]


def test_parameters_made_in_python_are_the_space_they_say() -> None:
    made = [
        LogUniform("learning_rate", 1e-5, 2e-4),
        Choice("loss_fn", ("ppo", "cispo")),
        Int("clip", 1, 9, step=2, when="loss_fn == 'ppo'"),
        Int("lora_rank", 8, 64, log=True),
        Uniform("inference_weight", 0.5, 1.0),
    ]
    for space in (made, {parameter.name: parameter for parameter in made}):
        definition = define_search({"space": space, "strategy": "tpe"})
        assert definition.build_space().parameters == tuple(made)
        assert build_space(space).parameters == tuple(made)
        again = type(definition).model_validate_json(definition.model_dump_json())
        assert again == definition
    with pytest.raises(SearchError, match=r"learning_rate.*under the name.*rate"):
        define_search({"space": {"rate": made[0]}})
    with pytest.raises(SearchError, match="twice"):
        define_search({"space": [made[0], made[0]]})


TYPOS: list[tuple[dict[str, Any], str]] = [
    ({"group_size": {"int": [4, 16], "step": "4"}}, "step"),
    ({"group_size": {"int": [4, 16], "step": True}}, "step"),
    ({"group_size": {"int": [4, 16], "step": 4.0}}, "step"),
    ({"group_size": {"choice": [4, 16], "step": 4}}, "no step"),
    ({"group_size": {"int": [4, 16], "when": 5}}, "condition is a text"),
    ({"group_size": {"int": [4, 16], "when": ""}}, "cannot be read"),
    ({"group_size": {"int": [4, 10**400]}}, "too large"),
    ({"group_size": [[4], [8]]}, "cannot be a value"),
    ({"group_size": [math.nan, 1.0]}, "cannot be a value"),
    ({"group_size": {"int": "4..16"}}, "takes a list"),
]


@pytest.mark.parametrize(("space", "reason"), TYPOS)
def test_a_value_of_the_wrong_type_is_named(space: dict, reason: str) -> None:
    with pytest.raises(SearchError, match=reason):
        define_search({"space": space, "strategy": "random"})


@pytest.mark.parametrize(
    "text", ["-" * 5000 + "1", "(" * 400, "f(" + "-" * 900 + "1)", "x\0y", "not " * 80 + "x", "1" * 5000]
)
def test_a_condition_that_is_too_much_is_refused(text: str) -> None:
    with pytest.raises(SearchError):
        Condition.parse(text)


def test_texts_are_not_multiplied_or_formatted() -> None:
    for text in ("'a' * 9999999999 == b", "b * 9999999999 == 1", "'%s' % b == 1", "-b == 1", "10 ** 2 == b"):
        with pytest.raises(SearchError):
            Condition.parse(text).holds({"b": "x"})
    with pytest.raises(SearchError, match="cannot be computed"):
        Condition.parse(f"{'9' * 400} / 7 > 1").holds({})


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.datetimes()
_TOML = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_TABLES = st.dictionaries(
    st.sampled_from(["int", "uniform", "log_uniform", "log_int", "choice", "step", "when"]),
    _TOML
    | st.lists(st.integers(-4, 40) | st.floats(-1, 99), min_size=2, max_size=2)
    | st.sampled_from(["a == 1", "b < 3", "b", "b % 0 == 1"]),
    max_size=3,
)
_SHORT = st.from_regex(r"(log:|int:|uniform:|choice:)*[0-9.\-,a\[{e:]{0,9}", fullmatch=True)


@settings(max_examples=400, deadline=None)
@given(
    parameters=st.dictionaries(st.sampled_from("abc"), _TOML | _TABLES | _SHORT, max_size=3) | _TOML,
    constraints=st.lists(_TOML | st.sampled_from(["a < b", "a % 2 == 0"]), max_size=2) | _TOML,
    others=st.dictionaries(
        st.sampled_from(
            ["preset", "trials", "objectives", "objective", "set", "budget", "strategy", "sweep"]
        ),
        _TOML | st.sampled_from(["random", "tpe", "grid", "pbt"]),
        max_size=2,
    ),
)
def test_whatever_a_file_holds_is_a_search_or_an_error_of_ours(
    parameters: Any, constraints: Any, others: dict[str, Any]
) -> None:
    try:
        definition = define_search({"space": parameters, "constraints": constraints, **others})
    except HermesRLError:
        return
    space = definition.build_space()
    definition.planned_trials()
    space.describe()
    assert type(definition).model_validate(definition.model_dump()).build_space() == space
    with contextlib.suppress(HermesRLError):  # a condition may compare a number with a text
        space.feasible(space.random(random.Random(0)))


@given(name=_TOML, value=_TOML | _TABLES | _SHORT)
def test_whatever_a_parameter_is_given_it_is_one_or_an_error_of_ours(name: Any, value: Any) -> None:
    with contextlib.suppress(SearchError):
        parameter = parse_parameter(name, value)
        assert parse_parameter(parameter.name, parameter.table()) == parameter


def test_the_example_in_the_guide_is_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path))
    guide = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", guide.partition("## From Python")[2], re.DOTALL)
    assert example is not None
    code, _, run = example[1].partition("store = create_search(")
    assert "drive(workspace, store.search_id)" in run
    names: dict[str, Any] = {}
    exec(code, names)
    checked = prepare_search(names["workspace"], names["definition"], names["trials"])
    assert checked.planned_trials() == 12
    assert checked.build_space().parameters[2] == Int("group_size", 4, 16, step=4)
