"""Where the figures of a run go: ``metrics.jsonl``, ``progress.json`` and Weights & Biases.

The trainer is the only writer. A line of ``metrics.jsonl`` is one record: ``{"kind": "train", "step": k, …}``
once an optimizer step, ``{"kind": "eval", "step": k, …}`` once an evaluation, ``{"kind": "env", …}`` for
what the environment logged itself. W&B mirrors the records; losing it never harms the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hermes_rl.config import FIELDS, RunConfig, write_private
from hermes_rl.config.tracking_mode import wandb_mode
from hermes_rl.trainer.wandb_mirror import WandbMirror

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PROGRESS_FILE = "progress.json"
EVALUATED = "eval_percent_correct"
WANDB_FINISH_VARIABLE = "HERMES_RL_WANDB_FINISH_SECONDS"
WANDB_FINISH_SECONDS = 60.0
"""How long a run that has ended waits for W&B to take what is left, unless the variable says otherwise."""
WANDB_FINISH_MOST_SECONDS = 240.0
"""The longest it may say: the supervisor takes a trainer that does not end for a failed one."""
RecordKind = Literal["train", "eval", "env"]


def wandb_place(config: RunConfig) -> tuple[dict[str, str], str | None]:
    """Where in W&B a run goes: the arguments ``entity`` and ``project`` of ``wandb.init``, and its sweep."""
    if config.tinker.wandb_sweep is not None:
        entity, project, sweep = config.tinker.wandb_sweep.split("/")
        return {"entity": entity, "project": project}, sweep
    return {"project": config.tinker.wandb_project or "hermes-rl"}, None


def flat_fields(config: RunConfig) -> dict[str, Any]:
    """Every field by its bare name, as a sweep's parameters are called."""
    return {name: config.value(name) for name, field in FIELDS.items() if field.section != "run"}


class Tracker:
    """Writes the records of one run.

    Args:
        run_dir: the run's folder.
        config: the run's configuration.
        resume_step: records of later steps, left by an interrupted run, are cut off.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, resume_step: int | None = None) -> None:
        self._path = run_dir / METRICS_FILE
        self._progress_path = run_dir / PROGRESS_FILE
        self._config = config
        self._latest: dict[str, float] = {}
        self.evaluated: dict[int, float] = {}
        """``eval_percent_correct`` of the evaluations so far, by step."""
        self._phase = "starting"
        self._step = resume_step or 0
        if resume_step is not None:
            self._cut_after(resume_step)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._wandb = WandbMirror(run_dir, lambda: self._start_wandb(run_dir))
        self.write_progress()

    def _cut_after(self, step: int) -> None:
        if not self._path.exists():
            return
        kept: list[str] = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("step", 0) <= step:
                kept.append(line)
                self._remember(record)
        write_private(self._path, "".join(line + "\n" for line in kept))

    def _start_wandb(self, run_dir: Path) -> Any:
        mode = wandb_mode(self._config.tinker.wandb_sweep or self._config.tinker.wandb_project)
        if mode == "disabled":
            return None
        try:
            import wandb

            place, sweep = wandb_place(self._config)
            by_name = flat_fields(self._config) if sweep else {}
            options: dict[str, Any] = dict(place)
            return wandb.init(
                **options,
                name=self._config.env.wandb_name,
                group=self._config.tinker.wandb_group,
                id=self._config.run.run_id,
                resume="allow",
                config={**by_name, **self._config.shown()},
                dir=str(run_dir),
                mode=mode,
                settings=wandb.Settings(silent=True, console="off", init_timeout=30, sweep_id=sweep),
            )
        except Exception as error:  # noqa: BLE001  (whatever W&B raises, the run goes on without it)
            logger.warning("Weights & Biases is not available (%s); the run goes on without it.", error)
            return None

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.write_progress()

    def record(self, kind: RecordKind, step: int, figures: Mapping[str, float], **more: Any) -> None:
        """Append one record; figures that are not finite numbers are left out and named in ``not_finite``."""
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        lost = sorted(set(figures) - set(finite))
        line: dict[str, Any] = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite, **more}
        if lost:
            line["not_finite"] = lost
        os.write(self._descriptor, (json.dumps(line, allow_nan=False) + "\n").encode())
        if kind == "train":
            self._step = step
        self._remember(line)
        self.write_progress()
        row = {f"{kind}/{name}": value for name, value in finite.items()}
        self._wandb.log(kind, step, row | {"step": step})

    def _remember(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") in ("train", "eval"):
            self._latest |= {
                name: value
                for name, value in record.items()
                if isinstance(value, int | float) and name not in ("step", "time")
            }
        if record.get("kind") == "eval" and EVALUATED in record:
            self.evaluated[record["step"]] = record[EVALUATED]

    def write_progress(self) -> None:
        """Rewrite ``progress.json``: step, phase and the latest value of each figure."""
        progress = {
            "step": self._step,
            "total_steps": self._config.env.total_steps,
            "phase": self._phase,
            "time": round(time.time(), 3),
            "latest": self._latest,
        }
        write_private(self._progress_path, json.dumps(progress, allow_nan=False))

    def close(self) -> bool:
        """Close the file and finish the W&B run, which uploads what is left.

        Returns:
            Whether W&B is done. When its service is gone it would try again for hours: it gets
            :data:`WANDB_FINISH_SECONDS`; its files stay, for ``wandb sync``.
        """
        os.close(self._descriptor)
        seconds = _finish_seconds()
        is_done = self._wandb.close(seconds)
        if not is_done:
            logger.warning(
                "Weights & Biases has not taken everything within %.0f s; `wandb sync --no-skip-online` on "
                "the folders in %s does it later.",
                seconds,
                self._path.parent / "wandb",
            )
        return is_done


def _finish_seconds() -> float:
    text = os.environ.get(WANDB_FINISH_VARIABLE)
    try:
        seconds = WANDB_FINISH_SECONDS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if 0.0 <= seconds <= WANDB_FINISH_MOST_SECONDS:
        return seconds
    allowed = min(seconds, WANDB_FINISH_MOST_SECONDS) if seconds > 0.0 else WANDB_FINISH_SECONDS
    logger.warning(
        "%s is %r, which is not a number of seconds from 0 to %.0f; %.0f is taken.",
        WANDB_FINISH_VARIABLE,
        text,
        WANDB_FINISH_MOST_SECONDS,
        allowed,
    )
    return allowed
