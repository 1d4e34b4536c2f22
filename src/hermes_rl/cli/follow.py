"""Watching a run as it goes: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from hermes_rl import runs
from hermes_rl.cli.console import number_text, seconds_text
from hermes_rl.config import Workspace
from hermes_rl.config.invocation import command
from hermes_rl.runs.metrics import MetricsFollower, Record
from hermes_rl.runs.run_status import RunStatus

_LOOK_SECONDS = 0.2


class _View(Protocol):
    def show(self, status: RunStatus, records: Iterable[Record]) -> None: ...


def follow(workspace: Workspace, run_id: str, console: Console) -> RunStatus:
    """Show a run until it has ended; returns its last status."""
    status = runs.glance(workspace, run_id)
    if console.is_terminal:
        with _progress(console) as progress:
            status = _look(workspace, run_id, _LiveView(progress, status))
    else:
        status = _look(workspace, run_id, _LineView(console))
    print_end(console, status)
    return status


def _look(workspace: Workspace, run_id: str, view: _View) -> RunStatus:
    follower = MetricsFollower(workspace.run_dir(run_id))
    while True:
        status = runs.glance(workspace, run_id)
        view.show(status, follower.new_records())
        if status.is_final:
            return status
        time.sleep(_LOOK_SECONDS)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
        console=console,
    )


class _LiveView:
    """A progress bar with the latest metrics; evaluations stay as lines above it."""

    def __init__(self, progress: Progress, status: RunStatus) -> None:
        self._progress = progress
        self._task = progress.add_task("pending", total=status.total_steps, metrics="")

    def show(self, status: RunStatus, records: Iterable[Record]) -> None:
        for record in records:
            if record.get("kind") == "eval":
                self._progress.console.print(evaluation_line(record))
        values = {
            "reward": status.reward_mean,
            "correct": status.percent_correct,
            "eval": status.eval_percent_correct,
            "loss": status.loss,
        }
        metrics = "  ".join(
            f"{name} {number_text(value)}" for name, value in values.items() if value is not None
        )
        self._progress.update(
            self._task,
            description=phase_text(status),
            completed=status.step,
            total=status.total_steps,
            metrics=metrics,
        )


class _LineView:
    """A line a phase, a step and an evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""

    def show(self, status: RunStatus, records: Iterable[Record]) -> None:
        phase = phase_text(status)
        if phase != self._phase and status.status in ("starting", "stopping", "pending"):
            self._console.print(phase, markup=False)
        self._phase = phase
        for record in records:
            if record.get("kind") == "train":
                self._console.print(step_line(record, status.total_steps), markup=False)
            elif record.get("kind") == "eval":
                self._console.print(evaluation_line(record), markup=False)


def phase_text(status: RunStatus) -> str:
    """What goes on in a run, in a few words."""
    if status.status in ("starting", "running") and status.phase:
        return status.phase + ("…" if status.status == "starting" else "")
    return status.status


def step_line(record: Record, total_steps: int) -> str:
    """One optimizer step."""
    width = len(str(total_steps))
    parts = [f"step {record.get('step', 0):>{width}}/{total_steps}"]
    parts += [
        f"{name} {number_text(record[name])}"
        for name in ("reward_mean", "percent_correct", "loss")
        if isinstance(record.get(name), int | float)
    ]
    return "  ".join(parts)


def evaluation_line(record: Record) -> str:
    """One evaluation, with the standard error that its count allows."""
    value = record.get("eval_percent_correct")
    line = f"evaluation at step {record.get('step')}: eval_percent_correct {number_text(value)}"
    count = record.get("eval_count")
    if count and isinstance(value, int | float) and 0 <= value <= 1:
        line += f" ± {math.sqrt(value * (1 - value) / count):.3f} ({count:.0f} items)"
    return line


def print_end(console: Console, status: RunStatus) -> None:
    """How a run ended and what to do next."""
    spent = ""
    if status.started_at and status.ended_at:
        spent = f" after {seconds_text((status.ended_at - status.started_at).total_seconds())}"
    colour = {"completed": "green", "stopped": "yellow"}.get(status.status, "red")
    console.print(
        f"[bold {colour}]{status.status}[/]{spent}, step {status.step}/{status.total_steps}", end=""
    )
    console.print(f": {status.reason}" if status.reason else "", markup=False)
    if status.status == "failed" and status.log_tail and status.guilty_role:
        console.print(f"The last lines of {status.logs.get(status.guilty_role, 'its log')}:", markup=False)
        console.print(status.log_tail, markup=False, style="dim")
    further = {"completed": {"Results": "results"}, "failed": {"Logs": "logs", "Go on": "resume"}}
    workspace = Path(status.run_dir).parents[1]
    for what, verb in further.get(status.status, {"Go on": "resume"}).items():
        line = f"{what}: {command(workspace, 'run', verb, status.run_id)}"
        console.print(line, markup=False, soft_wrap=True)
