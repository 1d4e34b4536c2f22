"""The space a search explores: which fields, which values, under which conditions.

Three ways to write the same parameter::

    learning_rate = { log_uniform = [1e-5, 2e-4] }     # a TOML file
    --space learning_rate=log:1e-5..2e-4               # the command line
    LogUniform("learning_rate", 1e-5, 2e-4)            # Python, in a list or by the field's name
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import yaml

from hermes_rl.errors import SearchError
from hermes_rl.search.expression import Condition

if TYPE_CHECKING:
    import optuna  # half a second, which whoever only looks at a search need not wait

SHORTHAND = (
    "VALUE,VALUE,… for a choice; LOW..HIGH or uniform:LOW..HIGH; log:LOW..HIGH; int:LOW..HIGH, "
    "int:LOW..HIGH:STEP or int:log:LOW..HIGH"
)
Scalar = bool | int | float | str | None
MOST_POINTS = 10_000
"""Spaces of more points than this have no grid, and are never gone through point by point."""


@dataclass(frozen=True)
class Choice:
    """One of a few values.

    Attributes:
        name: the field.
        values: what it can be, in the order given.
        when: the condition under which the parameter exists at all.
    """

    name: str
    values: tuple[Scalar, ...]
    when: Condition | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise SearchError(f"{self.name} has no values to choose from.")
        for value in self.values:
            finite = not isinstance(value, float) or math.isfinite(value)
            if not finite or not isinstance(value, Scalar):
                raise SearchError(
                    f"{self.name}: {value!r} cannot be a value to choose.",
                    allowed="finite numbers, true, false, texts; a list or a table as its JSON text",
                )
        if len(set(map(repr, self.values))) < len(self.values):
            raise SearchError(f"{self.name} lists a value twice: {list(self.values)}.")

    def grid(self) -> Sequence[Scalar]:
        """Every value."""
        return self.values

    def table(self) -> Any:
        """As a TOML file writes it."""
        values = list(self.values)
        return values if self.when is None else {"choice": values, "when": self.when.text}

    def distribution(self) -> optuna.distributions.BaseDistribution:
        """The same as Optuna names it."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def draw(self, trial: optuna.Trial) -> Scalar:
        """One value, chosen by Optuna's sampler."""
        return trial.suggest_categorical(self.name, self.values)

    def contains(self, value: Any) -> bool:
        """Whether ``value`` is one of the values; numbers compare by size (``4e-5 == 0.00004``)."""
        return any(same_value(value, candidate) for candidate in self.values)

    def edges(self) -> tuple[Scalar, ...]:
        """The values whose acceptance shows that all are accepted."""
        return self.values

    def near(self, value: Any, width: float, rng: random.Random) -> Scalar:
        """A value near ``value``: within ``width`` of the list for numbers, else a jump at that rate."""
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values):
            ordered = sorted(self.values, key=float)  # type: ignore[arg-type]
            at = next((i for i, v in enumerate(ordered) if same_value(v, value)), len(ordered) // 2)
            reach = max(1, round(width * (len(ordered) - 1)))
            return rng.choice(ordered[max(0, at - reach) : at + reach + 1])
        return rng.choice(self.values) if rng.random() < width else value

    def random(self, rng: random.Random) -> Scalar:
        """A value by chance."""
        return rng.choice(self.values)

    def describe(self) -> str:
        """As a person reads it."""
        return ", ".join(format_value(value) for value in self.values)


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included.

    Attributes:
        name: the field.
        low, high: the bounds, in the field's own unit.
        log: whether the logarithm is uniform rather than the number.
        whole: whether it is a whole number.
        step: distance between neighbouring whole numbers.
        when: the condition under which the parameter exists at all.
    """

    name: str
    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: int = 1
    when: Condition | None = None

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise SearchError(f"{self.name}: the step {self.step!r} is not a whole number.")
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low >= self.high:
            raise SearchError(f"{self.name}: the range {self.low:g}..{self.high:g} is empty or upside down.")
        if self.log and self.low <= 0:
            raise SearchError(f"{self.name}: a logarithmic range starts above 0, not at {self.low:g}.")
        if self.step < 1 or (self.step > 1 and (self.log or not self.whole)):
            raise SearchError(f"{self.name}: a step is a whole number, for a linear range of whole numbers.")
        if self.whole and (self.low != int(self.low) or self.high != int(self.high)):
            raise SearchError(f"{self.name}: the bounds of a range of whole numbers are whole numbers.")

    def grid(self) -> Sequence[Scalar]:
        """Every value of a range of whole numbers.

        Raises:
            SearchError: the range has no end of values.
        """
        if not self.whole or self.log:
            raise SearchError(
                f"{self.name} is a continuous range, which has no grid.",
                hint="List its values (name=1,2,3) or use --strategy random, tpe or gp.",
            )
        return range(int(self.low), int(self.high) + 1, self.step)

    def table(self) -> Any:
        """As a TOML file writes it."""
        kind = ("log_int" if self.log else "int") if self.whole else "log_uniform" if self.log else "uniform"
        table: dict[str, Any] = {kind: list(self.edges())}
        if self.step > 1:
            table["step"] = self.step
        return table if self.when is None else {**table, "when": self.when.text}

    def distribution(self) -> optuna.distributions.BaseDistribution:
        """The same as Optuna names it."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), self._last(), log=self.log, step=self.step)
        return FloatDistribution(self.low, self.high, log=self.log)

    def draw(self, trial: optuna.Trial) -> Scalar:
        """One value, chosen by Optuna's sampler."""
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), self._last(), log=self.log, step=self.step)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def _last(self) -> int:
        """The largest whole number on the steps."""
        return int(self.low) + (int(self.high) - int(self.low)) // self.step * self.step

    def contains(self, value: Any) -> bool:
        """Whether ``value`` lies in the range, and on its steps."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        inside = self.low <= value <= self.high
        if self.whole:
            return inside and value == int(value) and (int(value) - int(self.low)) % self.step == 0
        return inside

    def edges(self) -> tuple[Scalar, ...]:
        """The values whose acceptance shows that all are accepted."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def near(self, value: Any, width: float, rng: random.Random) -> Scalar:
        """A value uniform in a window of ``width`` times the range around ``value``, cut at the bounds."""
        low, high, at = float(self.low), float(self.high), float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        half = width * (high - low) / 2
        drawn = rng.uniform(max(low, at - half), min(high, at + half))
        drawn = math.exp(drawn) if self.log else drawn
        if self.whole:
            steps = max(0, round((drawn - self.low) / self.step))
            return min(int(self.low) + steps * self.step, self._last())
        return min(max(drawn, self.low), self.high)

    def random(self, rng: random.Random) -> Scalar:
        """A value by chance."""
        return self.near(self.low, 2.0, rng)  # a window twice as wide holds the whole range

    def describe(self) -> str:
        """As a person reads it."""
        text = f"{format_value(self.low)} to {format_value(self.high)}"
        if self.whole:
            text += ", whole" + (f", step {self.step}" if self.step > 1 else "")
        return text + (", logarithmic" if self.log else "")


Parameter = Choice | Range


def LogUniform(name: str, low: float, high: float, when: str | None = None) -> Range:
    """A number whose logarithm is uniform between the bounds."""
    return Range(name, low, high, log=True, when=Condition.parse(when) if when else None)


def Uniform(name: str, low: float, high: float, when: str | None = None) -> Range:
    """A number uniform between the bounds."""
    return Range(name, low, high, when=Condition.parse(when) if when else None)


def Int(
    name: str, low: int, high: int, *, step: int = 1, log: bool = False, when: str | None = None
) -> Range:
    """A whole number between the bounds."""
    return Range(
        name, low, high, log=log, whole=True, step=step, when=Condition.parse(when) if when else None
    )


def same_value(left: Any, right: Any) -> bool:
    """Whether two parameter values are the same; floats within rounding."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=1e-9)
    return left == right


def format_value(value: Any) -> str:
    """A parameter value, short and without loss of meaning: ``4e-05`` reads ``0.00004``."""
    if isinstance(value, float):
        if value != 0 and (abs(value) < 1e-6 or abs(value) >= 1e7):
            return f"{value:.3g}"
        text = (
            f"{value:.10f}"
            if abs(value) >= 1e-3
            else f"{value:.{3 - math.floor(math.log10(abs(value)))}f}"
            if value
            else "0"
        )
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return text if len(text) <= 10 or abs(value) < 1e-3 else f"{value:.4g}"
    return str(value)


def format_params(params: Mapping[str, Any]) -> str:
    """Parameter values on one line."""
    return " ".join(f"{name}={format_value(value)}" for name, value in params.items())


@dataclass(frozen=True)
class Space:
    """Parameters and the constraints between them.

    Attributes:
        parameters: in the order in which they are drawn; a condition reads only earlier ones.
        constraints: what every configuration must satisfy.
        context: values of the fields that are not searched, for conditions that read them.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[Condition, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise SearchError(
                "The search has no parameters.",
                hint="Give --preset article-grid, --space name=values or a file.",
            )
        names = self.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SearchError(f"{twice} appears twice in the space.")
        for at, parameter in enumerate(self.parameters):
            later = (parameter.when.names if parameter.when else frozenset()) & set(names[at:])
            if later:
                raise SearchError(
                    f"{parameter.name} depends on {', '.join(sorted(later))}, which does not come before it.",
                    hint="Put the parameter that a condition reads first.",
                )

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self.parameters]

    def with_context(self, values: Mapping[str, Any]) -> Space:
        """The same space, with the values of the fields that are not searched."""
        return replace(self, context=dict(values))

    def active(self, parameter: Parameter, params: Mapping[str, Any]) -> bool:
        """Whether the parameter exists, given the values drawn before it."""
        return parameter.when is None or parameter.when.holds({**self.context, **params})

    def normal(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Only the parameters that exist under their conditions, in the space's order."""
        kept: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name in params and self.active(parameter, kept):
                kept[parameter.name] = params[parameter.name]
        return kept

    def snap(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The same configuration, each value of a choice exactly as the space writes it."""
        snapped = self.normal(params)
        for parameter in self.parameters:
            if isinstance(parameter, Choice) and parameter.name in snapped:
                value = snapped[parameter.name]
                snapped[parameter.name] = next((v for v in parameter.values if same_value(v, value)), value)
        return snapped

    def feasible(self, params: Mapping[str, Any]) -> bool:
        """Whether a configuration satisfies every constraint."""
        values = {**self.context, **params}
        return all(constraint.holds(values) for constraint in self.constraints)

    def contains(self, params: Mapping[str, Any]) -> bool:
        """Whether a configuration is one of the space's."""
        params = self.normal(params)
        for parameter in self.parameters:
            if self.active(parameter, params) and not (
                parameter.name in params and parameter.contains(params[parameter.name])
            ):
                return False
        return self.feasible(params)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Draw a configuration through an Optuna trial, parameter by parameter."""
        params: dict[str, Any] = {}
        for parameter in self.parameters:
            if self.active(parameter, params):
                params[parameter.name] = parameter.draw(trial)
        return params

    def random(self, rng: random.Random) -> dict[str, Any]:
        """A configuration by chance; it may break a constraint."""
        params: dict[str, Any] = {}
        for parameter in self.parameters:
            if self.active(parameter, params):
                params[parameter.name] = parameter.random(rng)
        return params

    def grid(self) -> Iterator[dict[str, Any]]:
        """Every configuration of a finite space that satisfies the constraints, each once.

        Raises:
            SearchError: a parameter is a continuous range.
        """
        seen: set[str] = set()
        names, conditional = self.names, any(parameter.when for parameter in self.parameters)
        for values in itertools.product(*(parameter.grid() for parameter in self.parameters)):
            params = dict(zip(names, values, strict=True))
            if conditional:  # without the fields that do not exist, points become the same
                params = self.normal(params)
                key = params_key(params)
                if key in seen:
                    continue
                seen.add(key)
            if self.feasible(params):
                yield params

    def mean(self, name: str, otherwise: float) -> float:
        """Mean of a parameter's values, all equally likely; ``otherwise`` where it is not searched."""
        parameter = next((p for p in self.parameters if p.name == name), None)
        if parameter is None:
            return otherwise
        numbers = [float(v) for v in parameter.edges() if isinstance(v, int | float)]
        return sum(numbers) / len(numbers) if numbers else otherwise

    def finite(self) -> bool:
        """Whether the space has a grid."""
        return all(isinstance(p, Choice) or (p.whole and not p.log) for p in self.parameters)

    def size(self) -> int:
        """Number of points of a finite space, those that constraints and conditions take away included.

        Raises:
            SearchError: a parameter is a continuous range.
        """
        return math.prod(len(parameter.grid()) for parameter in self.parameters)

    def countable(self) -> bool:
        """Whether the points are few enough to go through, and all their conditions can be computed."""
        return self.finite() and self.size() <= MOST_POINTS and not self.unknown_names()

    def count(self, most: int | None = None) -> int:
        """Number of points of a :meth:`countable` space, counted up to ``most``."""
        return sum(1 for _ in itertools.islice(self.grid(), most))

    def read_names(self) -> set[str]:
        """Names of the fields that the constraints and conditions read."""
        conditions = [*self.constraints, *(p.when for p in self.parameters if p.when is not None)]
        return {name for condition in conditions for name in condition.names}

    def unknown_names(self) -> set[str]:
        """Fields that a constraint or condition reads and whose value is not known wherever it does."""
        known = {p.name for p in self.parameters if p.when is None}
        return self.read_names() - known - set(self.context)

    def describe_size(self) -> str:
        """The size of a finite space as a product: ``63 x 497 = 31,311``."""
        sizes = [len(parameter.grid()) for parameter in self.parameters]
        return f"{' x '.join(f'{size:,}' for size in sizes)} = {self.size():,}"

    def describe(self) -> dict[str, str]:
        """Parameter → its values as a person reads them."""
        return {p.name: p.describe() + (f" (when {p.when.text})" if p.when else "") for p in self.parameters}


def params_key(params: Mapping[str, Any]) -> str:
    """A text that two configurations share only when they are the same."""
    return repr(
        sorted(
            (
                name,
                f"{value:.9e}" if isinstance(value, int | float) and not isinstance(value, bool) else value,
            )
            for name, value in params.items()
        )
    )


def parse_scalar(text: str) -> Scalar:
    """A value as typed: number, ``true``/``false``, ``null`` or text."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError):
        return text
    return value if isinstance(value, Scalar) else text


def parse_shorthand(name: str, text: str) -> Parameter:
    """A parameter as the command line writes it: ``16,32,64``, ``log:1e-5..2e-4``, ``int:4..16:4``.

    Raises:
        SearchError: it cannot be read.
    """
    kind, rest = "", text.strip()
    while (head := rest.partition(":")[0].strip().replace("-", "_")) in (
        "log",
        "log_uniform",
        "uniform",
        "int",
        "choice",
    ):
        kind += f"{head} "
        rest = rest.partition(":")[2].strip()
    if ".." in rest and "choice" not in kind:
        bounds, _, step = rest.partition(":")
        low, _, high = bounds.partition("..")
        try:
            return Range(
                name,
                float(low),
                float(high),
                log="log" in kind,
                whole="int" in kind,
                step=int(step.removeprefix("step=") or 1),
            )
        except (ValueError, OverflowError) as error:
            raise SearchError(f"{name}={text} is not a range.", allowed=SHORTHAND) from error
    if kind.strip() not in ("", "choice") or not rest:
        raise SearchError(f"{name}={text} cannot be read.", allowed=SHORTHAND)
    return Choice(name, tuple(parse_scalar(part) for part in rest.split(",")))


_KINDS = ("choice", "uniform", "log_uniform", "int", "log_int")


def parse_parameter(name: Any, value: Any) -> Parameter:
    """A parameter as a TOML file writes it: a list, a shorthand text, or a table; or as Python makes it.

    Raises:
        SearchError: it cannot be read, or has another name of its own.
    """
    if not isinstance(name, str) or not name.strip():
        raise SearchError(f"{name!r} is no name of a parameter.")
    if isinstance(value, Choice | Range):
        if value.name != name:
            raise SearchError(f"The parameter {value.name} stands under the name {name}.")
        return value
    if isinstance(value, list | tuple):
        return Choice(name, tuple(value))
    if isinstance(value, str):
        return parse_shorthand(name, value)
    if not isinstance(value, dict):
        return Choice(name, (value,))
    table: dict[Any, Any] = dict(value)
    when = table.pop("when", None)
    kinds = [kind for kind in _KINDS if kind in table]
    allowed = "one of " + ", ".join(_KINDS) + ", and optionally step and when"
    if len(kinds) != 1 or set(table) - {kinds[0], "step"}:
        raise SearchError(f"The parameter {name} cannot be read: {value}.", allowed=allowed)
    kind, body, step = kinds[0], table[kinds[0]], table.get("step", 1)
    condition = None if when is None else Condition.parse(when)
    if not isinstance(body, list | tuple):
        raise SearchError(f"The parameter {name}: {kind} takes a list, not {body!r}.", allowed=allowed)
    if kind == "choice":
        if "step" in table:
            raise SearchError(f"The parameter {name}: a choice has no step.", allowed=allowed)
        return Choice(name, tuple(body), condition)
    if len(body) != 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in body):
        raise SearchError(f"The parameter {name}: {kind} takes [low, high], not {body}.", allowed=allowed)
    try:
        low, high = float(body[0]), float(body[1])
    except OverflowError as error:
        raise SearchError(f"The parameter {name}: the range {body} is too large.") from error
    return Range(
        name,
        low,
        high,
        log=kind.startswith("log"),
        whole=kind.endswith("int"),
        step=step,
        when=condition,
    )


def build_space(
    parameters: Mapping[str, Any] | Iterable[Parameter], constraints: Sequence[str] = ()
) -> Space:
    """A space from names and values as a TOML file writes them, or from parameters made in Python.

    Raises:
        SearchError: a parameter or a constraint cannot be read.
    """
    return Space(
        tuple(parse_parameter(name, value) for name, value in space_tables(parameters).items()),
        tuple(Condition.parse(text) for text in constraints),
    )


def space_tables(parameters: Any) -> dict[str, Any]:
    """Parameters by name as a TOML file writes them, from that or from parameters made in Python.

    Raises:
        SearchError: it is neither a mapping nor a list of parameters, or a name is given twice.
    """
    if isinstance(parameters, Mapping):
        pairs = [(name, value) for name, value in parameters.items()]
    elif isinstance(parameters, list | tuple) and all(isinstance(p, Choice | Range) for p in parameters):
        pairs = [(parameter.name, parameter) for parameter in parameters]
    else:
        raise SearchError(
            f"The space is {parameters!r}.",
            allowed="a table of fields and their values, or in Python a list of parameters",
        )
    tables: dict[str, Any] = {}
    for name, value in pairs:
        if name in tables:
            raise SearchError(f"{name} appears twice in the space.")
        made = isinstance(value, Choice | Range)
        tables[name] = parse_parameter(name, value).table() if made else value
    return tables
