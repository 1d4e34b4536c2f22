"""One run's life: started, watched, stopped, its state and its metrics.

>>> from hermes_rl import runs
>>> run_id = runs.start(workspace, config)
>>> runs.wait(workspace, run_id).status
'completed'

The names are imported at their first use: every process of a run passes through this package, and most
of them need no state store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_rl.runs.lifecycle import (
        endpoints,
        list_runs,
        read_metrics,
        resolve_id,
        results,
        resume,
        start,
        status,
        stop,
        wait,
    )
    from hermes_rl.runs.lifecycle import list_runs as list
    from hermes_rl.runs.run_status import ProcessStatus, RunStatus, glance
    from hermes_rl.runs.states import ProcessState, RunState

_HOMES = {
    **dict.fromkeys(("ProcessState", "RunState"), "states"),
    **dict.fromkeys(("ProcessStatus", "RunStatus", "glance"), "run_status"),
    **dict.fromkeys(("endpoints", "list_runs", "read_metrics", "resolve_id", "results"), "lifecycle"),
    **dict.fromkeys(("resume", "start", "status", "stop", "wait"), "lifecycle"),
    "list": "lifecycle:list_runs",
}

__all__ = [
    "ProcessState",
    "ProcessStatus",
    "RunState",
    "RunStatus",
    "endpoints",
    "glance",
    "list",
    "list_runs",
    "read_metrics",
    "resolve_id",
    "results",
    "resume",
    "start",
    "status",
    "stop",
    "wait",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute or name)
