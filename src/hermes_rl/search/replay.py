"""Trials that are not run but played: recorded or computed curves, on a clock of their own.

For statistics over searches by the dozen, and for tests of everything above a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import ConfigError, TrialRefusedError
from hermes_rl.search.objective import CurvePoint, Curves
from hermes_rl.search.runner import Observation, TrialRequest
from hermes_rl.search.space import format_params, params_key
from hermes_rl.search.trial import TrialRecord


@dataclass(frozen=True)
class Recording:
    """What a run would have been.

    Attributes:
        curves: its metrics.
        total_steps: its optimizer steps.
        seconds_per_step: wall time of a step.
        fails_at: the step at which it fails, or None.
        reason: why it fails.
    """

    curves: Mapping[str, list[CurvePoint]]
    total_steps: int
    seconds_per_step: float = 1.0
    fails_at: int | None = None
    reason: str | None = None


Source = Callable[[Mapping[str, Any], int], Recording]
"""Full configuration (defaults and parameters) and seed → what the run would have been."""


def recorded(records: Iterable[TrialRecord], default: Mapping[str, Any]) -> Source:
    """The trials of a finished search as a source: each configuration as it really went.

    Args:
        records: the search's trials; of a configuration's runs the seed chooses one.
        default: the default configuration; fields that no record names have its values.

    Returns:
        A source that raises ConfigError for a configuration that was never run.
    """
    runs: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.state == "completed" and record.curves:
            runs.setdefault(params_key({**default, **record.params}), []).append(record)

    def source(config: Mapping[str, Any], seed: int) -> Recording:
        known = runs.get(params_key(config))
        if known is None:
            raise ConfigError(f"There is no recording of {format_params(config)}.")
        record = known[seed % len(known)]
        curves = {name: record.points(name) for name in record.curves}
        return Recording(
            curves, record.step, seconds_per_step=max(record.seconds, 1e-3) / max(record.step, 1)
        )

    return source


class ReplayTrials:
    """Plays recordings.

    Args:
        source: gives the recording of a configuration and seed.
        default: the default configuration; every field a search may name.
        tick: seconds that pass each time the search looks.
        check: raises ConfigError for a configuration that is not allowed.
    """

    def __init__(
        self,
        source: Source,
        default: Mapping[str, Any],
        *,
        tick: float = 1.0,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._source = source
        self._default = dict(default)
        self._tick = tick
        self._check = check
        self._clock = 0.0
        self._started: dict[str, tuple[float, Recording]] = {}
        self._stopped: dict[str, float] = {}
        self._trials: dict[int, str] = {}

    def defaults(self, names: Iterable[str]) -> dict[str, Any]:
        """The default configuration's values of these fields."""
        return {name: self._default.get(name) for name in names}

    def check(self, params: Mapping[str, Any]) -> None:
        """Refuse unknown fields, and what the given check refuses."""
        for name in params:
            if name not in self._default:
                raise ConfigError(f"Unknown field {name!r}.", allowed=sorted(self._default))
        if self._check:
            self._check({**self._default, **params})

    def start(self, request: TrialRequest) -> str:
        """Start playing; the id is the number of recordings started before."""
        run_id = f"replay-{len(self._started)}"
        try:
            recording = self._source({**self._default, **request.params}, request.seed)
        except ConfigError as error:
            raise TrialRefusedError(error.message, allowed=error.allowed, hint=error.hint) from error
        self._started[run_id] = (self._clock, recording)
        self._trials[request.trial] = run_id
        return run_id

    def resume(self, request: TrialRequest, run_id: str) -> str:
        """Go on playing where it stopped; one that this player never started begins anew."""
        if run_id not in self._started:
            return self.start(request)
        begun, recording = self._started[run_id]
        paused_at = self._stopped.pop(run_id, self._clock)
        self._started[run_id] = (begun + self._clock - paused_at, recording)
        return run_id

    def find(self, trial: int) -> str | None:
        """The id of the recording that was started last for a trial; None when there is none."""
        return self._trials.get(trial)

    def observe(self, run_id: str) -> Observation:
        """The recording as far as the clock has come."""
        if run_id not in self._started:
            return Observation("stopped", 0, None, 0.0, reason="the recording is gone")
        begun, recording = self._started[run_id]
        seconds = self._stopped.get(run_id, self._clock) - begun
        last = recording.total_steps if recording.fails_at is None else recording.fails_at
        step = min(int(seconds / recording.seconds_per_step + 1e-9), last)
        curves: Curves = {
            name: [point for point in points if point.step <= step]
            for name, points in recording.curves.items()
        }
        if recording.fails_at is not None and step >= recording.fails_at:
            state = "failed"
        elif step >= recording.total_steps:
            state = "completed"
        else:
            state = "stopped" if run_id in self._stopped else "running"
        seconds = min(seconds, last * recording.seconds_per_step)
        reason = recording.reason if state == "failed" else None
        return Observation(state, step, recording.total_steps, seconds, curves, reason)

    def stop(self, run_ids: Iterable[str]) -> None:
        """Stop playing."""
        for run_id in run_ids:
            self._stopped.setdefault(run_id, self._clock)

    def wait(self) -> None:
        """Advance the clock by one tick."""
        self._clock += self._tick

    def now(self) -> float:
        """The clock."""
        return self._clock
