"""What a search found, as data: the one source of the table, the report and the exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hermes_rl.config import DEFAULT_PROFILE, Workspace
from hermes_rl.config.invocation import command
from hermes_rl.search.objective import Objective
from hermes_rl.search.population import schedule
from hermes_rl.search.ranking import Ranked, best_record, candidates, default_record, pareto_front, rank
from hermes_rl.search.replication import (
    Replication,
    estimate_optimism,
    evaluate_replicates,
    optimism_sentence,
)
from hermes_rl.search.space import format_params, format_value
from hermes_rl.search.statistics import Optimism
from hermes_rl.search.store import SearchFile, SearchStore, write_atomically
from hermes_rl.search.trial import FINISHED, TrialRecord


@dataclass(frozen=True)
class Summary:
    """A search's result so far.

    Attributes:
        file: definition and state.
        state: the state, ``interrupted`` included.
        objectives: what was looked for.
        records: every trial.
        ranked: the trials without replicates, in order.
        best: the best completed trial, or None.
        default: the completed trial of the default configuration, or None.
        default_rank: where the default came, or None.
        replication: what the replicates say, or None.
        optimism: how much of the best value is luck, or None.
        front: the Pareto front of several objectives; empty for one.
        steps: optimizer steps of all trials.
        seconds: wall time of all sittings that ended.
        workspace: where the search lies.
    """

    file: SearchFile
    state: str
    objectives: list[Objective]
    records: list[TrialRecord]
    ranked: list[Ranked]
    best: TrialRecord | None
    default: TrialRecord | None
    default_rank: int | None
    replication: Replication | None
    optimism: Optimism | None
    front: list[TrialRecord]
    steps: int
    seconds: float
    workspace: Workspace

    @property
    def recommended(self) -> TrialRecord | None:
        """The trial whose configuration to use: by the replicates where there are any."""
        return self.replication.recommended if self.replication else self.best

    @property
    def best_member(self) -> TrialRecord | None:
        """The newest part of the best member of a population; None without a population."""
        return next((r for r in candidates(self.records, self.objectives[0]) if r.segment is not None), None)

    @property
    def names(self) -> list[str]:
        """Names of the searched fields."""
        return list(self.file.definition.space)

    @property
    def planned(self) -> int:
        """Number of trials, with the replicates that are still to come while it runs."""
        definition = self.file.definition
        trials = definition.planned_trials()
        if self.state == "running":
            trials += definition.planned_replicates(trials)
        return max(trials, len(self.records))

    def count(self, *states: str) -> int:
        """Number of trials in one of these states, replicates included."""
        return sum(record.state in states for record in self.records)


def summarize(store: SearchStore) -> Summary:
    """The result of a search so far."""
    file, records = store.load(), store.records()
    objectives = file.definition.build_objectives()
    ranked = rank(records, objectives[0])
    default = default_record(records)
    replication = evaluate_replicates(records, objectives[0]) if len(objectives) == 1 else None
    return Summary(
        file=file,
        state=store.state(),
        objectives=objectives,
        records=records,
        ranked=ranked,
        best=best_record(records, objectives[0]),
        default=default,
        default_rank=next((r.rank for r in ranked if default is not None and r.record is default), None),
        replication=replication,
        optimism=estimate_optimism(records, objectives[0], replication),
        front=pareto_front(records, objectives) if len(objectives) > 1 else [],
        steps=sum(record.steps_taken for record in records),
        seconds=file.seconds,
        workspace=store.workspace,
    )


def format_error(record: TrialRecord) -> str:
    """``± 0.028``, or nothing when the error is unknown."""
    return "" if record.standard_error is None else f"± {record.standard_error:.3f}"


def table_header(summary: Summary) -> list[str]:
    """Headings of the ranked table."""
    objectives = [str(objective) for objective in summary.objectives]
    return ["rank", "trial", *summary.names, *objectives, "std. error", "steps", "seconds", "note"]


def table_row(summary: Summary, ranked: Ranked) -> list[str]:
    """One line of the ranked table, as text."""
    record = ranked.record
    notes = [] if record.state == "completed" else [record.state]
    notes += ["default"] if record.is_default else []
    notes += ["refined"] if record.stage == "refine" else []
    notes += ["Pareto"] if record in summary.front else []
    values = record.values or [None] * len(summary.objectives)
    return [
        "" if ranked.rank is None else str(ranked.rank),
        str(record.trial),
        *(format_value(record.params[name]) if name in record.params else "" for name in summary.names),
        *(
            "" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"
            for value in values
        ),
        format_error(record),
        str(record.step),
        f"{record.seconds:.0f}",
        ", ".join(notes),
    ]


def default_sentence(summary: Summary) -> str:
    """Where the default configuration came, in words."""
    default = summary.default
    if default is None or summary.default_rank is None:
        return "The default configuration has no result yet."
    completed = sum(ranked.rank is not None for ranked in summary.ranked)
    outside = " (outside the space, run as an extra trial)" if default.stage == "default" else ""
    if summary.file.definition.strategy in ("pbt", "wandb"):
        outside = " (run as an extra trial)" if default.stage == "default" else ""
    text = f"The default configuration{outside} came {_ordinal(summary.default_rank)} of {completed}"
    if default.value is not None:
        text += f" with {default.value:.3f} {format_error(default)}"
    return text.rstrip() + "."


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def best_sentence(summary: Summary) -> str:
    """The best configuration, in words."""
    best = summary.best
    if best is None or best.value is None:
        return "No trial has completed yet."
    text = f"Best: trial {best.trial}, {format_params(best.params)}: {best.value:.3f} {format_error(best)}"
    return text.rstrip() + "."


def verdict_sentences(summary: Summary) -> list[str]:
    """What the replicates and the noise say of the winner, in plain words."""
    said = []
    found = schedule_sentence(summary)
    if found is not None:
        said.append(found)
    if summary.replication is not None:
        said.append(summary.replication.sentence)
    elif summary.best is not None and not summary.best.is_default and len(summary.objectives) == 1:
        said.append(_caveat(summary))
    if summary.optimism is not None:
        said.append(optimism_sentence(summary.optimism, summary.objectives[0]))
    return said


def _caveat(summary: Summary) -> str:
    """What a winner without replicates is worth, and how to learn more."""
    definition = summary.file.definition
    if definition.strategy == "pbt":
        return (
            "One run of each is no proof that this schedule beats the default; repeat the search with "
            "another --seed."
        )
    caveat = "One run of each is no proof that it beats the default; "
    resume = command(summary.workspace, "search", "resume", summary.file.search_id)
    if not definition.fresh_seeds():
        return f"{caveat}replicate both on fresh seeds: {resume} --replicate 3"
    ends = f"the search ends with both on {definition.fresh_seeds()} fresh seeds"
    return f"{caveat}{ends}." if summary.state == "running" else f"{caveat}{ends}: {resume}"


def train_command(summary: Summary, best_file: Path) -> str:
    """The command that trains with the best configuration."""
    definition = summary.file.definition
    profile = [] if definition.profile == DEFAULT_PROFILE else ["--profile", definition.profile]
    start = ["run", "start", definition.environment, "--config", str(best_file), *profile, "--follow"]
    return command(best_file.parents[2], *start)


def write_best(store: SearchStore, summary: Summary) -> Path | None:
    """Write ``best.yaml``: overrides for ``run start --config``; returns its path, None without a result."""
    best = summary.recommended
    if best is None or best.value is None:
        return None
    definition = summary.file.definition
    last = " (its last values; schedule.yaml has them all)" if best.segment is not None else ""
    head = [
        f"# Best configuration of search {store.search_id} on {definition.environment} "
        f"(profile {definition.profile}), trial {best.trial}{last}:",
        f"# {summary.objectives[0]} {best.value:.4f} {format_error(best)}".rstrip(),
        *([f"# {summary.replication.sentence}"] if summary.replication else []),
        f"# Train with it: {train_command(summary, store.folder / 'best.yaml')}",
    ]
    overrides = {**definition.overrides, **best.params}
    path = store.folder / "best.yaml"
    write_atomically(
        path, "\n".join(head) + "\n" + yaml.safe_dump(overrides, sort_keys=False, allow_unicode=True)
    )
    return path


def write_schedule(store: SearchStore, summary: Summary) -> Path | None:
    """Write ``schedule.yaml``: the fields that a population's best member was trained with, by segment."""
    best = summary.best_member
    if best is None:
        return None
    head = (
        f"# Schedule of search {store.search_id} on {summary.file.definition.environment}: what trial "
        f"{best.trial} was trained with.\n# {summary.objectives[0]} {best.value:.4f} {format_error(best)} "
        f"after step {best.step}; its weights are the last checkpoint of run {best.run_id}.\n"
    )
    path = store.folder / "schedule.yaml"
    data = {"set": summary.file.definition.overrides, "segments": schedule(best, summary.records)}
    write_atomically(path, head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    return path


def schedule_sentence(summary: Summary) -> str | None:
    """The schedule that a population found, in words; None without a population."""
    best = summary.best_member
    if best is None:
        return None
    merged: list[tuple[int, int, str]] = []
    for part in schedule(best, summary.records):
        values = format_params({name: part[name] for name in summary.names if name in part})
        begun = part["from_step"]
        if merged and merged[-1][2] == values:
            begun = merged.pop()[0]
        merged.append((begun, part["to_step"], values))
    parts = [f"steps {begun + 1} to {end} {values}" for begun, end, values in merged]
    return f"The best member, trial {best.trial}, was trained with (schedule.yaml): {'; '.join(parts)}."


def progress_sentence(records: Sequence[TrialRecord], planned: int) -> str:
    """``12/27 trials done, 3 stopped early, 1 failed``."""
    done = sum(record.state in FINISHED for record in records)
    text = f"{done}/{planned} trials done"
    for state, words in (("pruned", "stopped early"), ("failed", "failed"), ("diverged", "diverged")):
        count = sum(record.state == state for record in records)
        text += f", {count} {words}" if count else ""
    return text
