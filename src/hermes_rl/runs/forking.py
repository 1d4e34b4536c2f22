"""A supervisor's side of the fork server: finding it, starting it, asking it for processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hermes_rl
from hermes_rl.parent_watch import PIPE_VARIABLE
from hermes_rl.process_identity import process_mark, wait_for_end
from hermes_rl.runs.child import RELEASE_VARIABLE
from hermes_rl.runs.forkserver import IDLE_SECONDS, receive_message, send_message
from hermes_rl.runs.launch import LaunchRequest, Process, child_environment, open_log
from hermes_rl.runs.roles import PRIVATE_KEYS, ROLES, THREAD_LIMITS

SWITCH = "HERMES_RL_FORK_SERVER"
"""Set to ``0`` to do without fork servers."""
START_SECONDS = 60.0
UNKNOWN_EXIT = 1 << 16
"""Stands for the exit status of a process whose fork server went before it."""

PRELOAD = (
    *("sqlalchemy", "hermes_rl.runs.store", "hermes_rl.runs.supervisor", "hermes_rl.engine.registry"),
    *(name for spec in ROLES for name in spec.preload),
)
"""What the processes of a run import, the supervisor's first."""
_PRELOADED_PARTS = ("config", "engine", "environments", "runs", "trainer", "trajectories")
_OF_ONE_SHELL = frozenset(
    {"PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "WINDOWID", "PYTEST_CURRENT_TEST", "PS1"}
)
_OF_ONE_SHELL_PREFIXES = ("HERMES_RL_", "SSH_", "XDG_SESSION", "TMUX", "STY")


class ForkServer:
    """A fork server.

    Args:
        path: its socket; its lock and its log lie beside it.
        preload: modules that it imports when it is started; by default what the processes of a run need.
        idle_seconds: how long it stays when nobody uses it.
    """

    def __init__(
        self, path: Path, preload: Sequence[str] | None = None, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.path = path
        self._idle_seconds = idle_seconds
        self._preload = preload if preload is not None else PRELOAD

    def is_ready(self) -> bool:
        """Whether it answers now."""
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(5.0)
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def ensure(self) -> bool:
        """Start it, if nobody has, and wait until it answers.

        Returns:
            Whether it answers.
        """
        deadline = time.monotonic() + START_SECONDS
        starter: subprocess.Popen[bytes] | None = None
        while not self.is_ready():
            if time.monotonic() > deadline or (starter is not None and starter.poll() is not None):
                return False
            if starter is None:
                starter = self._start()
            time.sleep(0.02)
        return True

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start the server, unless another process holds its lock: then it is starting already."""
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        output = os.open(self.path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        command = [sys.executable, "-P", "-m", "hermes_rl.runs.forkserver", "--socket", str(self.path)]
        command += ["--lock-fd", str(lock), "--preload", ",".join(dict.fromkeys(self._preload))]
        command += ["--idle-seconds", str(self._idle_seconds)]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_server_environment(),
                cwd="/",
                pass_fds=[lock],  # the lock lives as long as the server and is never stale
                start_new_session=True,
            )
        finally:
            os.close(lock)
            os.close(output)

    def launch(self, request: LaunchRequest, parent_pipe: int) -> Process:
        """As :func:`hermes_rl.runs.launch.launch`, by a fork of the server.

        Raises:
            OSError: the server does not answer.
        """
        connection, pid, write_end = self._fork(request, {PIPE_VARIABLE: parent_pipe})
        mark = process_mark(pid)
        return Process(pid, mark, lambda: _when_reported(connection, pid, mark), write_end)

    def detach(self, request: LaunchRequest) -> int:
        """Fork a process that belongs to nobody and begins at once; its pid.

        Raises:
            OSError: the server does not answer.
        """
        connection, pid, write_end = self._fork(request, {})
        connection.close()
        try:
            os.write(write_end, b"{}")
        finally:
            os.close(write_end)
        return pid

    def _fork(self, request: LaunchRequest, descriptors: dict[str, int]) -> tuple[socket.socket, int, int]:
        """Connection, pid and release pipe of a fork. One that comes too late finds its pipe closed."""
        read_end, write_end = os.pipe()
        descriptors = descriptors | {RELEASE_VARIABLE: read_end}
        if request.socket_fd is not None:
            descriptors["--fd"] = request.socket_fd
        message = {
            "module": request.module,
            "arguments": list(request.arguments),
            "env": child_environment(request, {}),
            "cwd": os.getcwd(),
            "umask": 0o077,
            "descriptors": list(descriptors),  # in the fork they have other numbers; it fills them in
        }
        try:
            connection, pid = self._request(message, request.log, list(descriptors.values()))
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return connection, pid, write_end

    def _request(
        self, message: dict[str, Any], log_path: Path, descriptors: list[int]
    ) -> tuple[socket.socket, int]:
        log = open_log(log_path)
        try:
            connection = self._connect()
            try:
                send_message(connection, message, [log, *descriptors])
                return connection, int(receive_message(connection)[0]["pid"])
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise OSError(f"the fork server does not answer: {error!r}") from error
        finally:
            os.close(log)


def _when_reported(connection: socket.socket, pid: int, mark: str | None) -> asyncio.Future[int]:
    """A future of the exit status that the server reports; should the server go, of the process's end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def finish(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait_without_server() -> None:
        if mark is not None:
            wait_for_end(pid, mark)
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(finish, UNKNOWN_EXIT)

    def on_message() -> None:
        loop.remove_reader(connection)
        try:
            code = int(receive_message(connection)[0]["exit"])
        except (OSError, EOFError, ValueError, KeyError):
            threading.Thread(target=wait_without_server, daemon=True, name=f"wait-{pid}").start()
        else:
            finish(code)
        finally:
            connection.close()

    loop.add_reader(connection, on_message)
    return ended


def fork_server() -> ForkServer | None:
    """The fork server for this user, interpreter, package and environment; None where there is none.

    Modules read environment variables when they are imported, so a server serves only those who have
    the same environment as it, keys and what belongs to one shell excepted.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return None
    identity = [
        sys.executable,
        _package_version(),
        *sorted(_server_environment().items()),
    ]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"hermes-rl-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return None  # someone else's: a socket in it could be anyone's
    return ForkServer(folder / f"{name}.sock")


def _package_version() -> str:
    """Changes whenever a file does that a fork server has imported."""
    root = Path(hermes_rl.__file__).parent
    files = [*root.glob("*.py")]
    for part in _PRELOADED_PARTS:
        files += (root / part).rglob("*.py")
    return f"{root}:{max(path.stat().st_mtime_ns for path in files)}"


def _server_environment() -> dict[str, str]:
    """What the environment of this process says to modules that are imported, without any secret of ours."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in PRIVATE_KEYS
        and name not in _OF_ONE_SHELL
        and not name.startswith(_OF_ONE_SHELL_PREFIXES)
    }
    return environment | THREAD_LIMITS
