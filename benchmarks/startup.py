"""From ``run start`` to the first optimizer step, a trial's own start-up, and a run's memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measuring import REPOSITORY, MemoryWatch, fresh_workspace
from benchmarks.noted_trainer import FIRST_REQUEST
from benchmarks.reporting import Report
from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.runs.forking import fork_server
from hermes_rl.runs.store import open_store

ENVIRONMENT = "arithmetic_tinker"
TRIALS = 5
SECONDS_FOR_A_REQUEST = 120.0


def seconds_to_first_step(workspace: Workspace) -> tuple[float, str]:
    """Seconds from the shell command until the first train record, and the run's id."""
    before = {status.run_id for status in runs.list(workspace)}
    started = time.monotonic()
    command = [sys.executable, "-m", "hermes_rl", "run", "start", ENVIRONMENT]
    subprocess.run([*command, "--workspace", str(workspace.root)], check=True, capture_output=True)
    run_id = next(s.run_id for s in runs.list(workspace) if s.run_id not in before)
    metrics = Path(workspace.run_dir(run_id)) / "metrics.jsonl"
    while not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
        time.sleep(0.02)
        status = runs.status(workspace, run_id)
        if str(status.status) in ("failed", "stopped"):
            raise SystemExit(f"run {run_id} ended as {status.status}: {status.reason}")
    return time.monotonic() - started, run_id


def trial_start_up(workspace: Workspace) -> tuple[float, float]:
    """Start a run as a search starts a trial, where engine and fork server are there.

    Returns:
        Until the environment's first request for a completion: seconds of wall time, and seconds of processor
        time of supervisor, API server, trainer, environment and of this process while it starts them.
    """
    began, own = time.monotonic(), time.process_time()
    config = build_run_config(find(workspace.environments_dirs, ENVIRONMENT))
    run_id = runs.start(workspace, config, modules={"trainer": "benchmarks.noted_trainer"})
    own = time.process_time() - own
    note = workspace.run_dir(run_id) / FIRST_REQUEST
    while not note.exists():
        time.sleep(0.002)
        if time.monotonic() - began > SECONDS_FOR_A_REQUEST:
            raise SystemExit(f"run {run_id} asked for nothing: {runs.status(workspace, run_id)}")
    processor = own + sum(processor_seconds(pid) for pid in processes_of(workspace, run_id))
    runs.stop(workspace, run_id)
    return float(note.read_text()) - began, processor


def processes_of(workspace: Workspace, run_id: str) -> list[int]:
    """Supervisor, API server, trainer and environment of a run."""
    store = open_store(workspace.state_url)
    rows = [row.pid for row in store.processes(run_id) if row.role != "engine" and row.pid is not None]
    return [store.run(run_id).supervisor_pid, *rows]


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far, and of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(pid).cpu_times()[:4])
    return 0.0


def everything_of(workspace: Workspace) -> Iterator[int]:
    """Every process that the runs of a workspace need at this moment, without their children.

    The command that starts a run, supervisors, the runs' processes, engines and the fork server.
    """
    yield from (child.pid for child in psutil.Process().children())
    for status in runs.list(workspace):
        if not status.is_final:
            yield from processes_of(workspace, status.run_id)
    yield from (engine.address.pid for engine in list_engines(workspace))
    server = fork_server()
    for process in psutil.process_iter(["cmdline"]):
        if server is not None and str(server.path) in (process.info["cmdline"] or []):
            yield process.pid


def main() -> None:
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # the fork server must find the noting trainer
    report = Report()
    with fresh_workspace() as workspace:
        seconds, run_id = seconds_to_first_step(workspace)
        report.at_most("first_step/engine_cold", seconds, 15.0, "s")
        runs.wait(workspace, run_id)
        seconds, run_id = seconds_to_first_step(workspace)
        report.at_most("first_step/engine_warm", seconds, 6.0, "s")
        runs.wait(workspace, run_id)

        started = [trial_start_up(workspace) for _ in range(TRIALS)]
        wall, processor = (statistics.median(figures) for figures in zip(*started, strict=True))
        report.at_most("trial_start_up/wall", wall, 2.0, "s")
        report.at_most("trial_start_up/processor", processor, 2.0, "s")

        for engine in list_engines(workspace):
            stop_engine(workspace, engine.key)
        os.environ["HERMES_BENCHMARK"] = "memory"  # another environment: a fork server of its own, cold
        with MemoryWatch(lambda: everything_of(workspace)) as memory:
            _, run_id = seconds_to_first_step(workspace)
            runs.wait(workspace, run_id)
        report.at_most("peak_memory_of_a_run", memory.peak_bytes / 1e9, 2.5, "GB")
    report.close()


if __name__ == "__main__":
    main()
