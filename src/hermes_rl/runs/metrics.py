"""Reading what the trainer of a run recorded: ``metrics.jsonl``, a line a record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hermes_rl.runs.files import METRICS

Record = dict[str, Any]

_NOT_METRICS = frozenset({"kind", "step", "time", "metrics"})
_COUNTED_KINDS = ("train", "eval")


def read_records(run_dir: Path) -> list[Record]:
    """Every record of a run, in order; of several with the same kind and step the last counts.

    A last line that is not complete (the trainer is writing it, or was killed while it did) is left out.
    """
    try:
        text = (run_dir / METRICS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    records: list[Record] = []
    place: dict[tuple[Any, Any], int] = {}
    for record in parse_lines(text.splitlines()):
        if record.get("kind") not in _COUNTED_KINDS:
            records.append(record)
            continue
        key = (record["kind"], record.get("step"))
        if key in place:
            records[place[key]] = record
        else:
            place[key] = len(records)
            records.append(record)
    return records


class MetricsFollower:
    """Reads a run's records as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._offset = 0

    def new_records(self) -> list[Record]:
        """The records whose lines were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return parse_lines(complete.decode("utf-8", errors="replace").splitlines())


def parse_lines(lines: Iterable[str]) -> list[Record]:
    """The records in lines of JSON; what is not a JSON object is left out."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            step = record.get("step")
            if isinstance(step, float) and step.is_integer():
                record["step"] = int(step)
            records.append(record)
    return records


def curves(records: Iterable[Record]) -> dict[str, list[Any]]:
    """The numeric metrics of all steps as columns.

    Returns:
        ``{"step": [k…], name: [value or None, …], …}``: every column as long as ``step``, None where a
        metric was not measured at that step. Evaluations of step k stand in the row of step k.
    """
    rows: dict[int, Record] = {}
    for record in records:
        step = record.get("step")
        if record.get("kind") in _COUNTED_KINDS and isinstance(step, int):
            numbers = {name: value for name, value in record.items() if is_metric(name, value)}
            rows.setdefault(step, {}).update(numbers)
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row})
    return {"step": steps, **{name: [rows[step].get(name) for step in steps] for name in names}}


def is_metric(name: str, value: Any) -> bool:
    """Whether an entry of a record is a number that was measured."""
    return name not in _NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool)


def last_of(records: Iterable[Record], kind: str) -> Record:
    """The record of that kind with the highest step; empty when there is none."""
    chosen: Record = {}
    for record in records:
        if record.get("kind") == kind and record.get("step", -1) >= chosen.get("step", -1):
            chosen = record
    return chosen


def best_evaluation(records: Iterable[Record], metric: str = "eval_percent_correct") -> Record:
    """The evaluation with the highest ``metric``, the earliest of equals; empty when there is none."""
    measured = [record for record in records if record.get("kind") == "eval" and metric in record]
    return max(measured, key=lambda record: record[metric], default={})
