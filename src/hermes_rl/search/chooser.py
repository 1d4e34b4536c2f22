"""Who chooses configurations: a seam with three sides.

:class:`hermes_rl.search.strategy.Strategy` asks Optuna,
:class:`hermes_rl.search.sweep_strategy.SweepStrategy` asks a W&B sweep, and
:class:`hermes_rl.search.population.Population` copies and perturbs (population-based training).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_rl.search.trial import Stage, TrialRecord


@dataclass(frozen=True)
class Proposal:
    """A configuration to try next.

    Attributes:
        params: its values.
        stage: why it is tried.
        study_number: its Optuna trial, or None outside the study.
        run_id: the id that its run must have, when somebody else chose it.
        sweep: the W&B sweep that its run is part of.
        member, segment: in population-based training, whose part it is, and which.
        parent: the trial whose weights and optimizer it begins with.
        until: the optimizer step at which it ends, unless it is a whole trial.
    """

    params: dict[str, Any]
    stage: Stage
    study_number: int | None
    run_id: str | None = None
    sweep: str | None = None
    member: int | None = None
    segment: int | None = None
    parent: int | None = None
    until: int | None = None


class Chooser(Protocol):
    """Chooses configurations and learns from their results."""

    def adopt(self, records: Sequence[TrialRecord]) -> list[Proposal]:
        """Take over after an interruption; returns what was chosen already and comes next."""
        ...

    def next(self, records: Sequence[TrialRecord]) -> Proposal | None:
        """The next configuration, or None while, or because, there is none."""
        ...

    def waiting(self) -> bool:
        """Whether there may be a next configuration although nothing runs that could bring it about."""
        ...

    def report(self, record: TrialRecord, step: int, value: float) -> bool:
        """Take one value of a running trial's curve; returns whether the trial is to be stopped."""
        ...

    def stopped(self, record: TrialRecord) -> str | None:
        """Why a running trial is to be stopped whatever its curve; None when it is not."""
        ...

    def tell(self, record: TrialRecord) -> None:
        """Take how a trial ended."""
        ...

    def planned(self) -> int:
        """Number of trials, the default configuration included and the replicates not."""
        ...
