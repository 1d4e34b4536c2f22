"""Taking what an environment logs to W&B, with or without W&B.

Environments call ``wandb.init`` and ``wandb.log``. In the runner's process both are replaced: nothing is
sent, nothing prompts, and every number is kept. What is logged during an evaluation belongs to it; the
rest is training log. The trainer is the one process that mirrors metrics to W&B.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hermes_rl.environments.pinning import evaluated_step

_TRAINING_KEYS = ("train/", "train_perf/", "server/")


class MetricCapture:
    """Receives logged metrics and sorts them.

    Args:
        on_training: called with the numbers of every training log.

    Attributes:
        prefix: what ``BaseEnv.wandb_log`` puts before its keys (``wandb_prepend`` and ``_``); stripped.
    """

    def __init__(self, on_training: Callable[[dict[str, float]], None]) -> None:
        self.prefix = ""
        self._on_training = on_training
        self._evaluation: dict[str, float] | None = None

    def log(self, data: Mapping[str, Any]) -> None:
        """Take one ``wandb.log`` call."""
        training: dict[str, float] = {}
        for key, value in numeric(data).items():
            name = key.removeprefix(self.prefix)
            if self._evaluation is not None and self._belongs_to_evaluation(name):
                self._evaluation[name] = value
            else:
                training[name] = value
        if training:
            self._on_training(training)

    @contextmanager
    def evaluation(self) -> Iterator[dict[str, float]]:
        """While it is open, what is logged about the evaluation is put in the dict it gives."""
        found: dict[str, float] = {}
        self._evaluation = found
        try:
            yield found
        finally:
            self._evaluation = None

    def _belongs_to_evaluation(self, name: str) -> bool:
        if name.startswith(_TRAINING_KEYS):
            return False
        # The training loop may log beside an evaluation and pick up what evaluate() has just stored.
        return evaluated_step.get() is not None or name.startswith("eval")


def numeric(data: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers in what was logged; nested mappings are joined with a dot, as W&B does."""
    found: dict[str, float] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(numeric(value, f"{name}."))
            continue
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if isinstance(value, numbers.Real) and math.isfinite(value):
            found[name] = float(value)
    return found


class CapturedRun:
    """Stands where a W&B run would: takes logs, keeps config and summary, ignores the rest.

    Args:
        capture: where logged metrics go.
    """

    def __init__(self, capture: MetricCapture) -> None:
        self._capture = capture
        self.id = self.name = "captured"
        self.project = self.group = self.entity = self.url = ""
        self.step = 0
        self.config: Any = _Settings()
        self.summary: Any = _Settings()

    def log(self, data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """As ``wandb.Run.log``."""
        self._capture.log(data)

    def __enter__(self) -> CapturedRun:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing


class _Settings(dict[str, Any]):
    """A dict with attribute access, as W&B's config and summary have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _nothing(*_: Any, **__: Any) -> None:
    return None


def install(capture: MetricCapture) -> None:
    """Replace this process's ``wandb.init``, ``wandb.log`` and what else would reach for a server."""
    import wandb

    run = CapturedRun(capture)

    def init(*_: Any, **__: Any) -> CapturedRun:
        wandb.run = run  # type: ignore[assignment]
        return run

    replaced: dict[str, Any] = {"init": init, "log": run.log, "login": lambda *_, **__: True}
    for name in ("finish", "save", "watch", "unwatch", "define_metric", "alert", "log_artifact", "teardown"):
        replaced[name] = _nothing
    for name, value in replaced.items():
        setattr(wandb, name, value)
    wandb.run = run  # type: ignore[assignment]
    wandb.config = run.config
    wandb.summary = run.summary
