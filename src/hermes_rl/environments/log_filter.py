"""Keeps secrets out of a log: ``python log_filter.py``, one beside each environment's process.

It copies its standard input to its standard output without the secrets that the first line of the input lists
as JSON, and ends with the input. It is a process, so that nothing is lost when the environment crashes or is
killed, and imports nothing of hermes-rl, so that it is there at once. It talks to nobody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

_CHUNK = 1 << 16
_REPLACEMENT = b"<secret>"


def copy(source: int, destination: int) -> None:
    """Copy from one descriptor to the other until the source ends, and hide the secrets it begins with."""
    held = b""
    while b"\n" not in held:
        chunk = os.read(source, _CHUNK)
        if not chunk:
            return
        held += chunk
    head, _, held = held.partition(b"\n")
    secrets = [secret.encode("utf-8", "surrogateescape") for secret in json.loads(head)]
    while True:
        held = redact_bytes(held, secrets)
        ready = len(held) - begun(held, secrets)
        _write_all(destination, held[:ready])
        held = held[ready:]
        chunk = os.read(source, _CHUNK)
        if not chunk:
            _write_all(destination, held)
            return
        held += chunk


def redact_bytes(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """``data`` with every secret replaced."""
    for secret in secrets:
        data = data.replace(secret, _REPLACEMENT)
    return data


def begun(data: bytes, secrets: Sequence[bytes]) -> int:
    """How many bytes at the end of ``data`` may be the beginning of a secret whose rest is on its way."""
    longest = max((len(secret) - 1 for secret in secrets), default=0)
    for length in range(min(longest, len(data)), 0, -1):
        end = data[-length:]
        if any(secret.startswith(end) for secret in secrets if len(secret) > length):
            return length
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError:  # a full disk: what follows may fit again
            return


if __name__ == "__main__":
    copy(0, 1)
