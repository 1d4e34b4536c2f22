"""The report: every figure and table that a reader looks for, or the reason why it is not there yet."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.search_simulation import search, training
from typer.testing import CliRunner

from hermes_rl.cli.search import app
from hermes_rl.search.objective import CurvePoint
from hermes_rl.search.plots import all_figures, comparable
from hermes_rl.search.replay import Recording
from hermes_rl.search.report import write_report
from hermes_rl.search.store import SearchStore
from hermes_rl.search.summary import summarize


def paid(config: Mapping[str, Any], seed: int) -> Recording:
    """A run that trains 10 tokens a sequence."""
    recording = training(config, seed)
    tokens = [CurvePoint(step, 10.0 * config["batch_size"]) for step in range(1, recording.total_steps + 1)]
    return replace(recording, curves={**recording.curves, "trained_tokens": tokens})


def sections(store: SearchStore) -> dict[str, str]:
    """Heading → what stands below it, as far as the next."""
    page = write_report(store).read_text(encoding="utf-8").rpartition("</script><body>")
    parts = re.split(r"<h2>(.*?)</h2>", "".join(page))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_search_has_every_section_that_a_reader_looks_for(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, paid, preset="article-grid", replicate=3, parallel=4)
    loop.run()
    found = sections(store)
    assert list(found) == [
        "Replicates on fresh seeds",
        "Ranking",
        "Cost",
        "Learning curves",
        "Replicates, seed by seed",
        "Parallel coordinates",
        "Importance",
        "Slices",
        next(name for name in found if name.startswith("Contour: ")),
        "History",
        "Cost of each trial",
        "Definition",
    ]
    for name, body in found.items():
        assert ("plotly" in body) == (
            name not in ("Replicates on fresh seeds", "Ranking", "Cost", "Definition")
        )
        assert "Not shown" not in body
    assert '"type":"parcoords"' in found["Parallel coordinates"]
    assert '"type":"contour"' in next(body for name, body in found.items() if name.startswith("Contour: "))
    assert '"type":"bar"' in found["Importance"]
    summary = summarize(store)
    shown = [figure for figure in all_figures(summary) if figure is not None]
    assert [figure.title for figure in shown] == [name for name, body in found.items() if "plotly" in body]


@pytest.mark.parametrize("pruner", ["asha", "promote"])
def test_early_stopping_leaves_no_section_out(tmp_path: Path, pruner: str) -> None:
    fields = {"preset": "article-grid", "pruner": pruner, "rungs": 8, "reduction_factor": 4, "parallel": 3}
    store, _, loop = search(tmp_path, paid, **fields)
    loop.run()
    summary = summarize(store)
    assert sum(r.state == "completed" for r in summary.records) < 27
    found = sections(store)
    assert "plotly" in found["Importance"]
    assert any(name.startswith("Contour: ") and "plotly" in body for name, body in found.items())
    stopped = found["Early stopping and promotion" if pruner == "promote" else "Early stopping"]
    assert "plotly" in stopped
    if pruner == "promote":
        promoted = [r for r in summary.records if r.rung > 0 and not r.is_default]
        assert promoted
        assert stopped.count("promoted past step") == 1
        assert stopped.count('"dash":"dash"') == 2  # the rungs at steps 8 and 32
        modelled = comparable(summary)
        done = sum(r.state == "completed" and r.stage == "search" for r in summary.records)
        assert done < 6
        assert {r.trial for r, _ in modelled.points} == set(range(27))
        assert "at step 8, as only" in found["Importance"]
        for record, value in modelled.points:
            assert value == next(p.value for p in record.points("eval_percent_correct") if p.step == 8)


def test_what_is_not_shown_yet_says_why(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, space={"batch_size": [16, 32]})
    assert "takes two completed" in sections(store)["Parallel coordinates"]
    loop.run()
    found = sections(store)
    assert "plotly" in found["Parallel coordinates"]
    assert "only one field" in found["Importance"]
    assert "only one field" in found["Contour"]
    store, _, loop = search(tmp_path, space={"batch_size": [16, 32], "lora_rank": [8, 16]})
    loop.run()
    assert "it takes 6 trials" in sections(store)["Importance"]
    store, _, loop = search(
        tmp_path, strategy="pbt", trials=3, segments=2, space={"learning_rate": "log:1e-5..1e-4"}
    )
    assert "weights went through" in sections(store)["Importance"]


def test_what_trials_cost_is_said_in_steps_tokens_and_seconds(tmp_path: Path) -> None:
    store, _, loop = search(
        tmp_path, paid, space={"batch_size": [16, 32, 64]}, replicate=2, pruner="promote", rungs=8
    )
    loop.run()
    records = store.records()
    write_report(store)
    text = (store.folder / "report.md").read_text(encoding="utf-8")
    costs = {row[0]: row[1:] for row in tables(text)["Cost"]}
    for kind, counted in (
        ("completed", [r for r in records if r.state == "completed" and r.stage != "replicate"]),
        ("stopped early", [r for r in records if r.state == "pruned"]),
        ("replicates", [r for r in records if r.stage == "replicate"]),
        ("all", records),
    ):
        steps, tokens = sum(r.step for r in counted), sum(r.tokens or 0 for r in counted)
        assert counted
        assert costs[kind][:2] == [str(len(counted)), str(steps)]
        assert costs[kind][3] == f"{tokens:,}"
        assert costs[kind][5] == f"{sum(r.seconds for r in counted):.0f}"
    with open(store.folder / "results.csv", newline="") as file:
        assert [int(row["tokens"]) for row in csv.DictReader(file)] == [r.tokens for r in records]


def tables(markdown: str) -> dict[str, list[list[str]]]:
    """Heading → rows of the table below it."""
    parts = re.split(r"^## (.*)$", markdown, flags=re.MULTILINE)
    return {
        name: [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in body.split("\n")
            if line[:1] == "|"
        ]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_tables_say_how_uncertain_a_mean_of_replicates_is(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, space={"batch_size": [16, 64]}, replicate=3, replicate_top=1)
    loop.run()
    found = sections(store)
    header, _, *rows = tables((store.folder / "report.md").read_text(encoding="utf-8"))[
        "Replicates on fresh seeds"
    ]
    assert len(rows) == 2
    for row in rows:
        told = dict(zip(header, row, strict=True))
        errors = [
            r.standard_error or 0.0
            for r in store.records()
            if r.stage == "replicate" and r.replicate_of == int(told["trial"])
        ]
        assert len(errors) == 3
        assert told["std. error"] == f"± {sum(error**2 for error in errors) ** 0.5 / 3:.3f}"
        assert told["std. error"] in found["Replicates on fresh seeds"]
    best = summarize(store).best
    assert best is not None
    listed = CliRunner().invoke(app, ["list", "--workspace", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert f"± {best.standard_error:.3f}" in listed
