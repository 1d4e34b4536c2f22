"""The files in a run's folder, and their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl.config import write_private

RUN_CONFIG = "run.yaml"
METRICS = "metrics.jsonl"
PROGRESS = "progress.json"
CHECKPOINTS = "checkpoints.json"
ENDPOINTS = "endpoints.json"
EXTERNAL_CONFIG = "environment.yaml"

TAIL_LINES = 20
_TAIL_BYTES = 16_384


def failure_file(run_dir: Path, role: str) -> Path:
    """Where a process that failed for a reason it knows writes the reason."""
    return run_dir / f"failure_{role}.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when the file is missing or holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def read_checkpoints(run_dir: Path) -> list[dict[str, Any]]:
    """The list that the trainer keeps: step, path of the training state, path of the sampler weights."""
    try:
        saved = json.loads((run_dir / CHECKPOINTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return saved if isinstance(saved, list) else []


def read_progress(run_dir: Path) -> dict[str, Any]:
    """What the trainer said last of its progress; empty before it says anything."""
    return read_json(run_dir / PROGRESS) or {}


def write_progress(run_dir: Path, progress: Mapping[str, Any]) -> None:
    """Say in the trainer's place how far it is.

    Raises:
        OSError: the file cannot be written.
    """
    write_private(run_dir / PROGRESS, json.dumps(dict(progress)))


def progress_marks(run_dir: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes whenever a run takes a step, gets an evaluation, saves a checkpoint or enters a phase."""
    marks: list[tuple[int, int, int] | None] = []
    for name in (PROGRESS, METRICS, CHECKPOINTS):
        try:
            found = (run_dir / name).stat()
        except OSError:
            marks.append(None)
        else:
            marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(marks)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a text file; empty when there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
