"""Ties a process to the one that started it. Runs inside each process of a run.

A supervisor that is killed cannot stop its children, so each child watches for that by itself:

- a pipe whose write end only the parent holds (``$HERMES_RL_PARENT_PIPE`` is the read end): end of file
  means that the parent is gone, whatever ended it;
- on Linux also the kernel's parent-death signal, which works while Python code is stuck.

A child that lost its parent sends SIGTERM to its own process group, so that it ends as if it had been
stopped, and SIGKILL to what is left of the group after :data:`GRACE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

PIPE_VARIABLE = "HERMES_RL_PARENT_PIPE"
GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def watch_parent(*, death_signal: bool = True) -> bool:
    """Start watching, if this process was given a parent pipe.

    Args:
        death_signal: also ask the kernel for SIGTERM at the parent's death (Linux). Wrong for a process
            that was forked by a fork server, whose parent is not the one it belongs to.

    Returns:
        Whether there is a parent to watch. A second call does nothing and returns False.
    """
    descriptor = os.environ.pop(PIPE_VARIABLE, "")
    if not descriptor.isdigit():
        return False
    if death_signal and sys.platform == "linux":
        _request_death_signal()
    os.set_inheritable(int(descriptor), False)
    threading.Thread(
        target=_end_with_parent, args=(int(descriptor),), name="parent-watch", daemon=True
    ).start()
    return True


def _request_death_signal() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end_with_parent(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):
            pass
    own_group = os.getpgrp() == os.getpid()
    _signal(own_group, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    _signal(own_group, signal.SIGKILL)


def _signal(own_group: bool, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if own_group:
            os.killpg(os.getpid(), number)
        else:
            os.kill(os.getpid(), number)
