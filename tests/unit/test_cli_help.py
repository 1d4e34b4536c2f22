"""What a person at a shell loses if these fail: examples and commands that work when they are pasted."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hermes_rl.cli.console import print_error
from hermes_rl.cli.follow import print_end
from hermes_rl.cli.main import GROUPS, app
from hermes_rl.config import Workspace
from hermes_rl.config.invocation import command, program
from hermes_rl.environments.discovery import discover
from hermes_rl.errors import HermesRLError
from hermes_rl.runs.run_status import RunStatus


def commands() -> Iterator[tuple[str, str, Any]]:
    """Every subcommand: its group, its name, itself."""
    for group, (module, _) in GROUPS.items():
        for name, found in typer.main.get_group(importlib.import_module(module).app).commands.items():
            yield group, name, found


def examples(help_text: str | None) -> list[str]:
    return re.findall(r"^\s*(?:eval \"\$\()?(hermes-rl [^\n)>]*)", help_text or "", re.MULTILINE)


COMMANDS = [pytest.param(*found, id=" ".join(found[:2])) for found in commands()]


@pytest.mark.parametrize(("group", "name", "found"), COMMANDS)
def test_every_example_is_a_command_that_is_understood(group: str, name: str, found: Any) -> None:
    shown = examples(found.help)
    if group in ("run", "search"):
        assert shown, f"`{group} {name} --help` has no example"
    for example in shown:
        words = shlex.split(example)
        assert words[:3] == ["hermes-rl", group, name]
        found.make_context(name, words[3:])  # raises for an option or argument that there is not


def test_every_environment_of_an_example_exists(tmp_path: Path) -> None:
    there = {environment.name for environment in discover(Workspace.resolve(tmp_path).environments_dirs)}
    texts = [found.help or "" for _, _, found in commands()]
    named = re.findall(r"hermes-rl run start ([\w-]+)|(?:-e|--environment) ([\w-]+)", "\n".join(texts))
    names = {one or other for one, other in named} - {"ENVIRONMENT"}
    assert names
    assert names <= there


def status(root: Path, state: str) -> RunStatus:
    return RunStatus(
        run_id="20260101-000000-abcd",
        environment="e",
        profile="p",
        seed=0,
        status=state,
        total_steps=100,
        logs={},
        run_dir=str(root / "runs" / "20260101-000000-abcd"),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_a_command_to_be_copied_names_its_workspace_where_another_would_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Workspace.resolve(tmp_path / "my workspace")
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(mine.root))
    assert command(mine, "run", "list") == shlex.join([program(), "run", "list"])
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path / "other"))
    assert command(mine, "run", "list") == shlex.join(
        [program(), "run", "list", "--workspace", str(mine.root)]
    )
    monkeypatch.delenv("HERMES_RL_WORKSPACE")
    monkeypatch.chdir(mine.root)
    assert "--workspace" in command(mine, "run", "list"), "it is not called tinker-atropos"


@pytest.mark.parametrize("state", ["completed", "failed", "stopped"])
def test_the_end_of_a_run_says_how_to_go_on_in_its_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path / "other"))
    console = Console(file=io.StringIO(), width=40)
    print_end(console, status(tmp_path / "mine", state))
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if ": " in line][-2:]
    expected = {"completed": ["results"], "failed": ["logs", "resume"], "stopped": ["resume"]}[state]
    for line, verb in zip(lines[-len(expected) :], expected, strict=True):
        place = ["--workspace", str(tmp_path / "mine")]
        run_id = "20260101-000000-abcd"
        assert line.partition(": ")[2] == shlex.join([program(), "run", verb, run_id, *place])


def test_a_hint_names_the_command_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hermes-rl").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert program() == "bin/hermes-rl"
    print_error(HermesRLError("No.", hint="`hermes-rl run list` shows them; hermes-rl is installed."))
    assert "`bin/hermes-rl run list` shows them; hermes-rl is installed" in capsys.readouterr().err


def test_nothing_to_list_says_what_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path / "other"))
    mine = str(tmp_path / "mine")
    for words in (("run", "list"), ("search", "list")):
        answer = CliRunner().invoke(app, [*words, "--workspace", mine])
        assert answer.exit_code == 0, answer.output
        assert f"--workspace {mine}" in answer.output.replace("\n", "")


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["mcp", "--http", "--port", str(port), "--workspace", str(tmp_path)]
        answer = CliRunner().invoke(app, arguments)
    assert isinstance(answer.exception, HermesRLError)
    assert answer.exception.message == f"Port {port} cannot be used: Address already in use."
    assert "--port" in str(answer.exception.hint)
    assert not (tmp_path / "mcp-token").exists()
