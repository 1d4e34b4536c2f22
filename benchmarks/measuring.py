"""What several benchmarks need: a workspace of their own, runs in it, the memory of a run's processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find

REPOSITORY = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def fresh_workspace(*environment_dirs: Path) -> Iterator[Workspace]:
    """A workspace in a temporary folder, whose engines are stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        os.environ["HERMES_RL_ENVIRONMENTS"] = os.pathsep.join(str(path) for path in environment_dirs)
        workspace = Workspace.resolve(folder)
        try:
            yield workspace
        finally:
            for engine in list_engines(workspace):
                stop_engine(workspace, engine.key)


def start_run(
    workspace: Workspace, environment: str, overrides: Mapping[str, Any] | None = None, *, seed: int = 0
) -> str:
    """Start a run on the embedded model; returns its id."""
    found = find(workspace.environments_dirs, environment)
    config = build_run_config(found, overrides=overrides, seed=seed)
    return runs.start(workspace, config)


def finished_run(
    workspace: Workspace, environment: str, overrides: Mapping[str, Any] | None = None, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Run to the end and return its metric records."""
    run_id = start_run(workspace, environment, overrides, seed=seed)
    status = runs.wait(workspace, run_id)
    if str(status.status) != "completed":
        raise SystemExit(f"run {run_id} ended as {status.status}: {status.reason}")
    return runs.read_metrics(workspace, run_id)


def evaluations(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Step, share correct and number of items of each evaluation, by step."""
    found = [
        (record["step"], record["eval_percent_correct"], record.get("eval_count", 0.0))
        for record in records
        if record["kind"] == "eval"
    ]
    return sorted(found)


@dataclass
class MemoryWatch:
    """Samples the memory of process trees until it is stopped.

    Attributes:
        roots: gives the processes to look at; asked each time, as they come and go.
        peak_bytes: largest sum seen of the processes' proportional (or, where that is unknown, resident)
            memory.
    """

    roots: Callable[[], Iterable[int]]
    peak_bytes: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self.peak_bytes = max(self.peak_bytes, self._now())
            time.sleep(0.2)

    def _now(self) -> int:
        seen: dict[int, int] = {}
        for root in self.roots():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root)
                for one in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        info = one.memory_full_info()
                        seen[one.pid] = getattr(info, "pss", info.rss)
        return sum(seen.values())
