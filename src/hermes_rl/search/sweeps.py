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
_IGNORED = frozenset({"program", "command", "name", "description", "project", "entity", "version"})
_DISTRIBUTIONS = (
    "constant, categorical, uniform, int_uniform, q_uniform with a whole q, log_uniform, log_uniform_values"
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
    trial. ``early_terminate`` becomes the pruner ``hyperband``; its ``min_iter`` and ``s`` count logged
    metrics of W&B's own runs and are left to our first rung.

    Raises:
        SearchError: an unknown key, method or distribution.
    """
    known = {"method", "metric", "parameters", "early_terminate", "run_cap", *_IGNORED}
    unknown = sorted(set(sweep) - known)
    if unknown:
        raise SearchError(f"The sweep's {unknown[0]!r} has no meaning here.", allowed=sorted(known))
    method = sweep["method"]
    if method not in _METHODS:
        raise SearchError(f"The sweep's method {method!r} is unknown.", allowed=list(_METHODS))
    fields: dict[str, Any] = {"strategy": _METHODS[method], "sweep_method": method, "space": {}}
    overrides: dict[str, Any] = {}
    for name, parameter in sweep["parameters"].items():
        kind, value = _read_parameter(name, parameter)
        (overrides if kind == "value" else fields["space"])[name] = value
    if overrides:
        fields["overrides"] = overrides
    metric = sweep.get("metric")
    if metric:
        direction = "min" if metric.get("goal", "minimize") == "minimize" else "max"
        fields["objectives"] = [f"{metric['name'].rpartition('/')[2]}:{direction}"]
    if sweep.get("run_cap"):
        fields["trials"] = sweep["run_cap"]
    stopping = sweep.get("early_terminate")
    if stopping:
        if stopping.get("type") != "hyperband":
            raise SearchError(
                f"The sweep's early_terminate {stopping.get('type')!r} is unknown.", allowed=["hyperband"]
            )
        fields["pruner"] = "hyperband"
        if "eta" in stopping:
            fields["reduction_factor"] = stopping["eta"]
    return fields


def _read_parameter(name: str, parameter: Any) -> tuple[str, Any]:
    """``("value", constant)`` or ``("space", parameter as a TOML file writes it)``."""
    if not isinstance(parameter, dict):
        raise SearchError(f"The sweep's parameter {name} is not a mapping.")
    if "value" in parameter:
        return "value", parameter["value"]
    if "values" in parameter:
        return "space", list(parameter["values"])
    try:
        low, high = parameter["min"], parameter["max"]
    except KeyError as error:
        raise SearchError(
            f"The sweep's parameter {name} has no {error.args[0]!r}.", allowed="value, values, or min and max"
        ) from error
    whole = isinstance(low, int) and isinstance(high, int)
    distribution = parameter.get("distribution", "int_uniform" if whole else "uniform")
    if distribution == "uniform":
        return "space", {"uniform": [low, high]}
    if distribution == "int_uniform":
        return "space", {"int": [low, high]}
    if distribution == "q_uniform" and parameter.get("q", 1) == int(parameter.get("q", 1)):
        return "space", {"int": [low, high], "step": int(parameter.get("q", 1))}
    if distribution == "log_uniform_values":
        return "space", {"log_uniform": [low, high]}
    if distribution == "log_uniform":
        return "space", {"log_uniform": [math.exp(low), math.exp(high)]}
    raise SearchError(
        f"The sweep's parameter {name} has the distribution {distribution!r}.", allowed=_DISTRIBUTIONS
    )


def to_sweep(definition: SearchDefinition) -> dict[str, Any]:
    """The sweep configuration that describes a search, for ``wandb sweep``.

    Raises:
        SearchError: conditions, constraints or several objectives, which sweeps do not have.
    """
    space = definition.build_space()
    if space.constraints or any(parameter.when for parameter in space.parameters):
        raise SearchError("W&B sweeps have no constraints and no conditional parameters.")
    if len(definition.objectives) > 1:
        raise SearchError("A W&B sweep has one metric, not several.")
    # Secrets stay here: every trial gets them from the search's own definition.
    parameters: dict[str, Any] = {
        name: {"value": value} for name, value in definition.overrides.items() if not names_secret(name)
    }
    for parameter in space.parameters:
        parameters[parameter.name] = _write_parameter(parameter)
    objective = Objective.parse(definition.objectives[0])
    methods = {"grid": "grid", "random": "random", "tpe": "bayes", "gp": "bayes"}
    methods["wandb"] = definition.sweep_method
    if definition.strategy not in methods:
        raise SearchError("W&B sweeps have no population-based training.")
    sweep: dict[str, Any] = {
        "method": methods[definition.strategy],
        "metric": {
            "name": logged_name(objective.metric),
            "goal": "maximize" if objective.direction == "max" else "minimize",
        },
        "parameters": parameters,
        "run_cap": definition.planned_trials(),
    }
    if definition.pruner != "none":
        sweep["early_terminate"] = {"type": "hyperband", "min_iter": 1, "eta": definition.reduction_factor}
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
        bounds = {"min": int(parameter.low), "max": int(parameter.high)}
        return {"distribution": "q_uniform", "q": parameter.step, **bounds}
    if parameter.whole:
        return {"distribution": "int_uniform", "min": int(parameter.low), "max": int(parameter.high)}
    return {"distribution": "uniform", "min": float(parameter.low), "max": float(parameter.high)}
