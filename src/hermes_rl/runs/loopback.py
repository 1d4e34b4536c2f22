"""Listening sockets of a run, and asking its servers whether they are ready. Runs in the supervisor.

The sockets are bound and listening before the servers start, so that URLs are known at once, no port can
be taken in between, and a request sent early is answered as soon as the server accepts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


@dataclass
class Endpoint:
    """A server's address that nobody can guess.

    Attributes:
        socket: listening on the loopback interface, on a port the operating system picked.
        capability: path prefix, without slashes.
    """

    socket: socket.socket
    capability: str

    @classmethod
    def bind(cls) -> Endpoint:
        """Bind a socket and make up a capability of 128 random bits."""
        listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        return cls(listener, f"r-{secrets.token_hex(16)}")

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.capability}"

    def close(self) -> None:
        """Close this process's copy of the socket."""
        self.socket.close()


async def get_json(port: int, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """One GET request to a server of this machine.

    Args:
        port: where it listens on the loopback interface.
        path: path and query.
        headers: further header fields.

    Returns:
        Status code and decoded body (None when it is not JSON).

    Raises:
        OSError: no answer.
        asyncio.IncompleteReadError: half an answer.
    """
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        fields = {"Host": f"{LOOPBACK}:{port}", "Accept": "application/json", **(headers or {})}
        lines = [f"GET {path} HTTP/1.0", *(f"{name}: {value}" for name, value in fields.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        body = await reader.read()
    finally:
        writer.close()
    status = int(head.split(" ", 2)[1])
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None


async def wait_until_healthy(endpoint_port: int, capability: str) -> None:
    """Return when ``GET /<capability>/health`` answers 200; for ever otherwise (wrap it in a timeout)."""
    pause = 0.02
    while True:
        try:
            status, _ = await get_json(endpoint_port, f"/{capability}/health")
            if status == 200:
                return
        except (OSError, asyncio.IncompleteReadError, ValueError):
            pass  # not accepting yet; whoever waits for the process's end learns of a crash
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.5)


async def wait_until_environment_registered(port: int, capability: str) -> None:
    """Return when the API server lists an environment; for ever otherwise (wrap it in a timeout)."""
    revision = None
    while True:
        query = "" if revision is None else f"?revision={revision}&wait=30"
        try:
            status, state = await get_json(port, f"/{capability}/state{query}")
        except (OSError, asyncio.IncompleteReadError, ValueError):
            status, state = 0, None
        if status == 200 and isinstance(state, dict):
            if state.get("envs"):
                return
            revision = state.get("revision")
        else:
            await asyncio.sleep(0.2)
