"""The state machine of a run and of its processes. ``docs/runs.md`` draws it."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """Where a run is in its life."""

    PENDING = "pending"
    """Recorded; whoever starts or resumes it has not started its supervisor yet."""
    STARTING = "starting"
    """The supervisor brings up the processes."""
    RUNNING = "running"
    """Every process is ready; training goes on."""
    STOPPING = "stopping"
    """The outcome is known; processes are being stopped."""
    COMPLETED = "completed"
    """All steps were taken."""
    STOPPED = "stopped"
    """Ended because someone asked for it."""
    FAILED = "failed"
    """Ended by itself before all steps were taken; the reason is recorded."""


class ProcessState(StrEnum):
    """Where one process of a run is in its life."""

    STARTING = "starting"
    """Started, not ready yet (it may still wait for the processes before it)."""
    RUNNING = "running"
    """Ready."""
    EXITED = "exited"
    """Ended by itself with exit status 0."""
    STOPPED = "stopped"
    """Ended because the supervisor asked it to."""
    FAILED = "failed"
    """Ended by itself with another status, or by a signal nobody of us sent."""
    EXTERNAL = "external"
    """Not ours: whoever started it looks after it."""


TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.STARTING, RunState.STOPPED, RunState.FAILED}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.STOPPED, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.STOPPING, RunState.STOPPED, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED}),
    RunState.COMPLETED: frozenset(),
    RunState.STOPPED: frozenset({RunState.PENDING}),
    RunState.FAILED: frozenset({RunState.PENDING}),
}
"""From each state, the states a run may go to.

To ``FAILED`` from every active state, because a supervisor can be killed; from an end to ``PENDING`` only
by a resume.
"""

FINAL = frozenset({RunState.COMPLETED, RunState.STOPPED, RunState.FAILED})
ACTIVE = frozenset(RunState) - FINAL


def sources(target: RunState) -> frozenset[RunState]:
    """The states from which a run may go to ``target``."""
    return frozenset(state for state, after in TRANSITIONS.items() if target in after)
