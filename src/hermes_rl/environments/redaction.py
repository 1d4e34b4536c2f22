"""Keeping capabilities and keys out of what a process writes."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from typing import Any, TextIO
from urllib.parse import urlsplit

from hermes_rl.config import RunConfig

SERVER_VARIABLES = ("HERMES_RL_TRAJECTORIES_URL", "HERMES_RL_INFERENCE_URL", "HERMES_RL_INFERENCE_KEY")
_SHORTEST_SECRET = 8
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def own_secrets() -> list[str]:
    """Every secret that this process was given, by the name of its environment variable."""
    named = [name for name in os.environ if _SECRET_NAME.search(name.upper())]
    return secrets_in_environment([*SERVER_VARIABLES, *named])


def secrets_in_environment(variables: Iterable[str]) -> list[str]:
    """The secret parts of these environment variables: a URL's capability, otherwise the whole value."""
    found: set[str] = set()
    for name in variables:
        value = os.environ.get(name, "")
        if "://" in value:
            found.update(urlsplit(value).path.strip("/").split("/")[:1])
        else:
            found.add(value)
    return sorted((secret for secret in found if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)


def secrets_in_config(config: RunConfig) -> list[str]:
    """The secrets that the environment's own fields hold."""
    return sorted((one for one in config.secrets() if len(one) >= _SHORTEST_SECRET), key=len, reverse=True)


def redact(text: str, secrets: Iterable[str]) -> str:
    """``text`` with every secret replaced by ``<secret>``."""
    for secret in secrets:
        text = text.replace(secret, "<secret>")
    return text


def redacted(value: Any, secrets: Iterable[str]) -> Any:
    """Plain data in which every text is without secrets."""
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, dict):
        return {redact(str(name), secrets): redacted(item, secrets) for name, item in value.items()}
    return [redacted(item, secrets) for item in value] if isinstance(value, list) else value


class RedactingStream(io.TextIOBase):
    """A text stream that redacts what is written through it.

    Args:
        inner: where the text goes.
        secrets: what never may.
    """

    def __init__(self, inner: TextIO, secrets: list[str]) -> None:
        self._inner = inner
        self._secrets = secrets

    def write(self, text: str) -> int:
        """Write ``text`` without its secrets; returns the number of characters taken."""
        self._inner.write(redact(text, self._secrets))
        return len(text)

    def flush(self) -> None:
        """Flush the inner stream."""
        self._inner.flush()

    def fileno(self) -> int:
        """The inner stream's descriptor."""
        return self._inner.fileno()

    def isatty(self) -> bool:
        """Whether the inner stream is a terminal."""
        return self._inner.isatty()

    def writable(self) -> bool:
        """Always true."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The inner stream's encoding."""
        return self._inner.encoding
