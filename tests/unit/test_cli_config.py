"""What an operator loses if these fail: seeing what is configured, where it comes from, and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hermes_rl.cli.config import app
from hermes_rl.config import build_run_config
from hermes_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    answer = CliRunner().invoke(app, list(arguments))
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.output


def line_of(field: str, text: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(field))


def test_show_says_where_each_value_comes_from(workspace: Path) -> None:
    (workspace / "policy.toml").write_text("[fields.lora_rank]\nvalue = 16\n")
    shown = run("show")
    assert line_of("learning_rate", shown)[:4] == ["learning_rate", "4e-05", "default", "may"]
    assert line_of("total_steps", shown)[2:4] == ["profile", "locked"]
    assert line_of("lora_rank", shown)[:4] == ["lora_rank", "16", "policy", "locked"]
    data = json.loads(run("show", "--json", "--profile", "qwen3-8b"))
    assert data["total_steps"] == data["total_steps"] | {"value": 2500, "source": "default", "locked": True}


def test_explain_says_what_a_field_accepts() -> None:
    shown = run("explain", "tinker.learning_rate")
    assert "a number from 0 to 1" in shown
    assert "may change" in shown
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        run("explain", "learning_rat")


def test_validate_checks_a_policy(workspace: Path) -> None:
    path = workspace / "other.toml"
    path.write_text("[fields.lora_rank]\nvalue = 16\n")
    shown = run("validate", str(path))
    assert "lora_rank = 16" in shown
    assert "lora_rank" not in shown.partition("may change")[2]
    path.write_text("[fields.lora_rank]\nvalue = 0\n")
    with pytest.raises(ConfigError, match="lora_rank"):
        run("validate", str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[own_fields.arithmetic_tinker.digit]\nmaximum = 3\n", "does not have: digit"),
        ("[own_fields.arithmetic_tinkr.digits]\nmaximum = 3\n", "no such environment"),
        ("environment = 'arithmetic_tinkr'\n", "none of that name"),
        ("environment = 'arithmetic_tinker'\nenvironments = ['gsm8k*']\n", "hides it"),
        ("profiles = ['qwen3-8b']\n[fields.total_steps]\nmaximum = 100\n", "leave out its default"),
    ],
)
def test_validate_finds_what_would_bind_nothing(workspace: Path, text: str, said: str) -> None:
    path = workspace / "other.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run("validate", str(path))


def test_the_rules_for_an_environment_hold_whatever_it_is_called_by(workspace: Path) -> None:
    (workspace / "policy.toml").write_text("[own_fields.arithmetic_tinker.digits]\nvalue = 3\n")
    assert line_of("digits", run("show", "-e", "ARITHMETIC_TINKER"))[:4] == [
        "digits",
        "3",
        "policy",
        "locked",
    ]


def test_validate_checks_the_configuration_of_a_run(workspace: Path) -> None:
    path = workspace / "best.yaml"
    path.write_text("learning_rate: 6.0e-05\nbatch_size: 32\n")
    assert "learning_rate = 6e-05" in run("validate", str(path))
    path.write_text("batch_size: 20\n")
    with pytest.raises(ConfigError, match="multiple"):
        run("validate", str(path))
    environment = SimpleNamespace(name="arithmetic_tinker", file_path="a.py", class_name="A")
    build_run_config(environment, overrides={"lora_rank": 8}).to_yaml(workspace / "run.yaml")
    assert "lora_rank = 8" in run("validate", str(workspace / "run.yaml"))
