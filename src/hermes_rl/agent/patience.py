"""Work that may take longer than a caller waits. Runs in the caller's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def within(seconds: float | None, work: Callable[[], Result], name: str) -> Result | None:
    """The result of some work, None when it is not there in time; the work goes on all the same.

    Args:
        seconds: longest time to wait; None waits until it is there.
        work: may raise, which the caller sees if it still waits, and the log otherwise.
        name: of the thread that works.
    """
    if seconds is None:
        return work()
    results: list[Result] = []
    errors: list[Exception] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, else logged
            errors.append(error)
            if given_up.is_set():
                logger.warning("%s: %s", name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    given_up.set()
    if errors:
        raise errors[0]
    return results[0] if results else None
