"""W&B's sweep files as searches, and searches as sweep files.

The format is W&B's "sweep configuration" (docs.wandb.ai/guides/sweeps/sweep-config-keys). What it can say and
this search cannot is refused by name rather than read as something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.config.catalogue import names_secret
from hermes_rl.config.metric_schema import METRICS
from hermes_rl.errors import SearchError
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.objective import Objective
from hermes_rl.search.space import Choice, Range

_METHODS = {"grid": "grid", "random": "random", "bayes": "gp"}
_KEPT = ("program", "command", "name", "description")
"""Keys that say nothing about a search, and stay in a sweep that is created."""
_IGNORED = frozenset({*_KEPT, "project", "entity", "version"})
_STOPPING = ("min_iter", "max_iter", "s", "strict")
"""Keys of W&B's early stopping beside its type and ``eta``."""
_RANGES = ("uniform", "int_uniform", "q_uniform", "log_uniform_values", "log_uniform")
_DISTRIBUTIONS = (
    "constant, categorical, uniform, int_uniform, q_uniform over multiples of a whole q, log_uniform, "
    "log_uniform_values"
)


def is_sweep(fields: Mapping[str, Any]) -> bool:
    """Whether the mapping is a sweep configuration."""
    return "method" in fields and "parameters" in fields


def read_sweep_file(path: Path) -> dict[str, Any]:
    """The fields of a search in a W&B sweep file, for :func:`hermes_rl.search.definition.define_search`.

    Raises:
        SearchError: the file is no sweep configuration, or says what cannot be done here.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SearchError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SearchError(f"{path} is not valid YAML: {error}.") from error
    if not isinstance(data, dict) or not is_sweep(data):
        raise SearchError(
            f"{path} is not a W&B sweep configuration: it has no 'method' and 'parameters'.",
            hint="Searches of our own are TOML files.",
        )
    return from_sweep(data)


def from_sweep(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a search that a sweep configuration describes.

    ``bayes`` is a Gaussian process here as there. A parameter with one value becomes a field set in every
    trial. ``early_terminate`` becomes the pruner ``hyperband``. The configuration itself is kept beside the
    fields: a sweep that is created from it has all that it says.

    Raises:
        SearchError: an unknown key, method or distribution, or a value of the wrong type.
    """
    known = {"method", "metric", "parameters", "early_terminate", "run_cap", *_IGNORED}
    _refuse_others(sweep, known, "The sweep's")
    method = sweep.get("method")
    if not isinstance(method, str) or method not in _METHODS:
        raise SearchError(f"The sweep's method {method!r} is unknown.", allowed=list(_METHODS))
    fields: dict[str, Any] = {"strategy": _METHODS[method], "sweep_method": method, "space": {}}
    fields["sweep_config"] = dict(sweep)
    overrides: dict[str, Any] = {}
    for name, parameter in _mapping(sweep.get("parameters"), "parameters").items():
        kind, value = _read_parameter(str(name), parameter)
        (overrides if kind == "value" else fields["space"])[str(name)] = value
    if overrides:
        fields["overrides"] = overrides
    if sweep.get("metric") is not None:
        fields["objectives"] = [_read_metric(_mapping(sweep["metric"], "metric"))]
    if sweep.get("run_cap") is not None:
        fields["trials"] = sweep["run_cap"]
    if sweep.get("early_terminate") is not None:
        stopping = _mapping(sweep["early_terminate"], "early_terminate")
        _refuse_others(stopping, {"type", "eta", *_STOPPING}, "The sweep's early_terminate:")
        if stopping.get("type") != "hyperband":
            raise SearchError(
                f"The sweep's early_terminate {stopping.get('type')!r} is unknown.", allowed=["hyperband"]
            )
        fields["pruner"] = "hyperband"
        if "eta" in stopping:
            fields["reduction_factor"] = stopping["eta"]
    return fields


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SearchError(f"The sweep's {what} is {value!r}, not a mapping.")
    return value


def _refuse_others(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise SearchError(f"{where} {unknown[0]!r} has no meaning here.", allowed=sorted(known))


def _read_metric(metric: Mapping[str, Any]) -> str:
    """The objective of a sweep's metric, the last value of what a run logs."""
    _refuse_others(metric, {"name", "goal", "target"}, "The sweep's metric:")
    name, goal = metric.get("name"), metric.get("goal", "minimize")
    if not isinstance(name, str) or goal not in ("minimize", "maximize"):
        raise SearchError(
            f"The sweep's metric is {dict(metric)}.", allowed="name, and goal minimize or maximize"
        )
    return f"{name.rpartition('/')[2]}:{'min' if goal == 'minimize' else 'max'}"


def _read_parameter(name: str, parameter: Any) -> tuple[str, Any]:
    """``("value", constant)`` or ``("space", parameter as a TOML file writes it)``."""
    if not isinstance(parameter, Mapping):
        raise SearchError(f"The sweep's parameter {name} is not a mapping.")
    where = f"The sweep's parameter {name}:"
    if "value" in parameter:
        _refuse_others(parameter, {"value", "distribution"}, where)
        return "value", parameter["value"]
    if "values" in parameter:
        _refuse_others(parameter, {"values", "probabilities", "distribution"}, where)
        if not isinstance(parameter["values"], list):
            raise SearchError(f"{where} its values are {parameter['values']!r}, not a list.")
        return "space", list(parameter["values"])
    if parameter.get("distribution", "uniform") not in _RANGES:
        raise SearchError(
            f"{where} it has the distribution {parameter['distribution']!r}.", allowed=_DISTRIBUTIONS
        )
    _refuse_others(parameter, {"min", "max", "distribution", "q"}, where)
    try:
        low, high = parameter["min"], parameter["max"]
    except KeyError as error:
        raise SearchError(
            f"The sweep's parameter {name} has no {error.args[0]!r}.", allowed="value, values, or min and max"
        ) from error
    step = parameter.get("q", 1)
    for number in (low, high, step):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise SearchError(f"{where} {number!r} is not a number.")
    whole = isinstance(low, int) and isinstance(high, int)
    distribution = parameter.get("distribution", "int_uniform" if whole else "uniform")
    if distribution != "q_uniform" and "q" in parameter:
        raise SearchError(f"{where} q belongs to q_uniform.")
    if distribution == "uniform":
        return "space", {"uniform": [low, high]}
    if distribution == "int_uniform":
        return "space", {"int": [low, high]}
    if distribution == "q_uniform":
        # W&B rounds to multiples of q, wherever the range begins.
        if step != int(step) or step < 1 or low % step or high % step:
            raise SearchError(f"{where} min and max are no multiples of a whole q.", allowed=_DISTRIBUTIONS)
        return "space", {"int": [low, high], "step": int(step)}
    if distribution == "log_uniform_values":
        return "space", {"log_uniform": [low, high]}
    try:
        return "space", {"log_uniform": [math.exp(low), math.exp(high)]}
    except OverflowError as error:
        raise SearchError(f"{where} log_uniform has exponents of e, not values.") from error


def check_sweep(definition: SearchDefinition) -> None:
    """Refuse what a search and a sweep cannot both mean, before either exists.

    Raises:
        SearchError: the sweep file asks for what only W&B does, and W&B is not asked; or the search asks of
            the sweep that is to be created what sweeps do not have.
    """
    if definition.strategy == "wandb":
        if definition.sweep is None:
            to_sweep(definition)
            if definition.build_objectives()[0].reduction != "last":
                raise SearchError(
                    f"A W&B sweep goes by the last value of its metric, not by {definition.objectives[0]}.",
                    hint="Name the metric alone, or use a strategy of our own.",
                )
        return
    sweep = definition.sweep_config
    if sweep:
        from_sweep(sweep)
    stopping = (sweep.get("early_terminate") or {}) if definition.pruner == "hyperband" else {}
    only = [f"early_terminate's {name}" for name in _STOPPING[1:] if name in stopping]
    only += [
        f"{name}'s probabilities"
        for name, parameter in (sweep.get("parameters") or {}).items()
        if "probabilities" in parameter
    ]
    only += ["the metric's target"] if "target" in (sweep.get("metric") or {}) else []
    if only:
        raise SearchError(
            f"Only W&B itself can do what the sweep file says: {', '.join(only)}.",
            hint="Use --strategy wandb, or leave it out of the file.",
        )


def sweep_notes(definition: SearchDefinition) -> list[str]:
    """What a search of our own does otherwise than the sweep file that it was read from says, in words."""
    stopping = definition.sweep_config.get("early_terminate") or {}
    if definition.strategy == "wandb" or "min_iter" not in stopping:
        return []
    return [
        f"early_terminate's min_iter ({stopping['min_iter']}) counts values that W&B is sent; here trials "
        "can be stopped from the first rung on, an eighth of a trial (rungs sets it in optimizer steps)."
    ]


def sweep_differences(definition: SearchDefinition) -> list[str]:
    """What the sweep that describes a search leaves out or does otherwise, in words."""
    told = []
    if definition.pruner in ("median", "asha", "promote"):
        told.append(
            f"W&B has no {definition.pruner}, only a hyperband of its own: this sweep stops no run early."
        )
    elif definition.pruner == "hyperband" and "early_terminate" not in definition.sweep_config:
        told.append("min_iter counts values that W&B is sent, not optimizer steps: set it as you need it.")
    if definition.strategy == "tpe":
        told.append("W&B has no TPE: bayes is a Gaussian process.")
    for objective in definition.build_objectives():
        if objective.reduction != "last":
            told.append(f"W&B goes by the last value of the metric: {objective} is ranked otherwise here.")
    for count, name in (
        (definition.refine, "refinement"),
        (definition.replicate, "replicates on fresh seeds"),
        (definition.warm_start, "warm start"),
    ):
        told += [f"A sweep has no {name}."] if count else []
    return told


def to_sweep(definition: SearchDefinition) -> dict[str, Any]:
    """The sweep configuration that describes a search, for ``wandb sweep``.

    What a sweep file said that the search was read from stays as it stands there; what was changed since,
    the name under which our runs log the metric, and ``run_cap`` are written anew.

    Raises:
        SearchError: conditions, constraints or several objectives, which sweeps do not have.
    """
    space = definition.build_space()
    if space.constraints or any(parameter.when for parameter in space.parameters):
        raise SearchError("W&B sweeps have no constraints and no conditional parameters.")
    if len(definition.objectives) > 1:
        raise SearchError("A W&B sweep has one metric, not several.")
    methods = {"grid": "grid", "random": "random", "tpe": "bayes", "gp": "bayes"}
    methods["wandb"] = definition.sweep_method
    if definition.strategy not in methods:
        raise SearchError("W&B sweeps have no population-based training.")
    given = definition.sweep_config
    read = from_sweep(given) if given else {}
    parameters: dict[str, Any] = {}
    for name, value in definition.overrides.items():
        if names_secret(name):  # every trial gets it from the search's own definition
            continue
        said = name in read.get("overrides", {}) and read["overrides"][name] == value
        parameters[name] = given["parameters"][name] if said else {"value": value}
    for parameter in space.parameters:
        said = read.get("space", {}).get(parameter.name) == definition.space[parameter.name]
        parameters[parameter.name] = (
            given["parameters"][parameter.name] if given and said else _write_parameter(parameter)
        )
    objective = Objective.parse(definition.objectives[0])
    sweep: dict[str, Any] = {name: given[name] for name in _KEPT if name in given}
    sweep |= {
        "method": methods[definition.strategy],
        "metric": {
            **(given.get("metric") or {}),
            "name": logged_name(objective.metric),
            "goal": "maximize" if objective.direction == "max" else "minimize",
        },
        "parameters": parameters,
        "run_cap": definition.planned_trials(),
    }
    if definition.pruner == "hyperband":
        said = read.get("pruner") and read.get("reduction_factor", 3) == definition.reduction_factor
        eta = definition.reduction_factor
        sweep["early_terminate"] = (
            given["early_terminate"] if said else {"type": "hyperband", "min_iter": 1, "eta": eta}
        )
    return sweep


def logged_name(metric: str) -> str:
    """The name under which a metric of a run stands in W&B: ``eval/eval_percent_correct``."""
    kinds = {known.name: known.kind for known in METRICS}
    return f"{kinds.get(metric, 'eval' if metric.startswith('eval') else 'train')}/{metric}"


def _write_parameter(parameter: Choice | Range) -> dict[str, Any]:
    if isinstance(parameter, Choice):
        return {"values": list(parameter.values)}
    if parameter.log and not parameter.whole:
        return {"distribution": "log_uniform_values", "min": parameter.low, "max": parameter.high}
    if parameter.log:
        raise SearchError(
            f"{parameter.name}: W&B sweeps have no logarithmic range of whole numbers.",
            hint="List its values.",
        )
    if parameter.whole and parameter.step > 1:
        values = parameter.grid()
        if values[0] % parameter.step:  # type: ignore[operator]
            return {"values": list(values)}  # q_uniform would round to multiples of q
        return {"distribution": "q_uniform", "q": parameter.step, "min": values[0], "max": values[-1]}
    if parameter.whole:
        return {"distribution": "int_uniform", "min": int(parameter.low), "max": int(parameter.high)}
    return {"distribution": "uniform", "min": float(parameter.low), "max": float(parameter.high)}
