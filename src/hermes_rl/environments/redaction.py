"""Keeping capabilities and keys out of what a process writes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from hermes_rl.config import RunConfig

SERVER_VARIABLES = ("HERMES_RL_TRAJECTORIES_URL", "HERMES_RL_INFERENCE_URL", "HERMES_RL_INFERENCE_KEY")
_SHORTEST_SECRET = 8
_SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def own_secrets(config: RunConfig | None = None) -> list[str]:
    """Every secret that this process was given, the longest first.

    Args:
        config: the run's, whose environment may have secrets in fields of its own.
    """
    named = [name for name in os.environ if _SECRET_NAME.search(name.upper())]
    found = secrets_in_environment([*SERVER_VARIABLES, *named])
    if config is not None:
        found += [one for one in config.secrets() if len(one) >= _SHORTEST_SECRET]
    return sorted(set(found), key=len, reverse=True)


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
        descriptor: the one that others may write to instead, the filter's: a process that is given this
            stream, or the bytes below it, must not get round the filter.
    """

    def __init__(self, inner: TextIO, secrets: list[str], descriptor: int) -> None:
        self._inner = inner
        self._secrets = secrets
        self._descriptor = descriptor
        self.buffer = io.FileIO(descriptor, "wb", closefd=False)

    def write(self, text: str) -> int:
        """Write ``text`` without its secrets; returns the number of characters taken."""
        self._inner.write(redact(text, self._secrets))
        return len(text)

    def flush(self) -> None:
        """Flush the inner stream."""
        self._inner.flush()

    def fileno(self) -> int:
        """The filter's descriptor."""
        return self._descriptor

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


def redact_output(secrets: list[str]) -> None:
    """Keep secrets out of all that this process and those it starts write to descriptors 1 and 2.

    Python's own streams are redacted here and go to the log at once, so a traceback is there whatever ends
    the process. The descriptors, which subprocesses inherit and C code writes to, lead to a process that
    filters (:mod:`hermes_rl.environments.log_filter`) and that ends when nobody can write to them any more.
    """
    streams: list[TextIO] = []
    logs = [os.dup(descriptor) for descriptor in (1, 2)]
    together = os.path.sameopenfile(*logs)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor, log in zip((1, 2), logs, strict=True):
        if descriptor == 2 and together:
            os.dup2(1, 2)
        else:
            _filter(descriptor, log, secrets)
        raw = io.FileIO(log, "wb")
        streams.append(io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True))
    sys.stdout = RedactingStream(streams[0], secrets, 1)
    sys.stderr = RedactingStream(streams[1], secrets, 2)


def _filter(descriptor: int, log: int, secrets: list[str]) -> None:
    """Let what is written to ``descriptor`` reach ``log`` through a process that filters."""
    read_end, write_end = os.pipe()
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("log_filter.py"))],
            stdin=read_end,
            stdout=log,
            stderr=log,
            cwd="/",
            env={},
            start_new_session=True,  # it outlives this process's group by what is still to be written
        )
        os.dup2(write_end, descriptor)
    finally:
        os.close(read_end)
        os.close(write_end)
    with io.FileIO(descriptor, "wb", closefd=False) as begin:
        begin.write(json.dumps(secrets).encode() + b"\n")
