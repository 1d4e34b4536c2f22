"""The first lines of every process of a run. Runs in that process, before its own module.

``python -m hermes_rl.runs.child MODULE ARGS…`` ties the process to its supervisor, imports what takes
long, waits until the supervisor says that it is this process's turn, then calls ``MODULE.main()``. So the
imports of all processes overlap, while each begins its work only when the one before it is ready.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from hermes_rl.parent_watch import watch_parent

RELEASE_VARIABLE = "HERMES_RL_RELEASE_PIPE"
PRELOAD_VARIABLE = "HERMES_RL_PRELOAD"
_COLLECT_AFTER = 50_000
"""Objects made before Python looks for cycles among the young ones. With the usual 700, hundreds of requests
at once are looked through again and again while all are alive: a tenth of a short run's processor time."""


def main(argv: Sequence[str] | None = None, *, death_signal: bool = True) -> int:
    """Become the process that ``argv`` (module, then its arguments) names; its exit status."""
    module_name, *arguments = list(argv if argv is not None else sys.argv[1:])
    watch_parent(death_signal=death_signal)
    for name in filter(None, os.environ.pop(PRELOAD_VARIABLE, "").split(",")):
        with contextlib.suppress(ImportError):  # the module itself will say what it misses
            importlib.import_module(name)
    if not wait_for_release():
        return 128 + signal.SIGTERM
    module = importlib.import_module(module_name)
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    sys.argv = [str(module.__file__ or module_name), *arguments]
    return int(module.main() or 0)


def wait_for_release() -> bool:
    """Wait for this process's turn and take the environment variables that come with it.

    Returns:
        False when the supervisor closed the pipe instead: there will be no turn.
    """
    descriptor = os.environ.pop(RELEASE_VARIABLE, "")
    if not descriptor.isdigit():
        return True
    with open(int(descriptor), "rb") as pipe:
        message = pipe.read()
    if not message:
        return False
    os.environ.update(json.loads(message))
    return True


if __name__ == "__main__":
    sys.exit(main())
