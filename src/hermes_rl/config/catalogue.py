"""The catalogue of fields: what can be configured, within which bounds, and by whom.

It is read from the section models, so that a field is defined in one place only.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from hermes_rl.config.sections import EnvSection, OpenAISection, RunSection, TinkerSection
from hermes_rl.errors import ConfigError

SECTIONS: dict[str, type[BaseModel]] = {
    "run": RunSection,
    "env": EnvSection,
    "openai": OpenAISection,
    "tinker": TinkerSection,
}
"""Section name → model, in the order in which a run's YAML has them."""


_MOST_CHOICES_SHOWN = 12


@dataclass(frozen=True)
class CatalogueField:
    """One configurable field.

    Attributes:
        name: bare name, unique over all sections.
        section: ``run``, ``env``, ``openai`` or ``tinker``.
        type: ``bool``, ``int``, ``float``, ``str``, ``list`` or ``dict``.
        optional: whether ``None`` is a value.
        default: the catalogue's default, before the profile's.
        description: one line.
        unit: unit of a number, when it has one.
        locked: whether only the operator may change it.
        choices: the allowed values of an enumeration.
        minimum, maximum: bounds of a number; ``exclusive_*`` says whether the bound itself is refused.
        min_length, max_length: shortest and longest string.
        pattern: regular expression that a string must match.
        multiple_of: number that a number must be a multiple of.
        own: whether the field is the environment's own rather than the catalogue's.
        items: what each element of a list, or each value of a mapping, must be; None when that is open.
    """

    name: str
    section: str
    type: str
    optional: bool
    default: Any
    description: str
    unit: str | None = None
    locked: bool = False
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    multiple_of: float | None = None
    own: bool = False
    items: CatalogueField | None = None

    @property
    def key(self) -> str:
        """What the field is set by: its name, with its section where the catalogue has that name too."""
        return own_key(self.name) if self.own else self.name

    @property
    def settable(self) -> bool:
        """Whether it can be set by itself: an environment's own ``seed`` follows the run's."""
        return not (self.own and (self.name == "seed" or self.name in EnvSection.model_fields))

    def allowed(self) -> str:
        """What the field accepts, as a person reads it: ``"a number from 0 to 1"``."""
        if self.choices is not None:
            shown = [repr(choice) for choice in self.choices[:_MOST_CHOICES_SHOWN]]
            text = "one of " + ", ".join(shown)
            if len(self.choices) > len(shown):
                text += f" … ({len(self.choices)} in all)"
        elif self.type in ("int", "float"):
            noun = "a whole number" if self.type == "int" else "a number"
            low = (
                ""
                if self.minimum is None
                else f" {'above' if self.exclusive_minimum else 'from'} {_bound_text(self.minimum)}"
            )
            high = (
                ""
                if self.maximum is None
                else f" {'below' if self.exclusive_maximum else 'to'} {_bound_text(self.maximum)}"
            )
            text = noun + low + high
            if self.multiple_of is not None:
                text += f", a multiple of {_bound_text(self.multiple_of)}"
        elif self.type == "bool":
            text = "true or false"
        elif self.type == "str":
            text = "text"
            if self.min_length is not None:
                text += f" of at least {self.min_length} characters"
            if self.max_length is not None:
                text += f" of at most {self.max_length} characters"
            if self.pattern is not None:
                text += f" that matches {self.pattern}"
        else:
            text = {"list": "a list", "dict": "a mapping"}[self.type]
            if self.items is not None:
                text += f", each {'' if self.type == 'list' else 'value '}{self.items.allowed()}"
            if self.min_length is not None:
                text += f", at least {self.min_length} long"
            if self.max_length is not None:
                text += f", at most {self.max_length} long"
        return text + (" or null" if self.optional else "")


def _bound_text(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


_PLAIN_TYPES = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict"}


def _read_type(annotation: Any) -> tuple[str, bool, tuple[Any, ...] | None]:
    """Type name, whether None is allowed, and the choices of a Literal."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        name, _, choices = _read_type(inner[0])
        return name, len(inner) < len(typing.get_args(annotation)), choices
    if origin is Literal:
        choices = typing.get_args(annotation)
        return _PLAIN_TYPES[type(choices[0])], False, choices
    return _PLAIN_TYPES[origin or annotation], False, None


def bounds_of(metadata: Iterable[Any]) -> dict[str, Any]:
    """The constraints of a pydantic field, under the names that :class:`CatalogueField` has for them."""
    bounds: dict[str, Any] = {}
    for constraint in metadata:
        match constraint:
            case Ge(ge):
                bounds["minimum"] = ge
            case Gt(gt):
                bounds.update(minimum=gt, exclusive_minimum=True)
            case Le(le):
                bounds["maximum"] = le
            case Lt(lt):
                bounds.update(maximum=lt, exclusive_maximum=True)
            case MinLen(length):
                bounds["min_length"] = length
            case MaxLen(length):
                bounds["max_length"] = length
            case MultipleOf(step):
                bounds["multiple_of"] = step
            case _ if isinstance(pattern := getattr(constraint, "pattern", None), str):
                bounds["pattern"] = pattern
    return bounds


def _read_field(section: str, name: str, info: FieldInfo) -> CatalogueField:
    type_name, optional, choices = _read_type(info.annotation)
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return CatalogueField(
        name=name,
        section=section,
        type=type_name,
        optional=optional,
        default=info.default,
        description=info.description or "",
        unit=typing.cast("str | None", extra.get("unit")),
        locked=bool(extra.get("locked")),
        choices=choices,
        **bounds_of(info.metadata),
    )


FIELDS: dict[str, CatalogueField] = {
    name: _read_field(section, name, info)
    for section, model in SECTIONS.items()
    for name, info in model.model_fields.items()
}
"""Bare name → field, over all sections. No two sections share a name."""


_SECRET = re.compile(r"(^|_)(api_?key|key|secret|password|credentials?|(auth|access|hf|bearer)_token)$")
HIDDEN = "<secret>"
"""Stands where a secret was."""


def names_secret(name: str) -> bool:
    """Whether a field, by its name, is an environment's own for a key or a password."""
    return names_own_field(name) and _SECRET.search(name.rpartition(".")[2].lower()) is not None


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields, by name, to be shown: those that hold secrets are replaced by ``<secret>``."""
    return {name: HIDDEN if value and names_secret(name) else value for name, value in values.items()}


def own_key(name: str) -> str:
    """What an environment's own field is set by: ``env.NAME`` where the catalogue has that name too."""
    return f"env.{name}" if name in FIELDS else name


def names_own_field(name: str) -> bool:
    """Whether a name, bare or sectioned, can only mean a field of an environment's own."""
    section, _, bare = name.rpartition(".")
    field = FIELDS.get(bare)
    return field is None or (section == "env" and field.section != "env")


def find_field(name: str, own_fields: dict[str, CatalogueField] | None = None) -> CatalogueField:
    """The field called ``name``, bare (``learning_rate``) or sectioned (``tinker.learning_rate``).

    Args:
        name: the field.
        own_fields: the environment's own fields by their names. One that shares its name with a field of the
            catalogue is meant by ``env.NAME`` only.

    Raises:
        ConfigError: there is no such field; names the closest ones.
    """
    section, dot, bare = name.rpartition(".")
    own = {field.key: field for field in (own_fields or {}).values() if field.settable}
    known = {**own, **FIELDS}
    found = own.get(name) or known.get(bare)
    if found is not None and (not dot or section == found.section):
        return found
    if found is not None and bare == "seed":
        raise ConfigError(
            f"There is no field {name!r}: an environment's own seed follows the run's.",
            hint="`hermes-rl run start --seed N` sets that.",
        )
    if found is not None:
        raise ConfigError(
            f"There is no field {name!r}: {bare!r} belongs to section {found.section!r}.",
            hint=f"Use {bare!r} or '{found.section}.{bare}'.",
        )
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    close = close or difflib.get_close_matches(bare, known, n=3, cutoff=0.6)
    raise ConfigError(
        f"There is no field called {name!r}.",
        allowed=close or sorted(known),
        hint=f"Did you mean {close[0]!r}?" if close else "`hermes-rl config show` lists every field.",
    )


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_LARGEST_EXACT_INTEGER = 2**53


def _refuse(field: CatalogueField, value: Any) -> ConfigError:
    allowed: Any = field.allowed()
    if field.choices is not None and len(field.choices) > _MOST_CHOICES_SHOWN:
        names = [str(choice) for choice in field.choices]
        allowed = difflib.get_close_matches(value, names) if isinstance(value, str) else None
        allowed = allowed or names
    return ConfigError(
        f"{field.key} cannot be {_shown(field, value)}.",
        allowed=allowed,
        hint=f"{field.key}: {field.description}" if field.description else None,
    )


def _shown(field: CatalogueField, value: Any) -> str:
    """A value that was refused, as a message says it."""
    if field.own and names_secret(field.key):
        return "what was given"
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of more than some thousand digits
        return f"a {type(value).__name__} that is too large to be shown"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _to_number(field: CatalogueField, value: Any) -> float | int:
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        if not _NUMBER.fullmatch(text):
            raise _refuse(field, value)
        value = int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(field, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _refuse(field, value)
    if abs(value) > _LARGEST_EXACT_INTEGER:
        raise _refuse(field, value)
    if field.type == "float":
        return float(value)
    if float(value) != int(value):
        raise _refuse(field, value)
    return int(value)


def _to_bool(field: CatalogueField, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise _refuse(field, value)


def _to_container(field: CatalogueField, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise _refuse(field, value) from None
    wanted: type = {"list": list, "dict": dict}[field.type]
    if not isinstance(value, wanted):
        raise _refuse(field, value)
    try:
        checked = json.loads(json.dumps(value, allow_nan=False))
        if field.own:
            return _check_items(field, checked)
        annotation: Any = SECTIONS[field.section].model_fields[field.name].annotation
        return TypeAdapter(annotation).validate_python(checked, strict=True)
    except (TypeError, ValueError, RecursionError):  # pydantic's errors are ValueErrors
        raise _refuse(field, value) from None


def _check_items(field: CatalogueField, value: Any) -> Any:
    """A list or mapping whose length and elements are allowed."""
    too_short = field.min_length is not None and len(value) < field.min_length
    too_long = field.max_length is not None and len(value) > field.max_length
    if too_short or too_long:
        raise _refuse(field, value)
    if field.items is None:  # what it may hold is the environment's to say
        return value
    try:
        if field.type == "dict":
            return {name: check_value(field.items, item) for name, item in value.items()}
        return [check_value(field.items, item) for item in value]
    except ConfigError:
        raise _refuse(field, value) from None


def check_value(field: CatalogueField, value: Any) -> Any:
    """``value`` in the field's own type, when it is unambiguous and within bounds.

    Understands values as a language model or a shell writes them: ``"6e-5"``, ``"32"``, ``32.0``,
    ``"true"``. Never rounds, never turns a boolean into a number.

    Raises:
        ConfigError: the value is of another type or out of bounds; says what is allowed.
    """
    if value is None or (
        isinstance(value, str) and field.type != "str" and value.strip() in ("null", "none", "None")
    ):
        if field.optional:
            return None
        raise _refuse(field, value)
    if field.type in ("int", "float"):
        number = _to_number(field, value)
        low, high = field.minimum, field.maximum
        too_low = low is not None and (number < low or (field.exclusive_minimum and number == low))
        too_high = high is not None and (number > high or (field.exclusive_maximum and number == high))
        if too_low or too_high or (field.multiple_of is not None and number % field.multiple_of):
            raise _refuse(field, value)
        checked: Any = number
    elif field.type == "bool":
        checked = _to_bool(field, value)
    elif field.type == "str":
        if not isinstance(value, str) or any(
            ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in value
        ):
            raise _refuse(field, value)
        too_short = field.min_length is not None and len(value) < field.min_length
        too_long = field.max_length is not None and len(value) > field.max_length
        if too_short or too_long or (field.pattern is not None and not re.search(field.pattern, value)):
            raise _refuse(field, value)
        checked = value
    else:
        checked = _to_container(field, value)
    if field.choices is not None and checked not in field.choices:
        raise _refuse(field, value)
    return checked
