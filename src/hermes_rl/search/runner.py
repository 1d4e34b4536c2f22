"""How a search has a configuration tried: a narrow seam with two real sides.

:class:`hermes_rl.search.run_trials.RunTrials` starts runs, each with processes of its own.
:class:`hermes_rl.search.replay.ReplayTrials` plays recorded or computed curves on a clock of its own, for
the statistics of searches by the dozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hermes_rl.search.objective import Curves


@dataclass(frozen=True)
class TrialRequest:
    """A configuration to try.

    Attributes:
        trial: number of the trial.
        params: the searched fields' values.
        seed: the run's seed.
        run_id: the id that the run must have; None makes one.
        sweep: the W&B sweep that the run is part of.
        from_run: the run whose weights and optimizer it begins with.
        until: the optimizer step at which it ends, unless it is a whole trial.
        evaluation_steps: where it is evaluated between its first step and its last, unless regularly.
    """

    trial: int
    params: Mapping[str, Any]
    seed: int
    run_id: str | None = None
    sweep: str | None = None
    from_run: str | None = None
    until: int | None = None
    evaluation_steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Observation:
    """A trial as it stands.

    Attributes:
        state: ``running``, ``completed``, ``failed`` or ``stopped``.
        step, total_steps: optimizer steps taken and planned.
        seconds: wall time since its start.
        curves: its metrics so far.
        reason: why it failed or stopped.
    """

    state: Literal["running", "completed", "failed", "stopped"]
    step: int
    total_steps: int | None
    seconds: float
    curves: Curves = field(default_factory=dict)
    reason: str | None = None


class TrialRunner(Protocol):
    """Tries configurations."""

    def defaults(self, names: Iterable[str]) -> dict[str, Any]:
        """The default configuration's values of these fields."""
        ...

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise ConfigError when a configuration is not allowed; start nothing."""
        ...

    def start(self, request: TrialRequest) -> str:
        """Start a trial; returns its run's id.

        Raises:
            TrialRefusedError: for a reason that this trial alone has, such as a value that is not allowed.
            HermesRLError: for one that the next trial would have as well, such as a missing key.
        """
        ...

    def resume(self, request: TrialRequest, run_id: str) -> str:
        """Go on with a trial that was stopped, from its last checkpoint; returns its run's id.

        Raises:
            TrialRefusedError, HermesRLError: as :meth:`start` does.
        """
        ...

    def find(self, trial: int) -> str | None:
        """The id of the run that was started for a trial of this search; None when there is none."""
        ...

    def observe(self, run_id: str) -> Observation:
        """A trial as it stands."""
        ...

    def stop(self, run_ids: Iterable[str]) -> None:
        """Stop trials and wait until nothing of them is left."""
        ...

    def wait(self) -> None:
        """Let a little time pass before looking again."""
        ...

    def now(self) -> float:
        """The clock of this runner, in seconds."""
        ...
