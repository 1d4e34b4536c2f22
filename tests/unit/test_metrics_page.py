"""What a user loses if this fails: a documentation of metrics that tells what is really recorded."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
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


def test_a_metric_is_described_once() -> None:
    counted = Counter((metric.kind, metric.name) for metric in METRICS)
    assert [name for name, count in counted.items() if count > 1] == []


def figures_in(tree: ast.AST) -> Iterator[str]:
    """Names of figures: ``figures["x"] = …``, and keys of dicts that are returned or become ``figures``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "figures":
                    yield from _constant(target.slice)
            if any(ast.unparse(target) == "figures" for target in targets) and isinstance(
                node.value, ast.Dict
            ):
                yield from (name for key in node.value.keys for name in _constant(key))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            yield from (name for key in node.value.keys for name in _constant(key))


def _constant(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_every_figure_the_trainer_computes_is_in_the_schema() -> None:
    """``tests/integration/test_wandb.py`` looks at those that a run has recorded."""
    sources = Path(__file__).resolve().parents[2] / "src" / "hermes_rl" / "trainer"
    written: set[str] = set()
    for file in ("statistics.py", "loop.py", "batches.py", "sampling.py"):
        written |= set(figures_in(ast.parse((sources / file).read_text(encoding="utf-8"))))
    # One of each way in which they are written.
    assert {"entropy", "empty_batch", "reward_mean", "sampled_tokens", "groups", "seconds"} <= written
    assert written - {metric.name for metric in METRICS if metric.kind == "train"} == set()
