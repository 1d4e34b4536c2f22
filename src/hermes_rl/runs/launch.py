"""Starting one process of a run and holding on to it. Runs in the supervisor.

:func:`spawn` starts a fresh interpreter; :mod:`hermes_rl.runs.forking` asks a fork server instead. Both
give a :class:`Process`. A process starts with its interpreter and its imports and then
waits for :meth:`Process.release`; its standard output and error go to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.parent_watch import PIPE_VARIABLE
from hermes_rl.process_identity import process_mark, signal_process
from hermes_rl.runs.child import PRELOAD_VARIABLE, RELEASE_VARIABLE


@dataclass(frozen=True)
class LaunchRequest:
    """What a process is started with.

    Attributes:
        module: module whose ``main()`` is the process.
        arguments: its command-line arguments, the listening socket excepted.
        env: its whole environment; nothing is inherited.
        preload: modules to import while it waits.
        log: file that gets its output, created with mode 0600.
        socket_fd: a listening socket it inherits; passed on as ``--fd N``.
    """

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    log: Path
    preload: Sequence[str] = ()
    socket_fd: int | None = None


class Process:
    """A started process.

    Args:
        pid: its pid, also the id of its session and process group.
        mark: see :func:`hermes_rl.process_identity.process_mark`.
        when_ended: gives a future of its exit status; called once, inside the event loop.
        release_pipe: write end of the pipe on which the process waits for its turn.
    """

    def __init__(
        self, pid: int, mark: str | None, when_ended: Callable[[], asyncio.Future[int]], release_pipe: int
    ) -> None:
        self.pid = pid
        self.mark = mark
        self._when_ended = when_ended
        self._release_pipe: int | None = release_pipe
        self._exit: asyncio.Future[int] | None = None

    def release(self, env: Mapping[str, str]) -> None:
        """Tell the process that it is its turn, with further environment variables."""
        if self._release_pipe is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it ended meanwhile; wait() tells
            os.write(self._release_pipe, json.dumps(dict(env)).encode())
        self._close_release_pipe()

    async def wait(self) -> int:
        """Wait for its end; what was left of its group is ended then too.

        Returns:
            Its exit status; the negative number of the signal that killed it.
        """
        if self._exit is None:
            self._exit = self._when_ended()
        code = await asyncio.shield(self._exit)
        self._close_release_pipe()
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group, if it still runs."""
        if self.mark is not None:
            signal_process(self.pid, self.mark, number, group=True)

    def _close_release_pipe(self) -> None:
        if self._release_pipe is not None:
            os.close(self._release_pipe)
            self._release_pipe = None


def child_environment(request: LaunchRequest, descriptors: Mapping[str, int]) -> dict[str, str]:
    """The environment of a process: what was asked for, and which inherited descriptor is what."""
    numbers = {name: str(descriptor) for name, descriptor in descriptors.items()}
    return {**request.env, **numbers, PRELOAD_VARIABLE: ",".join(request.preload)}


def open_log(path: Path) -> int:
    """Open a log to append to, readable by its owner only."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def spawn(request: LaunchRequest, parent_pipe: int) -> Process:
    """Start a process in a session of its own, by a fresh interpreter.

    Args:
        request: what to start.
        parent_pipe: read end of a pipe whose write end only this process holds.

    Raises:
        OSError: the process cannot be started or its log not be written.
    """
    read_end, write_end = os.pipe()
    descriptors = {PIPE_VARIABLE: parent_pipe, RELEASE_VARIABLE: read_end}
    passed = list(descriptors.values())
    arguments = list(request.arguments)
    if request.socket_fd is not None:
        passed.append(request.socket_fd)
        arguments += ["--fd", str(request.socket_fd)]
    try:
        log = open_log(request.log)
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "hermes_rl.runs.child", request.module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
                env=child_environment(request, descriptors),
                start_new_session=True,
            )
        finally:
            os.close(log)
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Process(popen.pid, process_mark(popen.pid), lambda: _when_ended(popen), write_end)


def _when_ended(popen: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """A future of the exit status of a child, set when the kernel says so (nothing is polled)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def reap() -> None:
        # Before the child is reaped its pid cannot be given to another process, so neither can its group's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
        code = popen.wait()
        if not ended.done():
            ended.set_result(code)

    try:
        descriptor = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):

        def wait_in_thread() -> None:
            code = popen.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(code))

        threading.Thread(target=wait_in_thread, daemon=True, name=f"wait-{popen.pid}").start()
        return ended

    def on_end() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        reap()

    loop.add_reader(descriptor, on_end)
    return ended
