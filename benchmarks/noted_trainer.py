"""The trainer of a run, which also notes when its environment first asks for a completion.

Runs in the TRAINER process of a run that :mod:`benchmarks.startup` starts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hermes_rl.config import write_private
from hermes_rl.trainer import process

FIRST_REQUEST = "first_request"
"""File in the run's folder: when the request came, on the machine's monotonic clock."""
_ASKED_FOR = ("/completions", "/generate")


class Noting:
    """An ASGI application that notes the first request for a completion and passes all on."""

    def __init__(self, app: Any, note: Path) -> None:
        self._app = app
        self._note = note
        self._noted = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._noted and scope["type"] == "http" and scope["path"].endswith(_ASKED_FOR):
            self._noted = True
            write_private(self._note, str(time.monotonic()))
        await self._app(scope, receive, send)


def main() -> int:
    """As the trainer's own."""
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    build = process.build_app

    def build_noting(*arguments: Any) -> Any:
        return Noting(build(*arguments), run_dir / FIRST_REQUEST)

    process.build_app = build_noting
    return process.main()
