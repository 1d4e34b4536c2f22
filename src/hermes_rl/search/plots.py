"""The figures of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
import plotly.graph_objects as go

from hermes_rl.search.objective import Objective
from hermes_rl.search.population import schedule
from hermes_rl.search.promotion import rung_levels
from hermes_rl.search.ranking import tuned
from hermes_rl.search.space import Choice, Parameter, format_params, format_value, same_value
from hermes_rl.search.summary import Summary
from hermes_rl.search.trial import TrialRecord

_LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "height": 460,
    "margin": {"l": 60, "r": 30, "t": 30, "b": 50},
    "hoverlabel": {"align": "left"},
}
_LEAST_FOR_IMPORTANCE = 6
_MANY_TRIALS, _LEVELS_OF_MANY = 200, 7
"""With more trials than this the trees of the functional ANOVA stop at so many levels, 128 leaves."""
_MOST_BINS = 30
_MOST_LINES = 60
"""With more trials than this their curves are one line in the legend, but for the best and the default."""
_BEST, _DEFAULT = "#1a7f37", "#2f6fde"


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Attributes:
        title, caption: what it shows.
        div: HTML that needs plotly.js on the page.
    """

    title: str
    caption: str
    div: str


def _figure(title: str, caption: str, figure: go.Figure, **layout: Any) -> Figure:
    figure.update_layout(**{**_LAYOUT, **layout})
    div = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return Figure(title, caption, div)


def all_figures(summary: Summary) -> list[Figure | None]:
    """Every figure for which there is data; in place of some that are looked for, why there is none yet."""
    modelled = comparable(summary)
    shares = importances(summary, modelled)
    few = "Not shown yet: it takes two completed trials."
    no_importance = Figure("Importance", _why_no_importance(summary, modelled), "")
    return [
        learning_curves(summary),
        replicates(summary),
        parallel_coordinates(summary) or Figure("Parallel coordinates", few, ""),
        importance(shares, modelled) or no_importance,
        slices(summary) or Figure("Slices", few, ""),
        contour(summary, shares, modelled) or Figure("Contour", no_importance.caption, ""),
        history(summary),
        schedules(summary),
        early_stopping(summary),
        pareto(summary),
        cost(summary),
    ]


def _label(record: TrialRecord) -> str:
    kind = " (default)" if record.is_default else ""
    return f"trial {record.trial}{kind}: {format_params(record.params)}"


def _shade(record: TrialRecord, summary: Summary) -> tuple[str, float]:
    """Colour and width of a trial's line."""
    if record is summary.best:
        return _BEST, 3.0
    if record.is_default:
        return _DEFAULT, 3.0
    return {"pruned": "#d4a72c", "failed": "#cf222e", "diverged": "#cf222e"}.get(record.state, "#9aa4af"), 1.2


def learning_curves(summary: Summary) -> Figure | None:
    """The objective's curve of every trial."""
    metric = summary.objectives[0].metric
    figure = go.Figure()
    ordered = sorted(tuned(summary.records), key=lambda r: _shade(r, summary)[1])
    lines: dict[str, list[TrialRecord]] = {}
    for record in ordered:
        alone = len(ordered) <= _MOST_LINES or record is summary.best or record.is_default
        name = f"trial {record.trial}" + (" (default)" if record.is_default else "")
        if record.points(metric):
            lines.setdefault(name if alone else f"{record.state} trials", []).append(record)
    for name, records in lines.items():
        colour, width = _shade(records[0], summary)
        points = [(r, point) for r in records for point in [*r.points(metric), None]]  # None: a gap
        figure.add_scatter(
            x=[None if point is None else point.step for _, point in points],
            y=[None if point is None else point.value for _, point in points],
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": width},
            marker={"size": 4},
            hovertext=[_label(record) for record, _ in points],
            hovertemplate="%{hovertext}<br>step %{x}: %{y:.3f}<extra></extra>",
        )
    if not figure.data:
        return None
    figure.update_xaxes(title="optimizer steps")
    figure.update_yaxes(title=metric)
    caption = "Green is the best trial, blue the default configuration, yellow was stopped early."
    return _figure("Learning curves", caption, figure)


def _completed(summary: Summary) -> list[TrialRecord]:
    return [ranked.record for ranked in summary.ranked if ranked.rank is not None]


def _axis(parameter: Parameter, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """One axis of the parallel coordinates: choices evenly spaced, logarithmic ranges by exponent."""
    name = parameter.name
    if isinstance(parameter, Choice):
        values: list[Any] = list(parameter.values)
        values += [
            r.params[name] for r in records if name in r.params and not parameter.contains(r.params[name])
        ]
        unique: list[Any] = []
        for value in values:
            if not any(same_value(value, seen) for seen in unique):
                unique.append(value)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in unique):
            unique.sort()
        at = [
            next((i for i, v in enumerate(unique) if name in r.params and same_value(v, r.params[name])), -1)
            for r in records
        ]
        ticks = {"tickvals": list(range(len(unique))), "ticktext": [format_value(v) for v in unique]}
        return {"label": name, "values": at, **ticks}
    values = [float(r.params.get(name, parameter.low)) for r in records]
    if not parameter.log:
        return {"label": name, "values": values}
    exponents = [math.log10(v) for v in values]
    low, high = min(exponents), max(exponents)
    marks = [low + (high - low) * i / 4 for i in range(5)]
    return {
        "label": name,
        "values": exponents,
        "tickvals": marks,
        "ticktext": [format_value(float(f"{10**mark:.3g}")) for mark in marks],
    }


def parallel_coordinates(summary: Summary) -> Figure | None:
    """Every completed trial as a line over its parameters and its objective."""
    records = _completed(summary)
    if len(records) < 2:
        return None
    objective = summary.objectives[0]
    values = [r.value or 0.0 for r in records]
    dimensions = [_axis(p, records) for p in summary.file.definition.build_space().parameters]
    dimensions.append({"label": str(objective), "values": values})
    figure = go.Figure(
        go.Parcoords(
            line={
                "color": values,
                "colorscale": "Viridis",
                "showscale": True,
                "reversescale": objective.direction == "min",
            },
            dimensions=dimensions,
        )
    )
    return _figure(
        "Parallel coordinates",
        "Drag along an axis to keep only the trials in that range.",
        figure,
        margin={"l": 90, "r": 30, "t": 60, "b": 30},  # the axes' names stand above them
    )


def slices(summary: Summary) -> Figure | None:
    """The objective against each parameter on its own."""
    from plotly.subplots import make_subplots

    records = _completed(summary)
    parameters = summary.file.definition.build_space().parameters
    if len(records) < 2:
        return None
    figure = make_subplots(rows=1, cols=len(parameters), shared_yaxes=True)
    for column, parameter in enumerate(parameters, start=1):
        shown = [r for r in records if parameter.name in r.params]
        choice = isinstance(parameter, Choice)
        figure.add_scatter(
            x=[format_value(r.params[parameter.name]) if choice else r.params[parameter.name] for r in shown],
            y=[r.value for r in shown],
            mode="markers",
            marker={"size": 8, "opacity": 0.7, "color": [_shade(r, summary)[0] for r in shown]},
            error_y={"array": [r.standard_error or 0.0 for r in shown], "thickness": 0.6, "color": "#c3cad2"},
            hovertext=[_label(r) for r in shown],
            hovertemplate="%{hovertext}<br>%{y:.3f}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
        if choice:
            numbers = all(isinstance(v, int | float) for v in parameter.values)
            values = sorted(parameter.values, key=float) if numbers else parameter.values  # type: ignore[arg-type]
            figure.update_xaxes(
                type="category",
                categoryorder="array",
                categoryarray=[format_value(v) for v in values],
                row=1,
                col=column,
            )
        elif parameter.log:
            figure.update_xaxes(type="log", tickformat="~e", nticks=5, row=1, col=column)
        figure.update_xaxes(title=parameter.name, row=1, col=column)
    figure.update_yaxes(title=str(summary.objectives[0]), row=1, col=1)
    return _figure(
        "Slices", "One point a completed trial; bars are one standard error of the evaluation.", figure
    )


@dataclass(frozen=True)
class Comparable:
    """Trials inside the space whose values can be compared with each other.

    Attributes:
        points: each with its value.
        what: which they are, in words.
    """

    points: list[tuple[TrialRecord, float]]
    what: str


def comparable(summary: Summary) -> Comparable:
    """The completed trials; where early stopping left too few, what more of them were worth at one step.

    Last values of trials that were stopped at different steps would say how far a trial came more than how
    good it is. So the step is the last that at least half of the trials reached, and all count with their
    values there.
    """
    done = [(r, r.value) for r in _completed(summary) if r.stage != "default" and r.value is not None]
    if len(done) < _LEAST_FOR_IMPORTANCE:
        metric = summary.objectives[0].metric
        trials = [r for r in tuned(summary.records) if r.stage in ("search", "refine")]
        at: dict[int, list[tuple[TrialRecord, float]]] = {}
        for record in trials:
            for point in record.points(metric):
                if point.step > 0 and math.isfinite(point.value):
                    at.setdefault(point.step, []).append((record, point.value))
        enough = max(_LEAST_FOR_IMPORTANCE, len(trials) / 2)
        steps = [step for step, points in at.items() if len(points) >= enough]
        if steps:
            step = max(steps)
            what = f"the {metric} of {len(at[step])} trials at step {step}, as only {len(done)} completed"
            return Comparable(at[step], what)
    return Comparable(done, "the completed trials")


def _why_no_importance(summary: Summary, modelled: Comparable) -> str:
    if summary.file.definition.strategy == "pbt":
        return "Not shown: a member's value comes from all that its weights went through, not its fields."
    if len(summary.names) < 2:
        return "Not shown: only one field is searched."
    if len(modelled.points) < _LEAST_FOR_IMPORTANCE:
        return (
            f"Not shown yet: it takes {_LEAST_FOR_IMPORTANCE} trials with a value at the same step; there "
            f"are {len(modelled.points)}."
        )
    return "Not shown: all values are the same."


def _as_study(summary: Summary, modelled: Comparable) -> optuna.Study | None:
    """Comparable trials as a study in memory; None when they are too few."""
    space = summary.file.definition.build_space()
    objective = summary.objectives[0]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if objective.direction == "max" else "minimize")
    for record, value in modelled.points:
        params = space.snap(record.params)
        distributions = {p.name: p.distribution() for p in space.parameters if p.name in params}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    return study if len(study.trials) >= _LEAST_FOR_IMPORTANCE else None


def importances(summary: Summary, modelled: Comparable | None = None) -> dict[str, float]:
    """Share of the objective's variance that each parameter explains.

    Functional ANOVA (Hutter et al., 2014), or PED-ANOVA (Watanabe et al., 2023) without scikit-learn.

    Empty with too few trials, with only one parameter, or where nothing differs.
    """
    if summary.file.definition.strategy == "pbt":
        return {}  # a member's value comes from all that its weights went through, not from its last fields
    study = _as_study(summary, modelled or comparable(summary))
    if study is None or len(summary.names) < 2 or len({trial.value for trial in study.trials}) < 2:
        return {}
    try:
        depth = 64 if len(study.trials) <= _MANY_TRIALS else _LEVELS_OF_MANY
        evaluator: Any = optuna.importance.FanovaImportanceEvaluator(max_depth=depth, seed=0)
        return optuna.importance.get_param_importances(study, evaluator=evaluator)
    except ImportError:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study, evaluator=evaluator)


def importance(shares: Mapping[str, float], modelled: Comparable) -> Figure | None:
    """How much each parameter matters."""
    if not shares:
        return None
    names = list(shares)[::-1]
    figure = go.Figure(go.Bar(x=[shares[name] for name in names], y=names, orientation="h"))
    figure.update_xaxes(title="share of the variance explained", range=[0, 1])
    caption = f"Functional ANOVA on {modelled.what}. With few trials a ranking more than a measurement."
    return _figure("Importance", caption, figure)


def contour(
    summary: Summary, shares: Mapping[str, float], modelled: Comparable | None = None
) -> Figure | None:
    """The objective over the two most important parameters."""
    if len(shares) < 2:
        return None
    modelled = modelled or comparable(summary)
    first, second = list(shares)[:2]
    parameters = {p.name: p for p in summary.file.definition.build_space().parameters}
    points = [(r, value) for r, value in modelled.points if first in r.params and second in r.params]
    if not points:
        return None
    records = [record for record, _ in points]
    axes = [_axis(parameters[name], records) for name in (first, second)]
    cells: dict[tuple[float, float], list[float]] = {}
    for x, y, (_, value) in zip(*(_in_bins(axis["values"]) for axis in axes), points, strict=True):
        cells.setdefault((x, y), []).append(value)
    means = [sum(values) / len(values) for values in cells.values()]
    figure = go.Figure()
    if len({x for x, _ in cells}) > 1 and len({y for _, y in cells}) > 1:
        figure.add_contour(
            x=[x for x, _ in cells],
            y=[y for _, y in cells],
            z=means,
            colorscale="Viridis",
            connectgaps=True,
            line={"smoothing": 0.8},
        )
    figure.add_scatter(
        x=axes[0]["values"],
        y=axes[1]["values"],
        mode="markers",
        marker={"color": "#ffffff", "size": 7, "line": {"color": "#1b1f24", "width": 1}},
        hovertext=[f"{_label(r)}<br>{value:.3f}" for r, value in points],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )
    for axis, update in zip(axes, (figure.update_xaxes, figure.update_yaxes), strict=True):
        update(title=axis["label"], tickvals=axis.get("tickvals"), ticktext=axis.get("ticktext"))
    caption = (
        f"Of {modelled.what}: the mean at the same or about the same point of the two most important fields; "
        "white dots are the trials."
    )
    return _figure(f"Contour: {first} against {second}", caption, figure)


def _in_bins(values: Sequence[float]) -> Sequence[float]:
    """The values, or where too many differ for a grid, the middles of equal bins that hold them."""
    low, high = min(values), max(values)
    if len(set(values)) <= _MOST_BINS:
        return values
    width = (high - low) / _MOST_BINS
    return [low + (min(int((value - low) / width), _MOST_BINS - 1) + 0.5) * width for value in values]


def replicates(summary: Summary) -> Figure | None:
    """The replicates of the best and of the default, seed by seed."""
    if summary.replication is None:
        return None
    figure = go.Figure()
    for arm in summary.replication.arms:
        seeds = sorted(arm.values)
        figure.add_scatter(
            x=[f"seed {number + 1}" for number in range(len(seeds))],
            y=[arm.values[seed] for seed in seeds],
            error_y={"array": [arm.errors[seed] for seed in seeds], "thickness": 0.8},
            mode="lines+markers",
            name=f"trial {arm.record.trial}" + (" (default)" if arm.record.is_default else ""),
            hovertext=[_label(arm.record)] * len(seeds),
            hovertemplate="%{hovertext}<br>%{y:.3f}<extra></extra>",
        )
    figure.update_yaxes(title=str(summary.objectives[0]))
    caption = (
        "Each seed changes what is sampled, in training and in the evaluation, and the order of the training "
        "items. Which questions an evaluation asks is the environment's to say; the built-in ones "
        "ask the same whatever the seed. Lines compare like with like."
    )
    return _figure("Replicates, seed by seed", caption, figure)


def history(summary: Summary) -> Figure | None:
    """The objective in the order in which trials ended, and the best so far; not of a population."""
    if summary.file.definition.strategy == "pbt":
        return None
    objective = summary.objectives[0]
    records = sorted(_completed(summary), key=lambda r: (r.ended_at or 0.0, r.trial))
    if len(records) < 2:
        return None
    steps, spent = [], 0
    for record in records:
        spent += record.step
        steps.append(spent)
    best = _running_best([r.value or 0.0 for r in records], objective)
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[r.value for r in records],
        mode="markers",
        name="trial",
        marker={"color": [_shade(r, summary)[0] for r in records], "size": 8},
        hovertext=[_label(r) for r in records],
        hovertemplate="%{hovertext}<br>%{y:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=steps, y=best, mode="lines", name="best so far", line={"shape": "hv", "color": _BEST}
    )
    figure.update_xaxes(title="optimizer steps of completed trials")
    figure.update_yaxes(title=str(objective))
    return _figure("History", "How the best value grew with the training that was paid for.", figure)


def _running_best(values: Sequence[float], objective: Objective) -> list[float]:
    best: list[float] = []
    for value in values:
        best.append(value if not best or objective.sign * (value - best[-1]) > 0 else best[-1])
    return best


def schedules(summary: Summary) -> Figure | None:
    """What each member of a population was trained with, segment by segment."""
    from plotly.subplots import make_subplots

    best = summary.best_member
    parameters = summary.file.definition.build_space().parameters
    if best is None:
        return None
    figure = make_subplots(rows=len(parameters), cols=1, shared_xaxes=True)
    members = [r for r in tuned(summary.records) if r.segment is not None and r is not best]
    for record in [*members, best]:
        parts = schedule(record, summary.records)
        colour, width = (_BEST, 3.0) if record is best else ("#9aa4af", 1.2)
        for row, parameter in enumerate(parameters, start=1):
            shown = [part for part in parts if parameter.name in part]
            values = [part[parameter.name] for part in shown]
            figure.add_scatter(
                x=[step for part in shown for step in (part["from_step"], part["to_step"])],
                y=[value for value in values for _ in range(2)],
                mode="lines",
                line={"color": colour, "width": width},
                hovertemplate=f"trial {record.trial}<br>step %{{x}}: %{{y}}<extra></extra>",
                showlegend=False,
                row=row,
                col=1,
            )
            logarithmic = not isinstance(parameter, Choice) and parameter.log
            figure.update_yaxes(
                title=parameter.name,
                **({"type": "log", "tickformat": "~e", "nticks": 5} if logarithmic else {}),
                row=row,
                col=1,
            )
    figure.update_xaxes(title="optimizer steps", row=len(parameters), col=1)
    caption = "Each line follows a member's weights back to their beginning. Green is the best member."
    return _figure("Schedules", caption, figure, height=120 + 200 * len(parameters))


def early_stopping(summary: Summary) -> Figure | None:
    """How far each trial came."""
    if summary.file.definition.pruner == "none":
        return None
    records = [r for r in summary.records if r.stage != "replicate"]
    figure = go.Figure(
        go.Bar(
            x=[r.trial for r in records],
            y=[r.step for r in records],
            marker={"color": [_shade(r, summary)[0] for r in records]},
            hovertext=[f"{_label(r)}<br>{r.state}" for r in records],
            hovertemplate="%{hovertext}<br>%{y} steps<extra></extra>",
        )
    )
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title="optimizer steps taken")
    promotes = summary.file.definition.pruner == "promote"
    levels = _levels(summary) if promotes else []
    passed = [
        (r, level) for r in records for level in levels[: r.rung] if not r.is_default and r.step > level
    ]
    for level in levels:
        figure.add_hline(y=level, line={"color": "#9aa4af", "width": 1, "dash": "dash"})
    if passed:
        figure.add_scatter(
            x=[record.trial for record, _ in passed],
            y=[level for _, level in passed],
            mode="markers",
            marker={"symbol": "triangle-up", "size": 11, "color": "#1b1f24"},
            hovertext=[_label(record) for record, _ in passed],
            hovertemplate="%{hovertext}<br>promoted past step %{y}<extra></extra>",
        )
    figure.update_layout(showlegend=False)
    if not promotes:
        return _figure("Early stopping", "Yellow trials were stopped early.", figure)
    caption = "Dashed lines are the rungs at which trials wait; a triangle is a promotion past one."
    return _figure("Early stopping and promotion", f"Yellow trials were stopped early. {caption}", figure)


def _levels(summary: Summary) -> list[int]:
    """The rungs, from the first step at which a trial was left waiting."""
    definition = summary.file.definition
    waited = [r.step for r in summary.records if r.state in ("paused", "pruned") and r.rung == 0 and r.step]
    total = max((r.total_steps or 0 for r in summary.records), default=0)
    first = definition.rungs or min(waited, default=None)
    return [] if first is None else rung_levels(first, definition.reduction_factor, total)


def cost(summary: Summary) -> Figure | None:
    """What each trial and replicate cost: steps, trained tokens, seconds."""
    from plotly.subplots import make_subplots

    records = [r for r in summary.records if r.step]
    if not records:
        return None
    rows: tuple[tuple[str, list[float | None]], ...] = (
        ("optimizer steps", [r.steps_taken for r in records]),
        ("trained tokens", [r.tokens for r in records]),
        ("seconds", [round(r.seconds, 1) for r in records]),
    )
    figure = make_subplots(rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (title, values) in enumerate(rows, start=1):
        figure.add_bar(
            x=[r.trial for r in records],
            y=values,
            marker={"color": [_shade(r, summary)[0] for r in records]},
            hovertext=[_label(r) + (" (replicate)" if r.stage == "replicate" else "") for r in records],
            hovertemplate="%{hovertext}<br>%{y}<extra></extra>",
            showlegend=False,
            row=row,
            col=1,
        )
        figure.update_yaxes(title=title, row=row, col=1)
    figure.update_xaxes(title="trial", row=len(rows), col=1)
    caption = "Of each trial and replicate; seconds are wall time beside whatever ran at the same time."
    return _figure("Cost of each trial", caption, figure, height=560)


def pareto(summary: Summary) -> Figure | None:
    """The first two objectives against each other."""
    records = _completed(summary)
    if len(summary.objectives) < 2 or not records:
        return None
    front = sorted(summary.front, key=lambda r: (r.values or [0.0])[1])
    figure = go.Figure()
    for shown, name, mode, colour in (
        (records, "trial", "markers", "#9aa4af"),
        (front, "Pareto front", "lines+markers", _BEST),
    ):
        figure.add_scatter(
            x=[(r.values or [0.0, 0.0])[1] for r in shown],
            y=[(r.values or [0.0])[0] for r in shown],
            mode=mode,
            name=name,
            marker={"color": colour},
            hovertext=[_label(r) for r in shown],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    figure.update_xaxes(title=str(summary.objectives[1]))
    figure.update_yaxes(title=str(summary.objectives[0]))
    return _figure(
        "Pareto front", "No other trial beats these in one objective without losing in another.", figure
    )
