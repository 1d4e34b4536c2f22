"""What a maintainer loses if these fail: a tree in which every part knows only what stands below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hermes_rl"

_BELOW_THE_PROCESSES = {"config", "errors", "parent_watch", "process_identity"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "parent_watch": set(),
    "process_identity": set(),
    "config": {"errors"},
    "engine": _BELOW_THE_PROCESSES,
    "trajectories": _BELOW_THE_PROCESSES,
    "environments": {*_BELOW_THE_PROCESSES, "trajectories"},
    "trainer": {*_BELOW_THE_PROCESSES, "trajectories"},
    "runs": {*_BELOW_THE_PROCESSES, "engine", "environments", "trainer", "trajectories"},
    "advisor": {"config", "errors"},
    "search": {*_BELOW_THE_PROCESSES, "runs", "environments", "advisor"},
    "agent": {*_BELOW_THE_PROCESSES, "runs", "environments", "search", "advisor", "engine"},
    "cli": {"config", "errors", "runs", "environments", "search", "advisor", "engine", "agent"},
    "dashboard": {"config", "errors", "runs", "search", "advisor"},
    "__main__": {"cli"},
    "__init__": set(),
}


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports, anywhere in it."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {
            match[1]
            for name in names
            if (match := re.match(r"hermes_rl\.([a-z_]+)", name)) and match[1] != "__version__"
        }
    return parts


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards_only(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is not a part of the design"
    beyond = imported_parts(path) - MAY_IMPORT[part] - {part}
    assert not beyond, f"{path.name} imports {sorted(beyond)}"


@pytest.mark.parametrize(
    ("importer", "allowed"),
    [("trainer", {"client", "wire"}), ("environments", {"client", "wire"})],
)
def test_only_the_client_of_the_api_server_is_shared(importer: str, allowed: set[str]) -> None:
    for path in (PACKAGE / importer).rglob("*.py"):
        for module in re.findall(r"hermes_rl\.trajectories\.(\w+)", path.read_text(encoding="utf-8")):
            assert module in allowed, f"{path.name} imports hermes_rl.trajectories.{module}"


def test_the_trainer_imports_no_torch() -> None:
    for path in (PACKAGE / "trainer").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_named_for_nothing(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc", "manager", "base"}


def test_no_two_test_files_share_a_name() -> None:
    tests = Path(__file__).resolve().parents[1]
    names = [path.name for path in tests.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names), "pytest imports test files by name"
