"""When it is worth looking at a run again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes_rl.runs.run_status import RunStatus

STARTING_SECONDS = 10
SHORTEST_SECONDS = 5
LONGEST_SECONDS = 600
_LOOKS_LEFT = 5
"""About how many looks a run is worth from now to its end."""


def next_look(status: RunStatus, now: datetime | None = None) -> int | None:
    """Seconds until a run is worth another look; None when it has ended.

    A fifth of the time that the rest of the run takes at its speed so far, within bounds.
    """
    if status.is_final:
        return None
    if status.started_at is None or status.step == 0:
        return STARTING_SECONDS
    elapsed = ((now or datetime.now(UTC)) - status.started_at).total_seconds()
    left = elapsed / status.step * max(0, status.total_steps - status.step)
    return bounded(left / _LOOKS_LEFT)


def bounded(seconds: float) -> int:
    """A whole number of seconds that is neither impatient nor forgetful."""
    return round(min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS))
