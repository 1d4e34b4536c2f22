"""Every measurement of the engine on a GPU: ``python -m benchmarks.gpu``.

The same code as ``benchmarks.engine`` with ``--device cuda``, at 1 M, 30 M and 600 M parameters, a process a
size. What has not ended within eight minutes is ended and counts as missed. Without a GPU it says so and
exits 0.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

from benchmarks.engine import peers_python
from benchmarks.measuring import REPOSITORY
from benchmarks.reporting import Report

BUDGET_S = 480.0
STOP_S = 15.0
"""How long a measurement may take to end its engine once it has been told to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="python of an environment with trl; 'none' leaves the peers out")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    peers = options.peers or peers_python()
    report = Report()
    begin = time.monotonic()
    for size in ("small", "medium", "large"):
        left = BUDGET_S - STOP_S - (time.monotonic() - begin)
        status = measured(size, peers, left) if left > 0 else None
        if status is None:
            print(f"{size} - - missed: not measured within {BUDGET_S:.0f} s", flush=True)
        if status != 0:
            report.missed.append(size)
    report.note("gpu seconds", time.monotonic() - begin, " s")
    report.close()


def measured(size: str, peers: str, seconds: float) -> int | None:
    """Print the figures of one size. Returns the exit status, or None if it had to be ended."""
    command = [sys.executable, "-m", "benchmarks.engine", "--device", "cuda", "--size", size]
    process = subprocess.Popen([*command, "--peers", peers], cwd=REPOSITORY)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # as Ctrl-C does: it ends its engine on the way
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


if __name__ == "__main__":
    main()
