"""One trial's record: what was tried, in which run, and what came of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hermes_rl.search.objective import CurvePoint, Curves

Stage = Literal["default", "search", "refine", "segment", "replicate"]
TrialState = Literal["running", "completed", "pruned", "failed", "diverged", "stopped", "paused"]
FINISHED: frozenset[str] = frozenset({"completed", "pruned", "failed", "diverged"})
"""States after which a trial is not run again. A ``stopped`` one is, when the search is resumed;
a ``paused`` one waits at a rung."""

CurveRows = dict[str, list[tuple[int, float, int | None]]]


class TrialRecord(BaseModel):
    """One trial, complete enough to rank and draw it without its run.

    Attributes:
        trial: number within the search, from 0.
        stage: ``default`` (the default configuration where the space does not hold it), ``search``,
            ``refine``, ``segment`` (a part of a member of a population) or ``replicate``.
        params: the searched fields' values.
        seed: seed of the run.
        state: how it stands.
        run_id: its run.
        study_number: number of its Optuna trial; None for those that Optuna did not choose.
        replicate_of: the trial whose configuration it runs again.
        is_default: whether its configuration is the default one.
        reason: why it ended, unless it completed.
        values: the objectives' values, in the order of the definition.
        standard_error: of the first value, from the number of evaluated items.
        eval_count: number of items of one evaluation.
        rung: number of rungs that it has passed.
        unwanted_at: the step at whose value the pruner wanted it stopped, or None.
        sweep, sweep_run: the W&B sweep that chose it, and the id of its run there, which is its own too.
        member, segment: of a population, whose part it is, and which.
        parent: the trial whose weights and optimizer it began with.
        from_step: optimizer steps that were taken before it began.
        step, total_steps: optimizer steps taken and planned, those before it began included.
        seconds: wall time from start to end.
        tokens: trained tokens, when the run reports them.
        curves: metric → (step, value, count).
    """

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")

    trial: int
    stage: Stage
    params: dict[str, Any]
    seed: int
    state: TrialState = "running"
    run_id: str | None = None
    study_number: int | None = None
    replicate_of: int | None = None
    is_default: bool = False
    reason: str | None = None
    values: list[float] | None = None
    standard_error: float | None = None
    eval_count: int | None = None
    rung: int = 0
    unwanted_at: int | None = None
    sweep: str | None = None
    sweep_run: str | None = None
    member: int | None = None
    segment: int | None = None
    parent: int | None = None
    from_step: int = 0
    step: int = 0
    total_steps: int | None = None
    seconds: float = 0.0
    tokens: int | None = None
    curves: CurveRows = {}
    started_at: float = 0.0
    ended_at: float | None = None

    @property
    def value(self) -> float | None:
        """The first objective's value."""
        return self.values[0] if self.values else None

    @property
    def steps_taken(self) -> int:
        """Optimizer steps of its own run."""
        return max(0, self.step - self.from_step)

    def points(self, metric: str) -> list[CurvePoint]:
        """The curve of one metric."""
        return [CurvePoint(*row) for row in self.curves.get(metric, [])]


def curve_rows(curves: Curves) -> CurveRows:
    """Curves as a record keeps them."""
    return {name: [(p.step, p.value, p.count) for p in points] for name, points in curves.items()}
