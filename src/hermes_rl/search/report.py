"""The report of a search: one self-contained HTML file, and the same as Markdown, JSON and CSV.

It reads only the search's folder, so it can be written at any time while the search runs.
"""

from __future__ import annotations

import csv
import html
import io
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from hermes_rl.config import without_secrets
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.replication import Replication
from hermes_rl.search.space import format_params
from hermes_rl.search.store import SearchStore, write_atomically
from hermes_rl.search.summary import (
    Summary,
    best_sentence,
    default_sentence,
    summarize,
    table_header,
    table_row,
    train_command,
    verdict_sentences,
    write_best,
    write_schedule,
)
from hermes_rl.search.trial import FINISHED, TrialRecord

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}
code,pre{background:#f2f4f7;border-radius:4px;padding:.1em .3em}
pre{padding:.7em;white-space:pre-wrap;overflow-wrap:anywhere}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25em .7em;border-bottom:1px solid #e3e6ea;text-align:right}th{border-bottom:2px solid #b9c0c9}
td:last-child,th:last-child{text-align:left}.wide{overflow-x:auto}tr.best{background:#e7f6ec}tr.default{background:#eef3fb}
.verdict{border-left:4px solid #2f6fde;padding:.4em 1em;background:#eef3fb}.note{color:#59636e}
"""


def write_report(store: SearchStore) -> Path:
    """Write ``report.html``, ``report.md``, ``results.json``, ``results.csv`` and ``best.yaml``.

    Returns:
        path of ``report.html``.
    """
    summary = summarize(store)
    best_file = write_best(store, summary)
    write_schedule(store, summary)
    write_atomically(store.folder / "report.md", markdown(store, summary, best_file))
    write_atomically(store.folder / "results.json", as_json(store, summary))
    write_atomically(store.folder / "results.csv", as_csv(summary))
    path = store.folder / "report.html"
    write_atomically(path, as_html(store, summary, best_file))
    return path


def sentences(summary: Summary) -> list[str]:
    """What was found, in words."""
    replicates = sum(r.stage == "replicate" and r.state == "completed" for r in summary.records)
    segments = sum(r.segment is not None and r.state == "completed" for r in summary.records)
    trials = summary.count("completed") - replicates - segments
    counted = [
        *([f"{segments} segments of a population completed"] if segments else []),
        f"{trials} {'trial' if trials == 1 else 'trials'} completed",
        *([f"{replicates} replicates of them on fresh seeds"] if replicates else []),
        *(
            f"{summary.count(state)} {words}"
            for state, words in (
                ("pruned", "were stopped early"),
                ("failed", "failed"),
                ("diverged", "diverged"),
                ("running", "are running"),
                ("paused", "wait at a rung"),
                (
                    "stopped",
                    "go on with a larger budget"
                    if summary.state == "completed"
                    else "are to be run again on resume",
                ),
            )
            if summary.count(state)
        ),
    ]
    effort = f"{', '.join(counted)}; {summary.steps} optimizer steps"
    if summary.seconds:
        effort += f" in {format_seconds(summary.seconds)}"
    return [best_sentence(summary), default_sentence(summary), *verdict_sentences(summary), effort + "."]


def format_seconds(seconds: float) -> str:
    """``3 min 20 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def as_json(store: SearchStore, summary: Summary) -> str:
    """The result as JSON."""
    return to_json(as_dict(store, summary), indent=2).decode()


def _shown(definition: SearchDefinition) -> SearchDefinition:
    return definition.model_copy(update={"overrides": without_secrets(definition.overrides)})


def as_dict(store: SearchStore, summary: Summary) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "search_id": store.search_id,
        "state": summary.state,
        "reason": summary.file.reason,
        "definition": _shown(summary.file.definition).model_dump(mode="json"),
        "best": _plain(summary.best),
        "default": _plain(summary.default),
        "default_rank": summary.default_rank,
        "recommended": None if summary.recommended is None else summary.recommended.trial,
        "replication": None if summary.replication is None else _replication(summary.replication),
        "optimism": None if summary.optimism is None else asdict(summary.optimism),
        "steps": summary.steps,
        "seconds": summary.seconds,
        "trials": [{"rank": r.rank, **(_plain(r.record) or {})} for r in summary.ranked],
        "replicates": [_plain(record) for record in summary.records if record.stage == "replicate"],
    }


def _replication(replication: Replication) -> dict[str, Any]:
    return {
        "sentence": replication.sentence,
        "arms": [
            {
                "trial": arm.record.trial,
                "values": arm.values,
                "mean": arm.mean,
                "difference": None if arm.difference is None else asdict(arm.difference),
            }
            for arm in replication.arms
        ],
    }


def _plain(record: TrialRecord | None) -> dict[str, Any] | None:
    return None if record is None else _finite(record.model_dump(mode="json"))


def _finite(value: Any) -> Any:
    """The value with what JSON cannot hold as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def as_csv(summary: Summary) -> str:
    """One line a trial, replicates included."""
    out = io.StringIO()
    objectives = [str(objective) for objective in summary.objectives]
    head = ["rank", "trial", "stage", "state", "is_default", "replicate_of", "seed", "run_id", *summary.names]
    writer = csv.writer(out)
    writer.writerow(
        [*head, *objectives, "standard_error", "eval_count", "step", "tokens", "seconds", "reason"]
    )
    ranks = {ranked.record.trial: ranked.rank for ranked in summary.ranked}
    for r in summary.records:
        writer.writerow(
            [
                *(
                    ranks.get(r.trial),
                    r.trial,
                    r.stage,
                    r.state,
                    r.is_default,
                    r.replicate_of,
                    r.seed,
                    r.run_id,
                ),
                *(r.params.get(name) for name in summary.names),
                *(r.values or [None] * len(objectives)),
                *(r.standard_error, r.eval_count, r.step, r.tokens, round(r.seconds, 3), r.reason),
            ]
        )
    return out.getvalue()


def markdown(store: SearchStore, summary: Summary, best_file: Path | None) -> str:
    """The report without its plots."""
    header = table_header(summary)
    lines = [
        f"# Search {store.search_id}: {summary.file.definition.environment}",
        "",
        "\n\n".join(sentences(summary)),
        "",
    ]
    if best_file is not None:
        lines += ["Train with the best configuration:", "", f"    {train_command(summary, best_file)}", ""]
    if summary.replication is not None:
        lines += ["## Replicates on fresh seeds", "", *_markdown_table(*_replicates(summary.replication)), ""]
    lines += ["## Ranking", ""]
    lines += _markdown_table(header, [table_row(summary, ranked) for ranked in summary.ranked])
    lines += ["", "## Cost", "", *_markdown_table(*_costs(summary))]
    return "\n".join(lines) + "\n"


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _costs(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """What the trials cost, by what became of them."""
    tried = [r for r in summary.records if r.stage != "replicate"]
    kinds = [
        ("completed", [r for r in tried if r.state == "completed"]),
        ("stopped early", [r for r in tried if r.state == "pruned"]),
        ("failed or diverged", [r for r in tried if r.state in ("failed", "diverged")]),
        ("not ended", [r for r in tried if r.state not in FINISHED]),
        ("replicates", [r for r in summary.records if r.stage == "replicate"]),
        ("all", summary.records),
    ]
    rows = []
    for kind, records in kinds:
        if records:
            count, seconds = len(records), sum(r.seconds for r in records)
            steps, tokens = sum(r.steps_taken for r in records), [r.tokens for r in records if r.tokens]
            row = [kind, str(count), str(steps), f"{steps / count:.1f}"]
            row += [f"{sum(tokens):,}", f"{sum(tokens) / count:,.0f}"] if tokens else ["", ""]
            rows.append([*row, f"{seconds:.0f}", f"{seconds / count:.1f}"])
    header = ["trials", "count", "steps", "steps each", "trained tokens", "tokens each", "seconds"]
    return [*header, "seconds each"], rows


def as_html(store: SearchStore, summary: Summary, best_file: Path | None) -> str:
    """The report as one file that needs nothing else, plotly.js included."""
    from plotly.offline import get_plotlyjs

    from hermes_rl.search import plots

    definition = summary.file.definition
    title = f"Search {store.search_id} on {definition.environment}"
    figures = [figure for figure in plots.all_figures(summary) if figure is not None]
    body = [f"<h1>{html.escape(title)}</h1>"]
    if summary.state != "completed":
        body.append(
            f"<p class=note>This search is {summary.state}; the report shows what is there so far.</p>"
        )
    body += [f"<p>{html.escape(sentence)}</p>" for sentence in sentences(summary)]
    if best_file is not None:
        command = html.escape(train_command(summary, best_file))
        body.append(f"<p>Train with the best configuration:</p><pre>{command}</pre>")
        body.append(
            f"<p><code>best.yaml</code>:</p><pre>{html.escape(best_file.read_text(encoding='utf-8'))}</pre>"
        )
    if summary.replication is not None:
        body += ["<h2>Replicates on fresh seeds</h2>", _replicates_table(summary.replication)]
    body += ["<h2>Ranking</h2>", _html_table(summary)]
    body += ["<h2>Cost</h2>", _plain_table(*_costs(summary))]
    for figure in figures:
        body.append(
            f"<h2>{html.escape(figure.title)}</h2><p class=note>{html.escape(figure.caption)}</p>{figure.div}"
        )
    body += [
        "<h2>Definition</h2>",
        f"<pre>{html.escape(_shown(definition).model_dump_json(indent=2, exclude_defaults=True))}</pre>",
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script><body>{''.join(body)}</body></html>"
    )


def _replicates(replication: Replication) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of replicates; the error is the mean's, from the evaluation alone."""
    header = ["trial", "mean", "std. error", "in the search", "seeds", "to the default", "interval"]
    header += ["configuration"]
    rows = []
    for arm in replication.arms:
        difference, errors = arm.difference, list(arm.errors.values())
        error = math.hypot(*errors) / len(errors) if errors and all(errors) else None
        rows.append(
            [
                str(arm.record.trial),
                f"{arm.mean:.3f}",
                "" if error is None else f"± {error:.3f}",
                f"{arm.record.value:.3f}",
                str(len(arm.values)),
                "" if difference is None else f"{difference.mean:+.3f}",
                "" if difference is None else f"{difference.low:+.3f} to {difference.high:+.3f}",
                format_params(arm.record.params) + (" (default)" if arm.record.is_default else ""),
            ]
        )
    return header, rows


def _plain_table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _replicates_table(replication: Replication) -> str:
    header, lines = _replicates(replication)
    head = "".join(f"<th>{name}</th>" for name in header)
    rows = []
    for arm, cells in zip(replication.arms, lines, strict=True):
        kind = "best" if arm.record is replication.recommended else "default" if arm.record.is_default else ""
        rows.append(f"<tr class='{kind}'>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    verdict = f"<p class=verdict>{html.escape(replication.sentence)}</p>"
    return f"{verdict}<div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _html_table(summary: Summary) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table_header(summary))
    rows = []
    for ranked in summary.ranked:
        kind = "best" if ranked.record is summary.best else "default" if ranked.record.is_default else ""
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in table_row(summary, ranked))
        rows.append(f"<tr class='{kind}'>{cells}</tr>")
    note = "<p class=note>The standard error comes from the number of evaluated items alone.</p>"
    return f"<div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div>{note}"
