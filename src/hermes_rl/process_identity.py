"""Which process a pid means: pids are reused, so each is kept with a mark of when it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil

_STAT_STATE, _STAT_START = 0, 19  # fields of /proc/PID/stat, counted after the command's ")"


def process_mark(pid: int) -> str | None:
    """A mark that no other process of this machine shares with ``pid``; None when there is no such process.

    On Linux it is made of the machine's boot id and the process's start in ticks since boot, which a
    clock that jumps does not change (``psutil``'s ``create_time`` moves with the clock). Elsewhere it is
    the creation time. A zombie counts as gone.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        fields = stat[stat.rindex(")") + 1 :].split()
        return None if fields[_STAT_STATE] in "ZX" else f"{boot}:{fields[_STAT_START]}"
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"created:{process.create_time():.2f}"
    except psutil.Error:
        return None


def is_alive(pid: int | None, mark: str | None) -> bool:
    """Whether the process with this pid and mark still runs."""
    return pid is not None and mark is not None and process_mark(pid) == mark


def signal_process(pid: int, mark: str, number: int, *, group: bool = False) -> bool:
    """Send a signal to a process, or to its whole group, if it is still the same process.

    Returns:
        Whether the signal was sent.
    """
    if not is_alive(pid, mark):
        return False
    try:
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_for_end(pid: int, mark: str, timeout: float | None = None) -> bool:
    """Wait until a process, not necessarily a child, has ended.

    Args:
        timeout: seconds; None waits for ever.

    Returns:
        Whether it has ended.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            descriptor = None
        if descriptor is not None:
            try:
                if not is_alive(pid, mark):
                    return True
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                readable, _, _ = select.select([descriptor], [], [], left)
                return bool(readable) or not is_alive(pid, mark)
            finally:
                os.close(descriptor)
    while is_alive(pid, mark):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def processes_with(variable: str, value: str) -> list[int]:
    """Pids of this user's processes whose environment holds ``variable=value``, this one excepted."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process.pid)
    return found


def end_processes(processes: list[tuple[int, str]], *, grace: float) -> None:
    """End processes and their groups: SIGTERM, then SIGKILL for what is left after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    for pid, mark in processes:
        signal_process(pid, mark, signal.SIGTERM, group=True)
    for pid, mark in processes:
        if not wait_for_end(pid, mark, max(0.0, deadline - time.monotonic())):
            signal_process(pid, mark, signal.SIGKILL, group=True)
            wait_for_end(pid, mark, 5.0)
