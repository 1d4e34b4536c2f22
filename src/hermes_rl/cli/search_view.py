"""Watching a search as it goes: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hermes_rl.cli.console import number_text, seconds_text
from hermes_rl.search.ranking import best_record
from hermes_rl.search.space import format_params
from hermes_rl.search.summary import Summary, format_error, progress_sentence, table_header, table_row
from hermes_rl.search.trial import TrialRecord

if TYPE_CHECKING:
    from hermes_rl.search.orchestrator import Snapshot

HEARTBEAT_SECONDS = 15.0
_REFRESH_SECONDS = 0.5


def finished_line(record: TrialRecord, snapshot: Snapshot) -> str:
    """One line for a trial that has ended."""
    kind = (
        f"replicate of trial {record.replicate_of}, seed {record.seed}: "
        if record.stage == "replicate"
        else ""
    )
    if record.member is not None:
        kind = f"member {record.member}, steps {record.from_step + 1} to {record.total_steps}: "
    kind += "default: " if record.is_default and record.stage != "replicate" else ""
    text = f"trial {record.trial:>3}  {kind}{format_params(record.params)}  "
    if record.state == "completed":
        text += f"{number_text(record.value)} {format_error(record)}"
    else:
        text += f"{record.state}: {record.reason}" if record.reason else record.state
        if record.state == "pruned" and record.value is not None:
            text += f" with {number_text(record.value)}"
    return f"{text.rstrip()}  ({record.step} steps, {seconds_text(record.seconds)})  [{_counts(snapshot)}]"


def _counts(snapshot: Snapshot) -> str:
    return progress_sentence(snapshot.records, snapshot.planned) + _remaining(snapshot)


def _remaining(snapshot: Snapshot) -> str:
    return f", about {seconds_text(snapshot.remaining)} left" if snapshot.remaining else ""


def _best_line(snapshot: Snapshot) -> str:
    best = best_record(snapshot.records, snapshot.file.definition.build_objectives()[0])
    if best is None:
        return "best so far: none yet"
    value = f"{number_text(best.value)} {format_error(best)}".rstrip()
    return f"best so far: {value} (trial {best.trial}: {format_params(best.params)})"


class LineView:
    """One line a finished trial, and a heartbeat when nothing else was said for a while."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tick(self, snapshot: Snapshot) -> None:
        """Say what runs when nothing was said for :data:`HEARTBEAT_SECONDS`."""
        if time.monotonic() - self._last >= HEARTBEAT_SECONDS:
            running = [r for r in snapshot.records if r.state == "running"]
            steps = ", ".join(f"trial {r.trial} at step {r.step}/{r.total_steps or '?'}" for r in running)
            self._say(f"… {steps}; {_best_line(snapshot)}{_remaining(snapshot)}")

    def finished(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A line for the trial."""
        self._say(finished_line(record, snapshot))

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, markup=False, soft_wrap=True)


class LiveView:
    """A table of the running trials, redrawn in place; finished trials stay as lines above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def tick(self, snapshot: Snapshot) -> None:
        """Redraw the table, a few times a second at most."""
        if time.monotonic() - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn = time.monotonic()
        metric = snapshot.file.definition.build_objectives()[0].metric
        table = Table(box=None, pad_edge=False)
        for heading in ("trial", "configuration", "step", metric, "time"):
            table.add_column(heading, justify="left" if heading == "configuration" else "right")
        for record in snapshot.records:
            if record.state == "running":
                points = record.points(metric)
                table.add_row(
                    str(record.trial),
                    format_params(record.params),
                    f"{record.step}/{record.total_steps or '?'}",
                    number_text(points[-1].value if points else None),
                    seconds_text(record.seconds),
                )
        elapsed = f"{_counts(snapshot)}; {seconds_text(snapshot.elapsed)} so far"
        self._live.update(Group(table, Text(_best_line(snapshot)), Text(elapsed, style="dim")))

    def finished(self, record: TrialRecord, snapshot: Snapshot) -> None:
        """A line for the trial, above the table."""
        self._live.console.print(finished_line(record, snapshot), markup=False)


def make_view(console: Console) -> LiveView | LineView:
    """The view that fits the console."""
    return LiveView(console) if console.is_terminal else LineView(console)


def ranked_table(summary: Summary, limit: int | None = None) -> Table:
    """The ranked table, for the console."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    left = {"note", *summary.names}
    for heading in table_header(summary):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading != "note")
    for ranked in summary.ranked[:limit]:
        style = "green" if ranked.record is summary.best else "cyan" if ranked.record.is_default else None
        table.add_row(*table_row(summary, ranked), style=style)
    return table
