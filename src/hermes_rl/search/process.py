"""The process of a detached search: drives one search to its end; talks to its runs and to nobody else.

Started by ``hermes-rl search start --detach`` as ``python -m hermes_rl.search.process``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from hermes_rl.config import Workspace
from hermes_rl.errors import HermesRLError
from hermes_rl.search.drive import drive
from hermes_rl.search.orchestrator import Snapshot
from hermes_rl.search.space import format_params
from hermes_rl.search.trial import TrialRecord


class _LogView:
    """A line in the log for every trial that ends."""

    def tick(self, snapshot: Snapshot) -> None:
        pass

    def finished(self, record: TrialRecord, snapshot: Snapshot) -> None:
        print(
            f"trial {record.trial} {format_params(record.params)} {record.state} {record.values}", flush=True
        )


def main() -> int:
    """Drive the search named on the command line; SIGTERM stops it cleanly."""
    parser = argparse.ArgumentParser(prog="hermes_rl.search.process")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--search", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        drive(Workspace.resolve(arguments.workspace), arguments.search, _LogView())
    except KeyboardInterrupt:
        return 0
    except HermesRLError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
