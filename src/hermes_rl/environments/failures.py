"""Counting what goes wrong in an environment, and when it is too much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hermes_rl.environments.loading import describe
from hermes_rl.errors import EnvironmentFailedError

log = logging.getLogger("hermes_rl.environments")

_TRACEBACKS_PER_PLACE = 3


class FailureCount:
    """Failures in a row, by a limit that ends the run.

    Args:
        limit: failures in a row that are too many.
        timeout_limit: the same for time-outs, each of which has cost a whole ``worker_timeout``.
        report: called with (where, error in one line) for each failure.
    """

    def __init__(self, limit: int, timeout_limit: int, report: Callable[[str, str], None]) -> None:
        self._limit = limit
        self._timeout_limit = timeout_limit
        self._report = report
        self._in_a_row = 0
        self._timeouts_in_a_row = 0
        self._tracebacks: dict[str, int] = {}
        self.too_many: asyncio.Future[EnvironmentFailedError] = asyncio.get_running_loop().create_future()

    def success(self) -> None:
        """Something worked: the row starts anew."""
        self._in_a_row = 0
        self._timeouts_in_a_row = 0

    def note(self, where: str, error: BaseException | str, *, timeout: bool = False) -> None:
        """Count one failure.

        Args:
            where: the method that failed.
            error: what it raised, or what is wrong with what it returned.
            timeout: whether it took too long.
        """
        text = error if isinstance(error, str) else describe(error)
        seen = self._tracebacks[where] = self._tracebacks.get(where, 0) + 1
        if isinstance(error, BaseException) and seen <= _TRACEBACKS_PER_PLACE:
            log.error("%s failed: %s", where, text, exc_info=error)
        else:
            log.error("%s failed: %s", where, text)
        self._report(where, text)
        self._in_a_row += 1
        self._timeouts_in_a_row += timeout
        if self.too_many.done():
            return
        if self._in_a_row >= self._limit or self._timeouts_in_a_row >= self._timeout_limit:
            times = "once" if self._in_a_row == 1 else f"{self._in_a_row} times in a row"
            self.too_many.set_result(EnvironmentFailedError(f"{where} failed {times}. Last: {text}."))
