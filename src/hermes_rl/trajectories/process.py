"""The API server's process: ``python -m hermes_rl.trajectories.process --run-dir DIR --fd N``.

It talks to nobody; the trainer, the environments and the supervisor talk to it over HTTP. It imports
neither torch nor atroposlib.

Started by a supervisor, it serves on the listening socket it was handed (``--fd``), behind the capability
in the path of ``HERMES_RL_TRAJECTORIES_URL``. By hand, for a bare Atropos set-up:
``python -m hermes_rl.trajectories.process --port 8000 --no-capability``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hermes_rl.trajectories.app import DEFAULT_MAX_BODY_BYTES, build_app
from hermes_rl.trajectories.state import TrajectoryState

URL_VARIABLE = "HERMES_RL_TRAJECTORIES_URL"

log = logging.getLogger("hermes_rl.trajectories")


class _Server(uvicorn.Server):
    """Uvicorn that ends its long polls when it is told to stop."""

    state: TrajectoryState
    loop: asyncio.AbstractEventLoop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.loop.call_soon_threadsafe(self.state.close)
        super().handle_exit(sig, frame)


def _protocol(state: TrajectoryState) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol, which also says how each connection ended."""
    protocol: Any = AutoHTTPProtocol

    class WatchedProtocol(protocol):
        cut_off = False
        """Whether the other end hung up before it was answered: what is sent after that goes nowhere."""

        def eof_received(self) -> None:
            if self.client is not None:
                state.retries.hung_up(self.client)
            self.cut_off = self._owes_an_answer()
            super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.client is not None:
                cut_off = self.cut_off or self._owes_an_answer()
                refused = isinstance(exc, ConnectionError) or _reset_after_end(self.transport)
                state.retries.connection_lost(self.client, unread=cut_off or refused)
            super().connection_lost(exc)

        def _owes_an_answer(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    return WatchedProtocol


def _reset_after_end(transport: asyncio.Transport) -> bool:
    """Whether the other end, having closed its socket, refused what was still on the way to it."""
    sock = transport.get_extra_info("socket")
    try:
        return sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
    except OSError:
        return False


async def serve(sock: socket.socket, capability: str | None, max_body_bytes: int) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        sock: a bound TCP socket.
        capability: first path segment that every URL must carry, or None.
        max_body_bytes: largest accepted body of scored data.
    """
    state = TrajectoryState()
    # The access log would write the capability on every line.
    config = uvicorn.Config(
        build_app(state, capability=capability, max_body_bytes=max_body_bytes),
        http=_protocol(state),
        access_log=False,
        log_level="warning",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        backlog=4096,
    )
    server = _Server(config)
    server.state = state
    server.loop = asyncio.get_running_loop()
    await server.serve(sockets=[sock])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hermes_rl.trajectories.process")
    parser.add_argument("--run-dir", type=Path, help="the run's folder, for failure_api.json")
    parser.add_argument("--fd", type=int, help="an inherited, bound listening socket")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system picks one")
    parser.add_argument("--no-capability", action="store_true", help="serve without a secret path")
    parser.add_argument("--address-file", type=Path, help='write {"url": …} there, readable by you only')
    parser.add_argument("--max-body-mb", type=int, default=DEFAULT_MAX_BODY_BYTES >> 20)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    try:
        if arguments.fd is not None:
            sock = socket.socket(fileno=arguments.fd)
        else:
            sock = _bind(arguments.host, arguments.port)
    except OSError as error:
        return _fail(
            arguments.run_dir,
            f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}",
            "Stop what uses that port, or leave the port out to let the system pick one.",
        )
    host, port = sock.getsockname()[:2]
    capability = None if arguments.no_capability else _capability_from_environment()
    if arguments.fd is None:
        if capability is None and not arguments.no_capability:
            capability = f"r-{secrets.token_hex(16)}"
        url = f"http://{host}:{port}" + (f"/{capability}" if capability else "")
        if arguments.address_file is not None:
            _write_private(arguments.address_file, json.dumps({"url": url}))
        else:
            print(url, flush=True)
    elif capability is None and not arguments.no_capability:
        return _fail(arguments.run_dir, f"{URL_VARIABLE} does not hold a URL with a path", None)
    log.info("serving on %s:%s", host, port)
    # Uvicorn raises the signal that stopped it once more when it is done: a clean stop ends with status 0.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, _already_stopped)
    asyncio.run(serve(sock, capability, arguments.max_body_mb << 20))
    return 0


def _already_stopped(_signal: int, _frame: FrameType | None) -> None:
    return


def _capability_from_environment() -> str | None:
    path = urlsplit(os.environ.get(URL_VARIABLE, "")).path.strip("/")
    return path.split("/")[0] or None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named because asyncio sends small replies at once (TCP_NODELAY) only if it is
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(4096)  # whoever reads the address may connect at once
    except OSError:
        sock.close()
        raise
    return sock


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def _fail(run_dir: Path | None, message: str, hint: str | None) -> int:
    from hermes_rl.errors import ServiceError

    error = ServiceError(message, hint=hint)
    log.error("%s", error)
    if run_dir is not None:
        record = {**error.as_dict(), "type": type(error).__name__}
        _write_private(run_dir / "failure_api.json", json.dumps(record))
    return 1


if __name__ == "__main__":
    sys.exit(main())
