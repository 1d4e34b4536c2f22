"""The child process that reads an environment's fields: ``python -m hermes_rl.environments.field_reader``.

It imports one environment file, and writes its configuration class's fields as JSON to the file it was
given. It talks to nobody. Whatever the environment does at import happens here and not in the caller.

Arguments: the environment's file, its class, the output file.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import types
import typing
from pathlib import Path, PurePath
from typing import Any, Literal

from hermes_rl.config.catalogue import bounds_of


def read_fields(file: Path, class_name: str) -> list[dict[str, Any]]:
    """The fields that an environment's configuration has beyond those of every environment.

    Returns:
        One dict a field, with the keys of ``CatalogueField``.

    Raises:
        EnvironmentFailedError: the file cannot be imported or has no such class.
    """
    from hermes_rl.environments.light_import import import_atroposlib
    from hermes_rl.environments.loading import load_class

    import_atroposlib(file)
    from atroposlib.envs.base import BaseEnvConfig

    cls = load_class(file, class_name)
    defaults: dict[str, Any]
    try:
        config = cls.config_init()[0]
        model, defaults = type(config), config.model_dump(mode="json")
    except Exception:  # noqa: BLE001 - the environment's own code; the class itself still has its fields
        model, defaults = cls.env_config_cls, {}
    return [
        _describe(name, info, defaults.get(name, _plain_default(info)))
        for name, info in model.model_fields.items()
        if name not in BaseEnvConfig.model_fields
    ]


def _plain_default(info: Any) -> Any:
    from pydantic_core import PydanticUndefined, to_jsonable_python

    default = info.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else to_jsonable_python(default, serialize_unknown=True)


def _describe(name: str, info: Any, default: Any) -> dict[str, Any]:
    kind, optional, choices = _read_type(info.annotation)
    extra = info.json_schema_extra
    if choices is None and isinstance(extra, dict) and isinstance(extra.get("enum"), list | tuple):
        choices = list(extra["enum"])  # as JSON schema calls the values that a field accepts
    return {
        "name": name,
        "section": "env",
        "type": kind,
        "optional": optional or default is None,
        "default": default,
        "description": " ".join((info.description or "").split()),
        "choices": choices,
        "own": True,
        **_read_items(name, info.annotation),
        **bounds_of(info.metadata),
    }


def _read_items(name: str, annotation: Any) -> dict[str, Any]:
    """What the elements of a list or the values of a mapping must be, as far as a type says it."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _read_items(name, typing.get_args(annotation)[0])
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [one for one in arguments if one is not type(None)]
        return _read_items(name, inner[0]) if len(inner) == 1 else {}
    if origin in (list, set, frozenset) and len(arguments) == 1:
        return {"items": _element(name, arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"items": _element(name, arguments[1])}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"items": _element(name, arguments[0])}
    if origin is tuple and arguments:
        item = _element(name, arguments[0]) if len(set(arguments)) == 1 else None
        return {"items": item, "min_length": len(arguments), "max_length": len(arguments)}
    return {}


def _element(name: str, annotation: Any) -> dict[str, Any] | None:
    """One element as a field; None where its type is not one that can be checked here."""
    metadata: list[Any] = []
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *marks = typing.get_args(annotation)
        for mark in marks:  # pydantic's Field holds constraints of its own
            metadata += getattr(mark, "metadata", None) or [mark]
    inner = [one for one in typing.get_args(annotation) if one is not type(None)]
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    plain = inner[0] if union and len(inner) == 1 else annotation
    origin = typing.get_origin(plain)
    named = plain in (bool, int, float, str) or (isinstance(plain, type) and issubclass(plain, enum.Enum))
    if not named and origin not in (Literal, list, set, frozenset, tuple, dict):
        return None
    kind, optional, choices = _read_type(annotation)
    return {
        "name": name,
        "section": "env",
        "type": kind,
        "optional": optional,
        "default": None,
        "description": "",
        "choices": choices,
        "own": True,
        **_read_items(name, plain),
        **bounds_of(metadata),
    }


def _read_type(annotation: Any) -> tuple[str, bool, list[Any] | None]:
    """Type name (bool, int, float, str, list or dict), whether None is allowed, and choices."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _read_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        inner = [one for one in arguments if one is not type(None)]
        kind, optional, choices = _read_type(inner[0])
        return kind, optional or len(inner) < len(arguments), choices
    if origin is Literal:
        return _kind_of(type(arguments[0])), None in arguments, list(arguments)
    plain = origin or annotation
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        values = [member.value for member in plain]
        return _kind_of(type(values[0])) if values else "str", False, values
    return _kind_of(plain), False, None


def _kind_of(plain: Any) -> str:
    if isinstance(plain, type):
        for kind in (bool, int, float, str):
            if issubclass(plain, kind):
                return kind.__name__
        if issubclass(plain, list | tuple | set | frozenset):
            return "list"
        if issubclass(plain, PurePath):
            return "str"
        if issubclass(plain, dict) or hasattr(plain, "model_fields"):
            return "dict"
    return "str"


def main(arguments: list[str]) -> int:
    """Read and write; returns the exit status."""
    from hermes_rl.errors import HermesRLError

    file, class_name, output = arguments
    try:
        answer: dict[str, Any] = {"fields": read_fields(Path(file), class_name)}
        status = 0
    except HermesRLError as error:
        answer, status = error.as_dict(), 1
    Path(output).write_text(json.dumps(answer), encoding="utf-8")
    return status


if __name__ == "__main__":
    # Threads that an environment left behind must not keep the process.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
