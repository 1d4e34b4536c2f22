"""Which checkpoints of a run stay. Files and numbers only: whoever starts a run from another uses it too.

A run that begins with another's checkpoint holds it, by a file in the other run's folder, for as long as it
has none of its own. Nobody waits for a lock: whoever begins writes the hold and then looks whether the
checkpoint is still listed; the trainer takes it off the list and then looks whether someone holds it. One of
the two sees the other, so no checkpoint vanishes between being chosen and being read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from hermes_rl.config import write_private

CHECKPOINTS_FILE = "checkpoints.json"
HOLDS = "holds"


def kept_steps(steps: Collection[int], newest: int, evaluated: Mapping[int, float]) -> set[int]:
    """The steps whose checkpoints stay.

    Args:
        steps: the steps that have a checkpoint.
        newest: so many of the latest stay; 0 keeps all.
        evaluated: share correct of the evaluations so far, by step. The best of ``steps`` stays, the earliest
            of equals.
    """
    ordered = sorted(steps)
    if newest == 0:
        return set(ordered)
    kept = set(ordered[-newest:])
    measured = [step for step in ordered if step in evaluated]
    if measured:
        kept.add(max(measured, key=lambda step: evaluated[step]))
    return kept


def hold(run_dir: Path, holder: str, state_path: str) -> None:
    """Keep a checkpoint of the run in ``run_dir`` until the run ``holder`` has one of its own."""
    (run_dir / HOLDS).mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / HOLDS / holder, state_path)


def release(run_dir: Path, holder: str) -> None:
    """Give up a hold, if there is one."""
    (run_dir / HOLDS / holder).unlink(missing_ok=True)


def held_paths(run_dir: Path) -> set[str]:
    """The ``tinker://`` paths that other runs hold; holds that are over are removed on the way."""
    if not (run_dir / HOLDS).is_dir():
        return set()
    held = set()
    for file in (run_dir / HOLDS).iterdir():
        if file.name.startswith("."):  # being written
            continue
        holder = run_dir.parent / file.name
        if not holder.is_dir() or (holder / CHECKPOINTS_FILE).exists():
            file.unlink(missing_ok=True)
            continue
        with contextlib.suppress(FileNotFoundError):  # released this very moment
            held.add(file.read_text(encoding="utf-8"))
    return held
