"""From ``run start`` to the first optimizer step, with and without a running engine, and a run's memory."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.measuring import MemoryWatch, fresh_workspace
from benchmarks.reporting import Report
from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.engine.registry import list_engines

ENVIRONMENT = "arithmetic_tinker"


def seconds_to_first_step(workspace: Workspace) -> tuple[float, str]:
    """Seconds from the shell command until the first train record, and the run's id."""
    import subprocess
    import sys

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


def process_ids(workspace: Workspace, run_id: str) -> list[int]:
    """Processes of a run: its own, the engines it uses, and the server they were forked off."""
    of_run = [process.pid for process in runs.status(workspace, run_id).processes if process.pid]
    engines = [engine.address.pid for engine in list_engines(workspace)]
    servers = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "hermes_rl.runs.forkserver" in (process.info["cmdline"] or []) and process.ppid() == 1
    ]
    return [pid for pid in {*of_run, *engines, *servers} if psutil.pid_exists(pid)]


def main() -> None:
    report = Report()
    with fresh_workspace() as workspace:
        seconds, run_id = seconds_to_first_step(workspace)
        report.at_most("first_step/engine_cold", seconds, 15.0, "s")
        with MemoryWatch(process_ids(workspace, run_id)) as memory:
            runs.wait(workspace, run_id)
        report.at_most("peak_memory_of_a_run", memory.peak_bytes / 1e9, 2.5, "GB")
        seconds, run_id = seconds_to_first_step(workspace)
        report.at_most("first_step/engine_warm", seconds, 6.0, "s")
        runs.wait(workspace, run_id)
    report.close()


if __name__ == "__main__":
    main()
