"""Records a surface of real runs of the embedded model: configuration → accuracy, for races of strategies.

``python -m benchmarks.record_surface --minutes 15`` adds runs to ``benchmarks/data/surface.json`` until the
time is up, the points are done or Ctrl-C; called again it goes on with the next point. The points of the grid
are visited in an order in which any beginning is spread over the whole grid, each once before any twice.
``--max-load`` waits while the machine is busy with something else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measuring import evaluations, finished_run, fresh_workspace
from hermes_rl.config import Workspace

FILE = Path(__file__).resolve().parent / "data" / "surface.json"
ENVIRONMENT = "arithmetic_tinker"
GRID: dict[str, list[Any]] = {
    "learning_rate": [1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4],
    "batch_size": [16, 32, 64],
    "lora_rank": [8, 16, 32, 64],
}
FIXED: dict[str, Any] = {"total_steps": 40, "steps_per_eval": 20, "num_requests_for_eval": 256}


def points(repeats: int) -> list[tuple[dict[str, Any], int]]:
    """Configurations and seeds, in the order in which they are run."""
    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    ordered: list[tuple[dict[str, Any], int]] = []
    for seed in range(repeats):
        shuffled = sorted(grid, key=lambda point: json.dumps(point))
        random.Random(seed).shuffle(shuffled)
        ordered += [(point, seed) for point in _spread(shuffled)]
    return ordered


def _spread(shuffled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same points, each next one the farthest from those before it."""
    chosen, rest = shuffled[:1], shuffled[1:]
    while rest:
        farthest = max(rest, key=lambda point: min(_distance(point, other) for other in chosen))
        chosen.append(farthest)
        rest.remove(farthest)
    return chosen


def _distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Distance on the grid, each side of it as long as the others."""
    return sum(
        ((values.index(left[name]) - values.index(right[name])) / (len(values) - 1)) ** 2
        for name, values in GRID.items()
    )


def read(path: Path = FILE) -> dict[str, Any]:
    """The recorded surface; an empty one where nothing was recorded.

    Returns:
        ``environment``, ``fixed``, ``grid`` and ``runs``: each with ``params``, ``seed``, ``curve``
        (step, share correct, items), ``tokens`` and ``seconds``.
    """
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {"environment": ENVIRONMENT, "fixed": FIXED, "grid": GRID, "runs": []}


def write(surface: dict[str, Any], path: Path = FILE) -> None:
    """Write the surface, a line a run."""
    head = {name: value for name, value in surface.items() if name != "runs"}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in surface["runs"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="begin no run after that")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each point, on different seeds")
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time")
    parser.add_argument("--max-load", type=float, help="begin a run only below this load average")
    parser.add_argument("--file", type=Path, default=FILE)
    arguments = parser.parse_args()
    surface = read(arguments.file)
    done = {(json.dumps(run["params"]), run["seed"]) for run in surface["runs"]}
    todo = [
        (params, seed) for params, seed in points(arguments.repeats) if (json.dumps(params), seed) not in done
    ]
    queue, begun, lock = iter(todo), time.monotonic(), threading.Lock()

    def record(workspace: Workspace) -> None:
        while time.monotonic() - begun < arguments.minutes * 60:
            while arguments.max_load is not None and os.getloadavg()[0] > arguments.max_load:
                time.sleep(5)
            with lock:
                params, seed = next(queue, (None, 0))
            if params is None:
                return
            run = _run(workspace, surface, params, seed)
            with lock:
                surface["runs"].append(run)
                write(surface, arguments.file)
                print(
                    f"{len(surface['runs']):>4}  {params} seed {seed}: {run['curve'][-1][1]:.3f}  "
                    f"{run['seconds']:.0f} s",
                    flush=True,
                )

    with fresh_workspace() as workspace, ThreadPoolExecutor(arguments.parallel) as pool:
        for recorder in [pool.submit(record, workspace) for _ in range(arguments.parallel)]:
            recorder.result()


def _run(workspace: Workspace, surface: dict[str, Any], params: dict[str, Any], seed: int) -> dict[str, Any]:
    """Run a point to its end; its line of the file."""
    begun = time.monotonic()
    records = finished_run(workspace, surface["environment"], {**surface["fixed"], **params}, seed=seed)
    curve = [[step, round(value, 6), round(items)] for step, value, items in evaluations(records)]
    tokens = round(sum(r.get("trained_tokens", 0) for r in records if r["kind"] == "train"))
    seconds = round(time.monotonic() - begun, 1)
    return {"params": params, "seed": seed, "curve": curve, "tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # every run that ended is in the file
        main()
