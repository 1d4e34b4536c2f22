"""Real searches on the embedded model: what early stopping saves, a peer, noise, and a planted difference.

Parts of ``benchmarks.search`` that train: they take minutes each and run only when they are named
(``python -m benchmarks.search --only real-asha``). The peer is Optuna with TRL's ``GRPOTrainer``
(``benchmarks/search_peers/optuna_trl.py``) in an environment of its own, doing the same trials.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine import peers_python
from benchmarks.measuring import REPOSITORY, fresh_workspace
from benchmarks.reporting import Report
from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.config.profiles import EMBEDDED_LORA_ALPHA, embedded_model_dir
from hermes_rl.engine.registry import list_engines
from hermes_rl.search.objective import Objective
from hermes_rl.search.presets import PRESETS
from hermes_rl.search.ranking import candidates
from hermes_rl.search.replication import evaluate_replicates
from hermes_rl.search.store import SearchStore
from hermes_rl.search.trial import TrialRecord

ACCURACY = Objective()
GRID = ("--preset", "article-grid", "--replicate", "0")
"""The article's 27 trials and no more, as the peer runs them."""
STEPS, STEPS_PER_EVAL, GROUP_SIZE, EVALUATED, MAX_TOKENS = 50, 25, 8, 256, 512
"""The embedded profile's; the peer is given the same."""
PEER_HALVES: tuple[dict[str, list[Any]], ...] = (
    {"learning_rate": [0.00004], "batch_size": [16, 32, 64], "lora_rank": [16]},
    {"learning_rate": [0.00004], "batch_size": [16, 32, 64], "lora_rank": [64]},
)
"""What is run unless asked for everything; a trial costs the same at any learning rate."""


@dataclass(frozen=True)
class Searched:
    """One search that ended.

    Attributes:
        seconds: from the shell command to its end.
        processor: processor seconds of its runs, the engine and itself.
        records: every trial.
    """

    seconds: float
    processor: float
    records: list[TrialRecord]

    @property
    def steps(self) -> int:
        """Optimizer steps of all trials."""
        return sum(record.steps_taken for record in self.records)

    @property
    def best(self) -> TrialRecord:
        """The best completed trial."""
        return candidates(self.records, ACCURACY)[0]


def search(workspace: Workspace, *options: str) -> Searched:
    """Run ``hermes-rl search start`` to its end, showing what it says."""
    started = time.monotonic()
    print(f"\n$ hermes-rl search start {' '.join(options)}    # load {_load()}", flush=True)
    command = [sys.executable, "-m", "hermes_rl", "search", "start", *options]
    with subprocess.Popen([*command, "--workspace", str(workspace.root)]) as process:
        watch = ProcessorWatch(workspace)
        while process.poll() is None:
            watch.look(process.pid)
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"the search ended with {process.returncode}")
    seconds = time.monotonic() - started
    return Searched(seconds, sum(watch.spent.values()), SearchStore.open(workspace, "last").records())


class ProcessorWatch:
    """Adds up the processor time of a workspace's processes, looking now and then.

    Attributes:
        spent: process → seconds since it was first seen; from its beginning for a process of a run.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.spent: dict[int, float] = {}
        self._before = {
            engine.address.pid: _processor(engine.address.pid) for engine in list_engines(workspace)
        }

    def look(self, *others: int) -> None:
        """Look again."""
        pids = [engine.address.pid for engine in list_engines(self._workspace)]
        for run in runs.list_runs(self._workspace):
            if not run.is_final:
                processes = runs.status(self._workspace, run.run_id).processes
                pids += [process.pid for process in processes if process.pid]
        for pid in (*pids, *others):
            with contextlib.suppress(psutil.Error):
                self.spent[pid] = _processor(pid) - self._before.get(pid, 0.0)


def _processor(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def early_stopping(report: Report) -> None:
    """The article's grid in full, and again with each kind of ASHA."""
    with fresh_workspace() as workspace:
        full = search(workspace, *GRID)
        for pruner in ("asha", "promote"):
            stopped = search(workspace, *GRID, "--pruner", pruner)
            _compare(report, pruner, full, stopped)


def _compare(report: Report, pruner: str, full: Searched, stopped: Searched) -> None:
    best, found = full.best, stopped.best
    report.note("real/full_grid_winner", best.value or 0.0)
    report.note(f"real/{pruner}_winner", found.value or 0.0)
    report.note(f"real/{pruner}_share_of_full_grid_seconds", stopped.seconds / full.seconds)
    report.at_most(f"real/{pruner}_share_of_full_grid_steps", stopped.steps / full.steps, 0.40)
    error = best.standard_error or 1.0
    behind = ((best.value or 0.0) - (found.value or 0.0)) / error
    report.at_most(f"real/{pruner}_winner_behind_full_winner", behind, 1.0, "se")
    again = next((r.value for r in full.records if r.params == found.params and r.value is not None), None)
    if again is not None:
        report.note(
            f"real/{pruner}_winner_in_the_full_grid_behind", ((best.value or 0.0) - again) / error, "se"
        )


def against_peers(report: Report, python: str | None, whole: bool, threads: int) -> None:
    """Optuna with TRL and this project over the article's grid, in turn.

    Args:
        report: where the figures go.
        python: of the peers' environment; None makes one.
        whole: all 27 trials of the peer; else six of them, half before and half after our grid, scaled to 27.
            Ours are always all 27.
        threads: of the peer's torch.
    """
    chosen = python or peers_python()
    grid = PRESETS["article-grid"]["space"]
    trials = math.prod(len(values) for values in grid.values())
    parts = [dict(grid)] if whole else list(PEER_HALVES)
    peer: list[dict[str, Any]] = []
    with fresh_workspace() as workspace:
        start_up = _peer(chosen, parts[0], threads, peer)
        full = search(workspace, *GRID)
        for part in parts[1:]:
            _peer(chosen, part, threads, peer)
        stopped = search(workspace, *GRID, "--pruner", "asha")
    scaled = "" if whole else "_scaled"
    total = start_up + statistics.fmean(t["seconds"] for t in peer) * trials
    report.note(f"peers/optuna_trl_grid_seconds{scaled}", total, "s")
    report.note("peers/grid_seconds", full.seconds, "s")
    report.note("peers/grid_with_asha_seconds", stopped.seconds, "s")
    report.at_most("peers/grid_share_of_optuna_trl", full.seconds / total, 1 / 3)
    report.at_most("peers/grid_with_asha_share_of_optuna_trl", stopped.seconds / total, 1 / 5)
    report.note(
        "peers/optuna_trl_processor_seconds_a_trial", statistics.fmean(t["processor"] for t in peer), "s"
    )
    report.note("peers/processor_seconds_a_trial", full.processor / len(full.records), "s")
    report.note("peers/processor_seconds_a_trial_with_asha", stopped.processor / len(stopped.records), "s")
    report.note("peers/optuna_trl_mean_accuracy", statistics.fmean(t["values"][str(STEPS)] for t in peer))
    values = [record.value for record in full.records if record.value is not None]
    report.note("peers/mean_accuracy", statistics.fmean(values))


def _peer(python: str, grid: dict[str, list[Any]], threads: int, trials: list[dict[str, Any]]) -> float:
    """Run the peer over a grid, add its trials, and return the seconds before its first one."""
    train, evaluated = questions(2048, EVALUATED)
    work = {
        "model": str(embedded_model_dir()),
        "grid": grid,
        "train": train,
        "evaluated": evaluated,
        "steps": STEPS,
        "steps_per_eval": STEPS_PER_EVAL,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "lora_alpha": EMBEDDED_LORA_ALPHA,
        "threads": threads,
        "pruner": "none",
    }
    print(f"\nOptuna and TRL over {grid}, {threads} threads    # load {_load()}", flush=True)
    before = 0.0
    for line in _output(python, json.dumps(work)):
        told = json.loads(line)
        if "trial" in told:
            trials.append(told["trial"])
            print(f"{told['trial']}    # load {_load()}", flush=True)
        else:
            before = told["before"]
    return before


def _output(python: str, work: str) -> Iterator[str]:
    """Lines of JSON that the peer prints."""
    script = str(Path(__file__).parent / "search_peers" / "optuna_trl.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(work)
            process.stdin.close()
            yield from (line for line in process.stdout if line.startswith('{"'))
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"the peer's search failed:\n{errors.read()[-4000:]}")


def questions(train: int, evaluated: int) -> tuple[list[list[str]], list[list[str]]]:
    """Questions and answers of the arithmetic environment: to train on, and the very ones it evaluates."""
    sys.path.append(str(REPOSITORY / "tinker-atropos" / "tinker_atropos" / "environments"))
    from arithmetic_tinker import draw, is_held_out  # pyright: ignore

    def drawn(rng: random.Random, held_out: bool) -> Iterator[list[str]]:
        while True:
            question = draw(rng, 2, "+-")
            if is_held_out(question.text) == held_out:
                yield [question.text, str(question.answer)]

    to_train = drawn(random.Random(0), False)
    to_evaluate: dict[str, list[str]] = {}
    for pair in drawn(random.Random("arithmetic_tinker evaluation"), True):
        to_evaluate.setdefault(pair[0], pair)
        if len(to_evaluate) == evaluated:
            break
    return [next(to_train) for _ in range(train)], list(to_evaluate.values())


def honesty(report: Report) -> None:
    """One real search where nothing can be found, one with a difference that separate runs have shown."""
    for name, options, wanted in (
        ("no_winner_in_noise", NOISE, "not distinguishable"),
        ("planted_difference_found", PLANT, "better"),
    ):
        with fresh_workspace(REPOSITORY / "benchmarks" / "environments") as workspace:
            records = search(workspace, *options, "--replicate", "3", "--replicate-top", "1").records
        replication = evaluate_replicates(records, ACCURACY)
        assert replication is not None
        assert replication.difference is not None
        report.note(f"real/{name}_difference", replication.difference.mean)
        report.at_least(f"real/{name}", float(replication.difference.verdict == wanted), 1.0)


NOISE = (
    "-e",
    "arithmetic_coin_flip",
    "--space",
    "learning_rate=1e-5,2e-5,4e-5,8e-5",
    "--set",
    "total_steps=25",
)
PLANT = ("-e", "arithmetic_planted", "--space", "marking=coin,answer", "--space", "learning_rate=2e-5,4e-5")
