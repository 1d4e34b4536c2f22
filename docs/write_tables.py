"""Write the tables of the documentation that follow from the code: ``python docs/write_tables.py [--check]``.

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. With ``--check`` nothing is
written, and the exit status is 1 when a table is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hermes_rl.agent.toolset import TOOLS
from hermes_rl.config import FIELDS, PROFILES, CatalogueField

HERE = Path(__file__).resolve().parent
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_FOLDER = "the packaged model"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str) and value.startswith("/"):
        return _FOLDER
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _default(field: CatalogueField) -> str:
    embedded = PROFILES["embedded"].values
    text = _value(field.default)
    if field.name in embedded and embedded[field.name] != field.default:
        text += f"; embedded: {_value(embedded[field.name])}"
    return text


def fields_of(section: str) -> str:
    """The fields of one section."""
    rows = [
        (
            f"`{field.name}`",
            field.type,
            _default(field),
            field.allowed() + (f" ({field.unit})" if field.unit else ""),
            "locked" if field.locked else "may change",
            field.description,
        )
        for field in FIELDS.values()
        if field.section == section
    ]
    return _table(("field", "type", "default", "accepts", "agent", "meaning"), rows)


def profiles() -> str:
    """What each profile sets."""
    names = list(PROFILES)
    fields = list(dict.fromkeys(name for profile in PROFILES.values() for name in profile.values))
    rows: list[list[str]] = [["", *(PROFILES[name].description for name in names)]]
    rows += [
        [
            f"`{field}`",
            *(_value(PROFILES[name].values.get(field, FIELDS[field].default)) for name in names),
        ]
        for field in fields
    ]
    return _table(["", *(f"`{name}`" for name in names)], rows)


def _presence(name: str, schema: dict[str, Any]) -> str:
    if name in schema["required"]:
        return "required"
    part = schema["properties"][name]
    return f"default {part['default']}" if "default" in part else ""


def tools() -> str:
    """Every tool with its arguments."""
    parts: list[str] = []
    for tool in TOOLS.values():
        schema = tool.parameters
        parts.append(f"### `{tool.name}`\n\n{tool.description}\n")
        rows = [
            (
                f"`{name}`",
                part.get("type", "any"),
                _presence(name, schema),
                part["description"],
            )
            for name, part in schema["properties"].items()
        ]
        if rows:
            parts.append(_table(("argument", "type", "", "meaning"), rows))
    return "\n".join(parts)


def commands() -> str:
    """Every command of the command line."""
    import importlib

    import typer

    from hermes_rl.cli.main import GROUPS

    rows: list[tuple[str, str]] = []
    for group, (module_name, summary) in GROUPS.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue
        found = typer.main.get_group(module.app)
        if not found.commands:
            rows.append((f"`hermes-rl {group}`", summary))
        for name, command in found.commands.items():
            if not command.hidden:
                first = " ".join((command.help or "").split("\n\n")[0].split())
                rows.append((f"`hermes-rl {group} {name}`", re.sub(r"\[/?[a-z]*\]", "", first)))
    return _table(("command", "what it does"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "fields-env": lambda: fields_of("env"),
    "fields-openai": lambda: fields_of("openai"),
    "fields-tinker": lambda: fields_of("tinker"),
    "fields-run": lambda: fields_of("run"),
    "profiles": profiles,
    "tools": tools,
    "commands": commands,
}


def rewritten(text: str) -> str:
    """A document with its tables as the code has them now."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    """Write or check every document beside this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    outdated = 0
    for path in sorted(HERE.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            outdated += 1
            print(f"{path.name} {'is out of date' if check else 'written'}")
            if not check:
                path.write_text(after, encoding="utf-8")
    return int(check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
