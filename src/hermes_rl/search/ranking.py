"""The order of a search's trials, and where the default configuration came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hermes_rl.search.objective import Objective
from hermes_rl.search.trial import TrialRecord


@dataclass(frozen=True)
class Ranked:
    """One line of the ranked table.

    Attributes:
        rank: from 1; trials of the same value share a rank. None without a value that counts.
        record: the trial.
    """

    rank: int | None
    record: TrialRecord


def tuned(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The trials of the search itself, without the replicates; of a population's members the newest part."""
    own = [record for record in records if record.stage != "replicate"]
    newest: dict[int | None, int] = {}
    for record in own:
        if record.segment is not None and record.state == "completed":
            newest[record.member] = max(record.segment, newest.get(record.member, 0))
    return [r for r in own if r.segment is None or r.segment >= newest.get(r.member, 0)]


def candidates(records: Iterable[TrialRecord], objective: Objective) -> list[TrialRecord]:
    """Completed trials, the best first; of equal ones the earlier first."""
    done = [r for r in tuned(records) if r.state == "completed" and r.value is not None]
    return sorted(done, key=lambda record: (-objective.sign * (record.value or 0.0), record.trial))


def best_record(records: Iterable[TrialRecord], objective: Objective) -> TrialRecord | None:
    """The best completed trial."""
    ordered = candidates(records, objective)
    return ordered[0] if ordered else None


def default_record(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The completed trial of the default configuration."""
    return next((r for r in tuned(records) if r.is_default and r.state == "completed"), None)


def rank(records: Sequence[TrialRecord], objective: Objective) -> list[Ranked]:
    """All trials but the replicates: completed ones by value, then the others by how far they came."""
    ordered = candidates(records, objective)
    ranked: list[Ranked] = []
    for at, record in enumerate(ordered):
        same = at > 0 and ordered[at - 1].value == record.value
        ranked.append(Ranked(ranked[-1].rank if same else at + 1, record))
    known = {record.trial for record in ordered}
    rest = [record for record in tuned(records) if record.trial not in known]
    rest.sort(key=lambda record: (record.state == "failed", -record.step, record.trial))
    return ranked + [Ranked(None, record) for record in rest]


def pareto_front(records: Sequence[TrialRecord], objectives: Sequence[Objective]) -> list[TrialRecord]:
    """Completed trials that no other one beats in one objective without losing in another."""
    done = [r for r in tuned(records) if r.state == "completed" and r.values]

    def scores(record: TrialRecord) -> list[float]:
        return [o.sign * value for o, value in zip(objectives, record.values or [], strict=True)]

    def beaten(record: TrialRecord) -> bool:
        own = scores(record)
        return any(
            other is not record
            and all(a >= b for a, b in zip(scores(other), own, strict=True))
            and scores(other) != own
            for other in done
        )

    return [record for record in done if not beaten(record)]
