"""The search itself: its overhead, its honesty, what early stopping saves, and which strategy finds faster.

Everything here replays curves, so that it takes minutes rather than days: computed ones, the runs that
``benchmarks.record_surface`` recorded, or with ``--recorded FOLDER`` the trials of a finished search over the
article's grid (a folder of ``tinker-atropos/searches``) for what early stopping saves. ``--seeds`` sets how
often strategies race.

Parts that train for real (``benchmarks.real_searches``) take ten minutes and more each and run only when they
are named: ``--only real-asha``, ``--only real-honesty``, ``--only peers``.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from benchmarks import real_searches, record_surface
from benchmarks.reporting import Report
from hermes_rl.config import Workspace
from hermes_rl.search.definition import SearchDefinition, define_search
from hermes_rl.search.objective import CurvePoint, Objective
from hermes_rl.search.orchestrator import Orchestrator, create_search
from hermes_rl.search.pruning import make_pruner
from hermes_rl.search.ranking import candidates
from hermes_rl.search.replay import Recording, ReplayTrials, Source, recorded
from hermes_rl.search.replication import evaluate_replicates
from hermes_rl.search.store import SearchStore
from hermes_rl.search.strategy import Strategy
from hermes_rl.search.trial import TrialRecord

ITEMS = 256
DEFAULT: dict[str, Any] = {
    "learning_rate": 0.00004,
    "batch_size": 16,
    "lora_rank": 32,
    "max_batches_offpolicy": 3,
    "total_steps": 48,
    "steps_per_eval": 6,
}
ACCURACY = Objective()


def quality(config: Mapping[str, Any]) -> float:
    """A made-up surface: a ridge in learning rate that moves with the batch size; the rest matters little."""
    best_rate = 0.00005 * math.sqrt(config["batch_size"] / 16)
    rate = math.exp(-((math.log(config["learning_rate"] / best_rate) / 1.1) ** 2))
    batch = {16: 0.0, 32: 0.03, 64: 0.05}[config["batch_size"]]
    rank = -0.01 * abs(math.log2(config["lora_rank"] / 32))
    stale = -0.01 * abs(config["max_batches_offpolicy"] - 2)
    return 0.40 + 0.40 * rate + batch + rank + stale


def training(config: Mapping[str, Any], seed: int) -> Recording:
    """A made-up run on that surface: noise of the seed, noise of the evaluation, speed by learning rate."""
    rng = random.Random(f"{sorted(config.items())} {seed}")
    end = min(0.99, quality(config) + rng.gauss(0, 0.015))
    pace = 10 * (0.00004 / config["learning_rate"]) ** 0.5
    points = []
    for step in range(0, config["total_steps"] + 1, config["steps_per_eval"]):
        chance = 0.35 + (end - 0.35) * (1 - math.exp(-step / pace))
        right = sum(rng.random() < chance for _ in range(ITEMS))
        points.append(CurvePoint(step, right / ITEMS, ITEMS))
    return Recording({"eval_percent_correct": points}, config["total_steps"])


def run_search(
    source: Source, default: Mapping[str, Any] = DEFAULT, tick: float = 1.0, **fields: Any
) -> list[TrialRecord]:
    """The trials of one whole search over replayed runs; without replicates unless they are asked for."""
    fields = {"replicate": 0, **fields}
    with tempfile.TemporaryDirectory() as folder:
        runner = ReplayTrials(source, default, tick=tick)
        store = create_search(Workspace.resolve(folder), define_search(fields), runner)
        Orchestrator(store, runner).run()
        return store.records()


def overhead(report: Report) -> None:
    """Ask, tell, store and report data at 1,000 trials."""

    def instant(config: Mapping[str, Any], seed: int) -> Recording:
        points = [CurvePoint(0, 0.3, ITEMS), CurvePoint(48, quality(config), ITEMS)]
        return Recording({"eval_percent_correct": points}, 48, seconds_per_step=0.01)

    for strategy in ("random", "tpe"):
        started, processor = time.perf_counter(), time.process_time()
        records = run_search(instant, preset="article-random", strategy=strategy, trials=1000, refine=0)
        spent = (time.perf_counter() - started) / len(records) * 1000
        report.at_most(f"search/overhead_{strategy}_1000_trials", spent, 50.0, "ms")
        processor = (time.process_time() - processor) / len(records) * 1000
        report.note(f"search/overhead_{strategy}_1000_trials_processor_time", processor, "ms")


def honesty(report: Report) -> None:
    """Twenty searches over noise, twenty with a planted difference of 0.2."""
    for planted, wanted in ((0.0, "not distinguishable"), (0.2, "better")):
        verdicts = []
        for number in range(20):

            def source(
                config: Mapping[str, Any], seed: int, number: int = number, planted: float = planted
            ) -> Recording:
                rng = random.Random(f"{sorted(config.items())} {seed} {number}")
                best = (config["learning_rate"], config["batch_size"], config["lora_rank"]) == (6e-5, 32, 16)
                end = 0.5 + planted * best + rng.gauss(0, 0.02)
                right = sum(rng.random() < end for _ in range(ITEMS))
                points = [CurvePoint(0, 0.4, ITEMS), CurvePoint(48, right / ITEMS, ITEMS)]
                return Recording({"eval_percent_correct": points}, 48)

            records = run_search(
                source, tick=48.0, preset="article-grid", replicate=3, parallel=27, seed=number
            )
            replication = evaluate_replicates(records, ACCURACY)
            assert replication is not None
            assert replication.difference is not None
            verdicts.append(replication.difference.verdict)
        name = "planted_difference_found" if planted else "no_winner_in_noise"
        report.at_least(f"search/{name}_of_20", float(verdicts.count(wanted)), 18.0)


def early_stopping(report: Report, folder: Path | None) -> None:
    """Steps that ASHA needs, as a part of the full grid's, and how far its winner is behind."""
    sources: list[tuple[Source, dict[str, Any]]] = []
    if folder is not None:
        store = SearchStore(Workspace.resolve(folder.parent.parent), folder.name)
        names = store.load().default_params
        default = {**DEFAULT, **names, "steps_per_eval": _spacing(store.records())}
        default["total_steps"] = max(record.step for record in store.records())
        sources.append((recorded(store.records(), default), default))
    else:
        sources = [(lambda config, seed, n=n: training(config, seed + n), DEFAULT) for n in range(10)]
    shares, behind = [], []
    for number, (source, default) in enumerate(sources * (10 if folder is not None else 1)):
        full = run_search(source, default, preset="article-grid", seed=0)
        stopped = run_search(
            source, default, preset="article-grid", seed=0, pruner="asha", parallel=1 + number % 4
        )
        shares.append(sum(r.step for r in stopped) / sum(r.step for r in full))
        best, found = candidates(full, ACCURACY)[0], candidates(stopped, ACCURACY)[0]
        behind.append(((best.value or 0.0) - (found.value or 0.0)) / (best.standard_error or 1.0))
    report.at_most("search/asha_share_of_full_grid_steps", statistics.fmean(shares), 0.40)
    report.at_most("search/asha_winner_behind_full_winner", statistics.fmean(behind), 1.0, "se")


def _spacing(records: list[TrialRecord]) -> int:
    steps = [point.step for point in records[0].points(ACCURACY.metric)]
    return steps[1] - steps[0]


RACE_TRIALS = 40


@dataclass(frozen=True)
class Surface:
    """What strategies race on.

    Attributes:
        name: as the report calls it.
        space: the space.
        truth: configuration → its accuracy without noise.
        best: the best there is.
    """

    name: str
    space: dict[str, Any]
    truth: Callable[[Mapping[str, Any]], float]
    best: float

    def observe(self, config: Mapping[str, Any], seed: int) -> float:
        """What one run of the configuration would show: noise of the seed and of the evaluation."""
        rng = random.Random(f"{sorted(config.items())} {seed}")
        chance = min(0.99, max(0.01, self.truth(config) + rng.gauss(0, 0.015)))
        return sum(rng.random() < chance for _ in range(ITEMS)) / ITEMS


def computed_surface() -> Surface:
    """The made-up surface, over a wide space of four fields."""
    space = {
        "learning_rate": "log:2e-6..1e-3",
        "batch_size": [16, 32, 64],
        "lora_rank": [8, 16, 32, 64],
        "max_batches_offpolicy": "int:1..4",
    }
    ridge = [
        {
            "learning_rate": 0.00005 * math.sqrt(b / 16) * f,
            "batch_size": b,
            "lora_rank": 32,
            "max_batches_offpolicy": 2,
        }
        for b in (16, 32, 64)
        for f in (0.9, 1.0, 1.1)
    ]
    return Surface("computed", space, quality, max(quality(config) for config in ridge))


def recorded_surface() -> Surface | None:
    """The surface that ``benchmarks.record_surface`` recorded; None where it has not.

    A recorded point has the mean of its runs. Between them the value is the mean over all points, weighted by
    the inverse fourth power of the distance, each field's range being 1 (Shepard, 1968).
    """
    surface = record_surface.read()
    if not surface["runs"]:
        return None
    ranges = {name: (math.log(min(v)), math.log(max(v))) for name, v in surface["grid"].items()}

    def place(config: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple((math.log(config[n]) - low) / (high - low) for n, (low, high) in ranges.items())

    values: dict[tuple[float, ...], list[float]] = {}
    for run in surface["runs"]:
        values.setdefault(place(run["params"]), []).append(run["curve"][-1][1])
    points = {at: statistics.fmean(found) for at, found in values.items()}

    def truth(config: Mapping[str, Any]) -> float:
        here = place(config)
        distances = {at: math.dist(here, at) for at in points}
        nearest = min(distances, key=distances.__getitem__)
        if distances[nearest] < 1e-6:
            return points[nearest]
        weights = {at: distance**-4 for at, distance in distances.items()}
        return sum(weights[at] * points[at] for at in points) / sum(weights.values())

    rates = surface["grid"]["learning_rate"]
    space = {**surface["grid"], "learning_rate": f"log:{min(rates)}..{max(rates)}"}
    return Surface(f"recorded_{len(surface['runs'])}_runs", space, truth, max(points.values()))


def trials_needed(definition: SearchDefinition, surface: Surface) -> int:
    """Trials until one is truly within 2 % of the best; the strategy sees noisy values."""
    default = {name: DEFAULT[name] for name in definition.space}
    pruner = make_pruner(definition, 48, 48)
    strategy = Strategy(definition, definition.build_space(), None, "race", pruner, default, lambda _: None)
    records: list[TrialRecord] = []
    while True:
        proposal = strategy.next(records)
        if proposal is None:
            return RACE_TRIALS + 1
        config = {**DEFAULT, **proposal.params}
        record = TrialRecord(
            trial=len(records),
            stage=proposal.stage,
            params=proposal.params,
            seed=definition.seed,
            state="completed",
            study_number=proposal.study_number,
            values=[surface.observe(config, definition.seed)],
        )
        records.append(record)
        strategy.tell(record)
        if surface.truth(config) >= 0.98 * surface.best:
            return len(records)


def race(report: Report, seeds: int, surface: Surface) -> None:
    """Trials that each strategy needs, over many seeds, printed whatever they say."""
    entries: dict[str, dict[str, Any]] = {
        "random": {"strategy": "random", "trials": RACE_TRIALS},
        "random_refine": {"strategy": "random", "trials": 10, "refine": 3, "refine_rounds": 10},
        "tpe": {"strategy": "tpe", "trials": RACE_TRIALS},
        "gp": {"strategy": "gp", "trials": RACE_TRIALS},
    }
    means: dict[str, float] = {}
    for name, fields in entries.items():
        needed = []
        for seed in range(seeds):
            definition = define_search({"space": surface.space, "parallel": 1, "seed": seed, **fields})
            needed.append(trials_needed(definition, surface))
        means[name] = statistics.fmean(needed)
        key = f"search/{surface.name}/trials_within_2_percent_{name}"
        report.note(f"{key}_median", statistics.median(needed))
        if name == "random":
            report.note(key, means[name])
        else:
            report.at_most(key, means[name], means["random"])


def race_on_recorded(report: Report, seeds: int) -> None:
    """The race on real runs, where they were recorded."""
    surface = recorded_surface()
    if surface is None:
        print("search/recorded: nothing recorded; python -m benchmarks.record_surface", flush=True)
    else:
        race(report, seeds, surface)


REPLAYED = ("overhead", "honesty", "early_stopping", "race", "recorded")
REAL = ("real-asha", "real-honesty", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--only", choices=[*REPLAYED, *REAL])
    parser.add_argument("--peers", help="python of an environment with trl and optuna; else one is made")
    parser.add_argument("--whole", action="store_true", help="with peers: all 27 trials of the peer, not six")
    parser.add_argument("--peer-threads", type=int, default=1, help="of the peer; one is the fastest here")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    report = Report()
    parts = {
        "overhead": lambda: overhead(report),
        "honesty": lambda: honesty(report),
        "early_stopping": lambda: early_stopping(report, arguments.recorded),
        "race": lambda: race(report, arguments.seeds, computed_surface()),
        "recorded": lambda: race_on_recorded(report, arguments.seeds),
        "real-asha": lambda: real_searches.early_stopping(report),
        "real-honesty": lambda: real_searches.honesty(report),
        "peers": lambda: real_searches.against_peers(
            report, arguments.peers, arguments.whole, arguments.peer_threads
        ),
    }
    for name in REPLAYED if arguments.only is None else (arguments.only,):
        parts[name]()
    report.close()


if __name__ == "__main__":
    main()
