"""What is killed, flooded, fuzzed and filled, and what comes of it.

``python -m benchmarks.reliability [PART…] [--rounds N] [--fuzz-seconds S]``; parts: ``kills``, ``load``,
``store`` and ``fuzz``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import REPOSITORY, evaluations, finished_run, fresh_workspace, start_run
from benchmarks.reporting import Report
from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.process_identity import is_alive
from hermes_rl.runs.store import open_store, utc_now
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.store import SearchStore
from hermes_rl.search.trial import CurveRows, TrialRecord

STEPS = 12
SHORT = {"total_steps": STEPS, "save_checkpoint_interval": 3, "steps_per_eval": 0}
ENVIRONMENT = "arithmetic_tinker"
ROLES = ("supervisor", "api", "trainer", "env", "engine")
CLIENTS, GROUPS_EACH, BATCH = 64, 12, 64
FINISHED_RUNS, TRIALS = 200, 1000


def pid_of(workspace: Workspace, run_id: str, role: str) -> int:
    """The process of a run that plays ``role``."""
    store = open_store(workspace.state_url)
    if role == "supervisor":
        return store.run(run_id).supervisor_pid
    return next(row.pid for row in store.processes(run_id) if row.role == role)


def kill_once(workspace: Workspace, role: str, moment: int) -> tuple[float, bool, bool, float]:
    """Kill one process of a run that has taken ``moment`` steps, and resume the run.

    Returns:
        Seconds until the status was true, whether a process was left, whether the resumed run completed with
        every step once, and the share correct of its last evaluation.
    """
    run_id = start_run(workspace, ENVIRONMENT, SHORT)
    while True:
        status = runs.glance(workspace, run_id)
        if status.status == "running" and status.step >= moment:
            break
        if status.is_final:
            raise SystemExit(f"run {run_id} ended as {status.status}: {status.reason}")
        time.sleep(0.02)
    rows = [row for row in open_store(workspace.state_url).processes(run_id) if row.role != "engine"]
    os.kill(pid_of(workspace, run_id, role), signal.SIGKILL)
    killed = time.monotonic()
    runs.wait(workspace, run_id, timeout=30)
    seconds = time.monotonic() - killed
    left = any(is_alive(row.pid, row.mark) for row in rows)
    runs.resume(workspace, run_id)
    status = runs.wait(workspace, run_id, timeout=300)
    records = runs.read_metrics(workspace, run_id)
    lines = (workspace.run_dir(run_id) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"kind": "train"' in line]
    whole = status.status == "completed" and steps == list(range(1, STEPS + 1))
    return seconds, left, whole, evaluations(records)[-1][1]


def kills(report: Report, rounds: int) -> None:
    """SIGKILL each process at random moments."""
    with fresh_workspace() as workspace:
        undisturbed = [
            evaluations(finished_run(workspace, ENVIRONMENT, SHORT, seed=seed))[-1][1] for seed in range(2)
        ]
        report.note("undisturbed/eval_percent_correct", statistics.mean(undisturbed))
        for role in ROLES:
            moments = [random.Random(f"{role} {number}").randint(0, STEPS - 4) for number in range(rounds)]
            outcomes = [kill_once(workspace, role, moment) for moment in moments]
            report.at_most(f"killed/{role}/seconds_to_truth", max(o[0] for o in outcomes), 10.0, "s")
            report.at_most(f"killed/{role}/processes_left", sum(o[1] for o in outcomes), 0)
            report.at_least(f"killed/{role}/resumed_every_step_once", sum(o[2] for o in outcomes), rounds)
            found = statistics.mean(o[3] for o in outcomes)
            apart = abs(found - statistics.mean(undisturbed))
            report.at_most(f"killed/{role}/evaluation_apart", apart, 0.1)


def group(env_id: int, number: int) -> bytes:
    """One group of eight sequences of about a hundred tokens."""
    tokens = [[env_id, number, row, *range(100)] for row in range(8)]
    content = {"tokens": tokens, "masks": tokens, "scores": [float(row % 2) for row in range(8)]}
    return json.dumps(content | {"env_id": env_id}).encode()


def load(report: Report) -> None:
    """As many environments as fit, posting at once, with retries, to a trainer that takes batches."""
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address.json"
        command = [sys.executable, "-m", "hermes_rl.trajectories.process", "--address-file", str(address)]
        server = subprocess.Popen(command)
        try:
            while not address.exists():
                time.sleep(0.02)
            asyncio.run(_flood(report, json.loads(address.read_text())["url"], psutil.Process(server.pid)))
        finally:
            server.terminate()
            server.wait()


async def _flood(report: Report, url: str, process: psutil.Process) -> None:
    import httpx

    from hermes_rl.trajectories.client import TrajectoriesClient

    seen: Counter[tuple[int, int]] = Counter()
    seconds: list[float] = []
    posting = True
    async with TrajectoriesClient(url) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
        await client.register(
            wandb_group="g", wandb_project="p", batch_size=BATCH, max_token_len=512, checkpoint_dir="",
            save_checkpoint_interval=0, starting_step=0, num_steps=10**6, max_batches_offpolicy=64,
        )  # fmt: skip
        await client.batch(wait=0)
        wanted = {"max_token_length": 512, "desired_name": "e", "weight": 1.0, "group_size": 8}
        ids = [(await http.post("/register-env", json=wanted)).json()["env_id"] for _ in range(CLIENTS)]

        async def environment(env_id: int) -> None:
            for number in range(GROUPS_EACH):
                body, headers = group(env_id, number), {"idempotency-key": f"{env_id}-{number}"}
                for _ in range(1 + (number % 10 == 0)):  # every tenth post is sent again
                    began = time.monotonic()
                    answer = await http.post("/scored_data", content=body, headers=headers)
                    seconds.append(time.monotonic() - began)
                    answer.raise_for_status()

        async def trainer() -> None:
            while True:
                batch = await client.batch(wait=0.2)
                if batch is not None:
                    seen.update((one["env_id"], one["tokens"][0][1]) for one in batch)
                elif not posting:
                    return

        before = process.memory_info().rss
        training = asyncio.create_task(trainer())
        began = time.monotonic()
        await asyncio.gather(*(environment(env_id) for env_id in ids))
        elapsed = time.monotonic() - began
        posting = False
        await training
        state: dict[str, Any] = await client.state()
    groups = state["groups"]
    waiting = groups["queued"] + groups["buffered"]
    lost = CLIENTS * GROUPS_EACH - len(seen) - waiting
    report.note("load/environments", CLIENTS)
    report.note("load/groups_per_second", len(seconds) / elapsed)
    report.at_most("load/post_p99", statistics.quantiles(seconds, n=100)[98], 5.0, "s")
    report.at_most("load/groups_lost", lost, 0)
    report.at_most("load/groups_twice", sum(count - 1 for count in seen.values()), 0)
    report.at_most("load/memory_growth", (process.memory_info().rss - before) / 1e6, 300, "MB")


def store(report: Report) -> None:
    """How long commands take with many finished runs and a large search in the store."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace.resolve(folder)
        for number in range(FINISHED_RUNS):
            finish_run(workspace, f"run-{number:04d}")
        search_id = large_search(workspace)
        goals = {
            ("run", "list"): 1.0,
            ("run", "status", "run-0100"): 1.0,
            ("search", "list"): 1.0,
            ("search", "status", search_id): 1.0,
            ("search", "results", search_id): 10.0,
            ("search", "report", search_id): 10.0,
        }
        for arguments, goal in goals.items():
            seconds, processor = zip(*(timed_command(folder, arguments) for _ in range(5)), strict=True)
            name = f"store/{'_'.join(arguments[:2])}"
            report.at_most(name, statistics.median(seconds), goal, "s")
            report.note(f"{name}/processor", statistics.median(processor), "s")


def timed_command(folder: str, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall and processor seconds of a command on a workspace, its interpreter's start included."""
    command = [sys.executable, "-m", "hermes_rl", *arguments, "--workspace", folder]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, used


def finish_run(
    workspace: Workspace, run_id: str, search_id: str | None = None, trial: int | None = None
) -> None:
    """Put a run into the store as one that has completed."""
    state = open_store(workspace.state_url)
    state.add_run(
        run_id=run_id, environment=ENVIRONMENT, profile="embedded", seed=0, overrides={},
        external_environment=False, total_steps=50, supervisor_pid=1, supervisor_mark="gone",
        search_id=search_id, trial=trial,
    )  # fmt: skip
    roles = ("supervisor", "api", "trainer", "env", "engine")
    state.put_processes(run_id, {role: {"pid": 1, "mark": "gone", "state": "stopped"} for role in roles})
    latest = {"reward_mean": 0.4, "percent_correct": 0.5, "eval_percent_correct": 0.6, "loss": 0.1}
    progress = {"step": 50, "total_steps": 50, "phase": "completed", "latest": latest}
    for target in (runs.RunState.STARTING, runs.RunState.RUNNING, runs.RunState.COMPLETED):
        state.move_run(run_id, target, progress=progress, started_at=utc_now(), ended_at=utc_now())


def large_search(workspace: Workspace) -> str:
    """A completed search of :data:`TRIALS` trials, each a finished run of 50 steps; its id."""
    space = {"learning_rate": "log:1e-6..1e-3", "lora_rank": "8,16,32,64"}
    definition = SearchDefinition.model_validate(
        {"environment": ENVIRONMENT, "strategy": "random", "trials": TRIALS, "space": space}
    )
    searching = SearchStore.create(workspace, definition, {"learning_rate": 4e-5, "lora_rank": 32})
    drawn = random.Random(0)
    for trial in range(TRIALS):
        curves: CurveRows = {
            name: [(step, drawn.random(), None) for step in range(1, 51)]
            for name in ("reward_mean", "percent_correct", "loss")
        }
        curves["eval_percent_correct"] = [(step, drawn.random(), 256) for step in range(0, 51, 5)]
        record = TrialRecord(
            trial=trial, stage="search", seed=0, run_id=f"trial-{trial:04d}", total_steps=50,
            params={"learning_rate": 10 ** drawn.uniform(-6, -3), "lora_rank": drawn.choice([8, 16, 32, 64])},
            started_at=time.time(),
        )  # fmt: skip
        searching.append(record)
        record.state, record.step, record.seconds, record.ended_at = "completed", 50, 60.0, time.time()
        record.values, record.standard_error, record.eval_count = [drawn.random()], 0.03, 256
        record.curves = curves
        searching.append(record)
        finish_run(workspace, f"trial-{trial:04d}", searching.search_id, trial)
    file = searching.load()
    file.state = "completed"
    searching.save(file)
    return searching.search_id


def fuzz(report: Report, seconds: int) -> None:
    """Both servers, from their own descriptions, by schemathesis."""
    for server in ("api_server", "inference"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-s",
                "tests/integration/test_schemathesis.py",
                "-k",
                server,
            ],
            cwd=REPOSITORY,
            env={**os.environ, "HERMES_RL_FUZZ_SECONDS": str(seconds)},
            capture_output=True,
            text=True,
            check=False,
        )
        counted = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        generated, passed = (int(counted[1]), int(counted[2])) if counted else (1, 0)
        report.note(f"fuzz/{server}/requests_in_{seconds}_s", generated)
        report.at_most(f"fuzz/{server}/server_errors_or_hangs", generated - passed + done.returncode, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="kills, load, store, fuzz; all when left out")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each process")
    parser.add_argument("--fuzz-seconds", type=int, default=20, help="for each server")
    options = parser.parse_args()
    report = Report()
    parts = options.parts or ["load", "store", "fuzz", "kills"]
    if "load" in parts:
        load(report)
    if "store" in parts:
        store(report)
    if "fuzz" in parts:
        fuzz(report, options.fuzz_seconds)
    if "kills" in parts:
        kills(report, options.rounds)
    report.close()


if __name__ == "__main__":
    main()
