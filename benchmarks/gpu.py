"""Every measurement of the engine on a GPU, in under eight minutes: ``python -m benchmarks.gpu``.

The same code as ``benchmarks.engine`` with ``--device cuda``, at 1 M, 30 M and 600 M parameters. Without a
GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.engine import Setting, measure, peers_python
from benchmarks.reporting import Report

BUDGET_S = 480.0
LAST_START_S = 300.0
"""A size is only begun if it is certain to end within the budget."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", help="python of an environment with trl; 'none' leaves the peers out")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    peers = None if options.peers == "none" else options.peers or peers_python()
    report = Report()
    begin = time.monotonic()
    for size in ("small", "medium", "large"):
        if time.monotonic() - begin > LAST_START_S:
            print(f"{size} left out: it might not end within {BUDGET_S:.0f} s", file=sys.stderr)
            continue
        measure(report, Setting(size, "cuda", peers=peers))
    report.note("gpu seconds", time.monotonic() - begin, " s")
    report.close()


if __name__ == "__main__":
    main()
