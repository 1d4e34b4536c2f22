"""How a benchmark reports: ``name value goal reached|missed``, a line a number."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass
class Report:
    """Collects the lines of one benchmark and prints each as it comes."""

    missed: list[str] = field(default_factory=list)

    def at_most(self, name: str, value: float, goal: float, unit: str = "") -> None:
        """A figure that must not be larger than ``goal``."""
        self._print(name, value, f"<={goal:g}", value <= goal, unit)

    def at_least(self, name: str, value: float, goal: float, unit: str = "") -> None:
        """A figure that must not be smaller than ``goal``."""
        self._print(name, value, f">={goal:g}", value >= goal, unit)

    def note(self, name: str, value: float, unit: str = "") -> None:
        """A figure without a goal."""
        print(f"{name} {value:.4g}{unit} - -", flush=True)

    def _print(self, name: str, value: float, goal: str, reached: bool, unit: str) -> None:
        if not reached:
            self.missed.append(name)
        print(f"{name} {value:.4g}{unit} {goal}{unit} {'reached' if reached else 'missed'}", flush=True)

    def close(self) -> None:
        """Exit 1 when a goal was missed."""
        if self.missed:
            print(f"missed: {', '.join(self.missed)}", file=sys.stderr)
            sys.exit(1)
