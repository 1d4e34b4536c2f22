"""Reading ``--set name=value``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from hermes_rl.errors import ConfigError

_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Overrides from the command line.

    Args:
        texts: ``name=value`` each; the name bare (``learning_rate``) or with its section
            (``tinker.learning_rate``).

    Returns:
        Name → value, in the order given. Whether the fields exist is not checked here.

    Raises:
        ConfigError: a text is not an assignment, or a name is set twice to different values.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(
                f"--set {text!r} is not an assignment.",
                allowed="NAME=VALUE",
                hint="For example --set learning_rate=6e-5.",
            )
        parsed = parse_value(value, name)
        if name in overrides and overrides[name] != parsed:
            raise ConfigError(f"--set {name} is given twice, as {overrides[name]!r} and as {parsed!r}.")
        overrides[name] = parsed
    return overrides


def parse_value(text: str, name: str = "value") -> Any:
    """What a value on the command line means.

    A JSON value is that value (``16``, ``6e-5``, ``true``, ``[16, 32]``, ``{"a": 1}``, ``"16"`` with
    quotes is a string); ``none`` and ``True`` are understood too; anything else is a string as it stands.

    Raises:
        ConfigError: the text begins like a JSON list, object or string and is not one.
    """
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    if stripped[:1] in ("[", "{", '"'):
        try:
            return json.loads(stripped)
        except ValueError as error:
            raise ConfigError(
                f"The value of {name} is not valid JSON: {error}.",
                hint="Put the whole assignment in single quotes so that the shell leaves it alone.",
            ) from None
    for number in (int, float):
        try:
            value = number(stripped)
        except ValueError:
            continue
        if "_" not in stripped and math.isfinite(value):
            return value
    return text
