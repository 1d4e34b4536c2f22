"""A thread that notices when the main thread is stuck, where nothing on the event loop could.

An environment may loop for ever in code that never awaits: at import, in ``setup``, in a rollout. The
event loop then runs no timer and no signal callback. This thread does.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable


class Watchdog:
    """Ends the process when the main thread has been busy with one thing for too long.

    Args:
        give_up: called from the watching thread with what the main thread was busy with and for how long in
            seconds; the process exits with status 1 afterwards.
    """

    def __init__(self, give_up: Callable[[str, float], None]) -> None:
        self._give_up = give_up
        self._where = "start"
        self._since = time.monotonic()
        self._limit = float("inf")
        self._exit_at = float("inf")
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def busy(self, where: str, limit: float) -> None:
        """The main thread now does ``where`` and should be done in ``limit`` seconds."""
        self._where, self._limit, self._since = where, limit, time.monotonic()

    async def beat(self, limit: float) -> None:
        """Show for ever that the event loop turns; it may be blocked for ``limit`` seconds at most."""
        while True:
            self.busy("a call that never awaits", limit)
            await asyncio.sleep(1.0)

    def exit_within(self, seconds: float) -> None:
        """Leave with status 0 after ``seconds``, whatever the main thread does until then."""
        self._exit_at = time.monotonic() + seconds

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            now = time.monotonic()
            if now > self._exit_at:
                os._exit(0)
            if now - self._since > self._limit:
                self._give_up(self._where, now - self._since)
                os._exit(1)
