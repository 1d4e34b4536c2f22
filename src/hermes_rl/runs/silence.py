"""Noticing a server that is there and does not answer. Runs in the supervisor.

A process that has ended is noticed at once, by the kernel's word. One that is stuck (stopped, swapped out,
in a loop that never comes back) is noticed by asking it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from hermes_rl.runs.loopback import get_json

_LEAST_PROBES = 3
_PROBES_A_LIMIT = 4

Probe = Callable[[], Awaitable[bool]]


def health_probe(port: int, capability: str) -> Probe:
    """Whether a server of the run answers ``GET /<capability>/health``."""

    async def probe() -> bool:
        status, _ = await get_json(port, f"/{capability}/health")
        return status == 200

    return probe


def engine_probe(port: int, api_key: str) -> Probe:
    """Whether an engine of this machine answers."""

    async def probe() -> bool:
        status, _ = await get_json(port, "/api/v1/get_server_capabilities", {"X-API-Key": api_key})
        return status == 200

    return probe


async def wait_for_silence(probe: Probe, limit: float) -> float:
    """Ask again and again; return when nothing has answered for ``limit`` seconds.

    Several questions must have stayed unanswered, so that a machine that slept, or a supervisor that did
    not get to ask, is not taken for a server that is stuck.

    Args:
        probe: asks once; may raise what a broken connection raises.
        limit: seconds.

    Returns:
        Seconds since the last answer.
    """
    pause = limit / (2 * _PROBES_A_LIMIT)
    answered, unanswered = time.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(limit / _PROBES_A_LIMIT):
                answers = await probe()
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError):
            answers = False
        if answers:
            answered, unanswered = time.monotonic(), 0
        else:
            unanswered += 1
        silence = time.monotonic() - answered
        if unanswered >= _LEAST_PROBES and silence >= limit:
            return silence
        await asyncio.sleep(pause)
