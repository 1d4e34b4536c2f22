"""Writing for people: consoles, errors, times."""

from __future__ import annotations

import re
import shlex
import sys
from datetime import UTC, datetime, timedelta

from rich.console import Console

from hermes_rl.errors import HermesRLError, RunFailedError

EXIT_RUN_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 130
_COMMAND = re.compile(r"\bhermes-rl(?= (config|engine|environments|mcp|model|run|search)\b)")
_WIDTH_OF_A_PIPE = 200


def output() -> Console:
    """The console on standard output; wide when that is not a terminal, so that nothing is cut."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    return Console(width=width, highlight=False)


def print_error(error: HermesRLError) -> None:
    """Say what was wrong, what is allowed and what to do, on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]Error:[/] ", end="")
    console.print(error.message, markup=False)
    if error.allowed is not None:
        shown = error.allowed
        if isinstance(shown, list | tuple | set):
            shown = ", ".join(str(item) for item in shown)
        console.print("[bold]Allowed:[/] ", end="")
        console.print(str(shown), markup=False)
    if error.hint is not None:
        from hermes_rl.config.invocation import program

        # A hint names commands plainly, because it does not know who reads it.
        hint = re.sub(_COMMAND, lambda _: shlex.quote(program()), error.hint)
        console.print("[bold]Hint:[/] ", end="")
        console.print(hint, markup=False)


def exit_status(error: HermesRLError) -> int:
    """The exit status that tells a failed run from bad input."""
    return EXIT_RUN_FAILED if isinstance(error, RunFailedError) else EXIT_BAD_INPUT


def seconds_text(seconds: float) -> str:
    """A duration: ``0.8 s``, ``42 s``, ``3 min 5 s``, ``2 h 7 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def age_text(moment: datetime) -> str:
    """How long ago a moment was."""
    elapsed = max(timedelta(0), datetime.now(UTC) - moment)
    if elapsed.days >= 2:
        return f"{elapsed.days} d"
    return " ".join(seconds_text(elapsed.total_seconds()).split(" ")[:2])


def number_text(value: float | None, digits: int = 3) -> str:
    """A metric: fixed digits, ``-`` when it was not measured yet."""
    if value is None:
        return "-"
    small = value != 0 and abs(value) < 10**-digits
    return f"{value:.{digits - 1}e}" if small else f"{value:.{digits}f}"
