from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.cli.assignments import parse_assignments, parse_value
from hermes_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("-3", -3),
        ("6e-5", 6e-5),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", None),
        ("[16, 32]", [16, 32]),
        ('{"a": 1}', {"a": 1}),
        ('"16"', "16"),
        ("ppo", "ppo"),
        ("data/file.jsonl", "data/file.jsonl"),
        ("a=b", "a=b"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1_000", "1_000"),
        ("", ""),
        (" spaced text ", " spaced text "),
    ],
)
def test_a_value_means_what_it_looks_like(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_names_may_carry_their_section() -> None:
    assert parse_assignments(["tinker.learning_rate=1e-5", "batch_size = 32"]) == {
        "tinker.learning_rate": 1e-5,
        "batch_size": 32,
    }


@pytest.mark.parametrize("text", ["learning_rate", "=3", "", "a=[1, 2", 'b={"x"', 'c="open'])
def test_what_cannot_be_read_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignments([text])
    assert caught.value.hint


def test_a_field_set_to_two_values_is_refused() -> None:
    assert parse_assignments(["a=1", "a=1"]) == {"a": 1}
    with pytest.raises(ConfigError, match="twice"):
        parse_assignments(["a=1", "a=2"])
