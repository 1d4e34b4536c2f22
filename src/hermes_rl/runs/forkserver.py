"""The fork server: ``python -m hermes_rl.runs.forkserver``, a process of its own, shared by a user's runs.

Importing what a trainer and an environment need takes seconds of processor time, each time. This process
has imported it once; for each request it forks a child, which has everything at hand at once. Supervisors
talk to it over a Unix socket (:mod:`hermes_rl.runs.forking` is their side). It ends when nobody has used
it for :data:`IDLE_SECONDS`. Linux only; everything works without it, only slower.

One connection is one child: the request with its file descriptors comes in, ``{"pid"}`` goes out when the
child is there, ``{"exit"}`` when it has ended. The server keeps no secret and knows no run: a child gets
its whole environment with the request, and belongs to the supervisor that holds its parent pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.environments.light_import import light_imports

IDLE_SECONDS = 60.0
MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 8
_PR_SET_NAME = 15


@dataclass
class ForkedChild:
    """A child that runs, and the connection that wants to know of its end."""

    pid: int
    pidfd: int
    connection: socket.socket


def preload(modules: Sequence[str]) -> None:
    """Import modules, without torch: neither a trainer nor most environments have a use for it.

    One that cannot be imported is left to the process that needs it, which will say so.
    """
    with light_imports():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - whatever it is, the child meets it again and reports it
                print(f"cannot preload {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def serve(listener: socket.socket, idle_seconds: float, own: Sequence[int]) -> None:
    """Fork children on request until nobody has used the server for ``idle_seconds``.

    Args:
        listener: its listening socket.
        idle_seconds: how long it stays when there is no child and no request.
        own: further descriptors that no child may keep.
    """
    stop_read, stop_write = os.pipe()
    own = [*own, stop_read, stop_write, listener.fileno()]
    os.set_blocking(stop_write, False)
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"x"))
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(stop_read, selectors.EVENT_READ)
    children: dict[int, ForkedChild] = {}
    while True:
        events = selector.select(None if children else idle_seconds)
        if not events and not children:
            return
        for key, _ in events:
            if key.fileobj is listener:
                child = _accept(listener, selector, children, own)
                if child is not None:
                    children[child.pidfd] = child
                    selector.register(child.pidfd, selectors.EVENT_READ)
            elif key.fd == stop_read:
                return
            else:
                selector.unregister(key.fd)
                _report_end(children.pop(key.fd))


def _accept(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    children: dict[int, ForkedChild],
    own: Sequence[int],
) -> ForkedChild | None:
    connection, _ = listener.accept()
    descriptors: list[int] = []
    try:
        if not _is_same_user(connection):
            raise PermissionError("a request of another user")
        connection.settimeout(5.0)
        request, descriptors = receive_message(connection)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            selector.close()
            for child in children.values():
                os.close(child.connection.detach())
                os.close(child.pidfd)
            for descriptor in (*own, connection.detach()):
                os.close(descriptor)
            _become(request, descriptors)
        pidfd = os.pidfd_open(pid)
        send_message(connection, {"pid": pid})
    except EOFError:  # someone only asked whether the server is there
        connection.close()
        return None
    except (OSError, ValueError, KeyError) as error:
        print(f"request refused: {error!r}", file=sys.stderr, flush=True)
        connection.close()
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return ForkedChild(pid, pidfd, connection)


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def _report_end(child: ForkedChild) -> None:
    # As long as the child is not reaped, its pid and so its group's id cannot become another's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pidfd)
    with contextlib.suppress(OSError):  # its supervisor may be gone
        send_message(child.connection, {"exit": os.waitstatus_to_exitcode(status)})
    child.connection.close()


# In the child


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turn a fresh fork into the process that was asked for. Does not return."""
    code = 1
    try:
        os.setsid()
        _take_over(request, descriptors)
        code = _run(request)
    except BaseException:  # noqa: BLE001 - nothing may escape into the server's loop
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Signals, environment, folder, random state and files of the process that was asked for."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    log, *passed = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    _name_process(request["module"])
    # The descriptors have other numbers here than in the supervisor: say which is which.
    for name, descriptor in zip(request["descriptors"], passed, strict=True):
        if name == "--fd":
            request["arguments"] += ["--fd", str(descriptor)]
        else:
            os.environ[name] = str(descriptor)
    descriptors.clear()


def _name_process(module: str) -> None:
    """Show the part's name in process lists, where the command line is the server's."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rl-{module.split('.')[-2:][0]}".encode()[:15], 0, 0, 0)


def _run(request: dict[str, Any]) -> int:
    """Run the child's module to its end, as the interpreter would."""
    import atexit
    import threading

    from hermes_rl.runs import child

    try:
        code = child.main([request["module"], *request["arguments"]], death_signal=False)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as at any exit
    atexit._run_exitfuncs()
    return code


# Messages, both sides


def send_message(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message: its length as four bytes, then JSON; descriptors ride on the length."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [len(data).to_bytes(4, "big")], list(descriptors))
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its descriptors.

    Raises:
        EOFError: the other side is gone.
        ValueError: it is not a message.
        OSError: nothing came in time.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, 4, MAX_DESCRIPTORS)
    try:
        while 0 < len(head) < 4:
            more = connection.recv(4 - len(head))
            if not more:
                break
            head += more
        length = int.from_bytes(head, "big")
        if len(head) < 4:
            raise EOFError("the other side is gone")
        if length > MAX_REQUEST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        data = b""
        while len(data) < length:
            part = connection.recv(length - len(data))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return json.loads(data), list(descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Preload, listen, serve."""
    parser = argparse.ArgumentParser(description="Fork server; started by supervisors.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--lock-fd", type=int, help="an inherited, locked descriptor that shows that it runs")
    parser.add_argument("--preload", default="")
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    began = time.monotonic()
    preload([name for name in arguments.preload.split(",") if name])
    gc.collect()
    gc.freeze()  # what was imported stays shared between the children
    arguments.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = arguments.socket.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    listener.bind(str(temporary))
    temporary.chmod(0o600)
    listener.listen(64)
    temporary.rename(arguments.socket)  # there from the moment at which it answers
    print(f"ready after {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
    try:
        own = [] if arguments.lock_fd is None else [arguments.lock_fd]
        serve(listener, arguments.idle_seconds, own)
    finally:
        arguments.socket.unlink(missing_ok=True)
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
