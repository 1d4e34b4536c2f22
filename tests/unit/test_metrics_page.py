"""What a user loses if this fails: a documentation of metrics that tells what is really recorded."""

from __future__ import annotations

import re
from pathlib import Path

from hermes_rl.config.metric_schema import METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def table() -> str:
    """The page's table, as it must be for the schema as it is."""
    lines = ["", "| record | metric | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| {metric.kind} | `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join([*lines, ""])


def test_the_page_lists_every_metric_of_the_schema() -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = re.search(r"<!-- metrics:begin -->(.*)<!-- metrics:end -->", page, re.DOTALL)
    assert written is not None
    assert written[1] == table(), f"docs/metrics.md should hold:\n{table()}"


def test_every_figure_the_trainer_computes_is_in_the_schema() -> None:
    sources = Path(__file__).resolve().parents[2] / "src" / "hermes_rl" / "trainer"
    names = {metric.name for metric in METRICS}
    written: set[str] = set()
    for file in ("statistics.py", "loop.py", "batches.py", "sampling.py"):
        text = (sources / file).read_text(encoding="utf-8")
        written |= set(re.findall(r'figures\["([a-z_]+)"\]', text))
    assert written - names == set()
