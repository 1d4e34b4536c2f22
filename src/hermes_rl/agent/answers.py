"""Answers of the ``rl_*`` functions: plain data that JSON can hold, without secrets.

Runs in the process of whoever calls a function.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from hermes_rl.config.catalogue import HIDDEN
from hermes_rl.errors import HermesRLError

logger = logging.getLogger(__name__)

_SECRET_VARIABLE = re.compile(r"(_KEY|_TOKEN|_SECRET|_PASSWORD)$")
_CAPABILITY = re.compile(r"\br-[0-9a-f]{32}\b|\btml-[A-Za-z0-9_-]{8,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST_SECRET = 8


def plain(value: Any, secret_variables: Iterable[str] = ()) -> Any:
    """``value`` as JSON data: no NaN, no infinity, no objects, no lone surrogates, no secrets.

    Args:
        value: what a function has to say.
        secret_variables: environment variables whose values are secrets, beside those named like one.
    """
    return _plain(value, _secrets(set(secret_variables)))


def answer(
    function: Callable[[], Mapping[str, Any]],
    name: str,
    secret_variables: Callable[[], Iterable[str]] = tuple,
) -> dict[str, Any]:
    """Call ``function`` and give its answer, or its error as ``{"error", "allowed"?, "hint"?}``.

    Args:
        function: does the work.
        name: what it is called in messages.
        secret_variables: gives those of :func:`plain`.
    """
    try:
        said: Mapping[str, Any] = function()
    except HermesRLError as error:
        said = error.as_dict()
    except Exception as error:
        logger.exception("%s failed.", name)
        said = {
            "error": f"{name} failed inside: {type(error).__name__}: {error}",
            "hint": "This is a fault of hermes-rl, not of what was asked. Nothing was changed.",
        }
    return plain(said, secret_variables())


def _secrets(variables: set[str]) -> list[str]:
    """Values of this process's environment variables that hold secrets: those named, and by their names."""
    found = {
        value
        for name, value in os.environ.items()
        if (name in variables or _SECRET_VARIABLE.search(name)) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(found, key=len, reverse=True)


def redacted(text: str, secrets: list[str]) -> str:
    """``text`` without the values of secret variables, capabilities of URLs, and credentials in URLs."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _CREDENTIALS.sub(f"{HIDDEN}@", _CAPABILITY.sub(HIDDEN, text))


def _plain(value: Any, secrets: list[str]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, secrets)
    if isinstance(value, str):
        return redacted(value.encode("utf-8", "replace").decode("utf-8"), secrets)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, PurePath):
        return _plain(str(value), secrets)
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(), secrets)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), secrets) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_plain(str(key), secrets): _plain(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, secrets) for item in value]
    return _plain(str(value), secrets)
