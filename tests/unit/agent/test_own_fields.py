"""What people lose if these fail: an environment's own fields that can be set, checked, and kept secret."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hermes_rl import runs
from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import TOOLS, call
from hermes_rl.cli.main import app
from hermes_rl.config import RunConfig, Workspace, read_overrides
from hermes_rl.environments.discovery import find
from hermes_rl.environments.inspection import environment_fields
from hermes_rl.errors import ConfigError
from hermes_rl.search.definition import define_search
from hermes_rl.search.report import as_json
from hermes_rl.search.store import SearchStore
from hermes_rl.search.summary import summarize
from hermes_rl.search.sweeps import to_sweep

SECRET = "sk-recognisable-judge-key"
SOURCE = """
from typing import Annotated, Literal
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

class JudgedConfig(BaseEnvConfig):
    judge_api_key: str = Field("sk-default-of-the-file", description="Key of the judge.")
    timeout: int = Field(5, ge=1, le=60, description="Seconds a verifier may take.")
    seed: int = 0
    sizes: list[int] = [1, 2]
    ranges: list[Annotated[float, Field(gt=0, le=1)]] = Field([0.5], min_length=1, max_length=3)
    signs: list[Literal["+", "-"]] | None = None
    weights: dict[str, float] = {}
    pairs: list[tuple[int, int]] = []
    loose: list = []
    mixed: list[int | str] = []
    task: str = Field("easy", json_schema_extra={"enum": ["easy", "hard"]})

class Judged(BaseEnv):
    name = "judged"
    env_config_cls = JudgedConfig
    @classmethod
    def config_init(cls):
        return JudgedConfig(), [APIServerConfig()]
    async def get_next_item(self): ...
    async def evaluate(self): ...
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What is remembered of the environment's fields, and its folder."""
    made = Workspace.resolve(tmp_path_factory.mktemp("imported"))
    folder = tmp_path_factory.mktemp("environments")
    (folder / "judged.py").write_text(SOURCE)
    environment_fields(made, find([folder], "judged"))
    return made.root / "cache", folder


@pytest.fixture
def workspace(imported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = Workspace.resolve(tmp_path)
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("hermes_rl.runs.lifecycle._supervise", lambda *_: None)
    monkeypatch.setattr("hermes_rl.search.drive.detach", lambda *_: 0)
    remembered, folder = imported
    shutil.copytree(remembered, tmp_path / "cache")
    monkeypatch.setenv("HERMES_RL_ENVIRONMENTS", str(folder))
    return made


@pytest.fixture
def session(workspace: Workspace) -> AgentSession:
    made = AgentSession(workspace)
    assert "error" not in call(made, "rl_select_environment", {"name": "judged"})
    return made


def edit(session: AgentSession, field: str, value: Any) -> dict[str, Any]:
    return call(session, "rl_edit_config", {"field": field, "value": value})


def command(*arguments: str) -> str:
    answer = CliRunner().invoke(app, list(arguments))
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_secret_of_the_policy_is_in_no_answer(session: AgentSession) -> None:
    workspace = session.workspace
    (workspace.root / "policy.toml").write_text(f'[own_fields.judged.judge_api_key]\nvalue = "{SECRET}"\n')
    answers = {name: call(session, name) for name in ("rl_get_current_config", "rl_start_training")}
    assert answers["rl_start_training"]["overrides"] == {"judge_api_key": "<secret>"}
    for name in ("rl_check_status", "rl_list_runs", "rl_get_results", "rl_start_search", "rl_check_search"):
        answers[name] = call(session, name)
        assert "error" not in answers[name], answers[name]
    assert answers["rl_check_status"]["overrides"] == {"judge_api_key": "<secret>"}
    assert answers["rl_start_search"]["set_in_every_trial"]["judge_api_key"] == "<secret>"
    answers["refused"] = edit(session, "judge_api_key", "another-secret")
    said = json.dumps(answers)
    assert SECRET not in said
    assert "sk-default-of-the-file" not in said

    # The run and the search have it all the same, in files that only their owner reads.
    assert session.next_run().config.value("judge_api_key") == SECRET
    run = runs.list_runs(workspace)[0]
    holders = [path for path in workspace.root.rglob("*") if path.is_file() and _holds(path)]
    assert workspace.run_dir(run.run_id) / "run.yaml" in holders
    assert {path.name for path in holders} == {"policy.toml", "run.yaml", "search.json"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders if path.name != "policy.toml")


def _holds(path: Path) -> bool:
    return SECRET.encode() in path.read_bytes()


def test_a_secret_set_on_the_command_line_is_not_shown(workspace: Workspace, tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text(f"judge_api_key: {SECRET}\n")
    shown = command("run", "start", "judged", "--config", str(given), "--dry-run")
    assert "judge_api_key: <secret>" in shown
    shown += command("run", "start", "judged", "--config", str(given))
    shown += command("run", "status") + command("run", "status", "--json") + command("run", "list", "--json")
    shown += command("config", "validate", str(given), "-e", "judged")
    (workspace.root / "policy.toml").write_text(f'[own_fields.judged.judge_api_key]\nvalue = "{SECRET}"\n')
    shown += command("config", "show", "-e", "judged") + command("config", "show", "-e", "judged", "--json")
    shown += command("config", "explain", "judge_api_key", "-e", "judged")
    shown += command("config", "validate", str(workspace.root / "policy.toml"))
    shown += command("environments", "show", "judged") + command("environments", "show", "judged", "--json")
    assert SECRET not in shown
    assert "sk-default-of-the-file" not in shown


def test_a_secret_reaches_neither_a_report_nor_a_sweep(workspace: Workspace) -> None:
    given: dict[str, Any] = {"environment": "judged", "space": {"learning_rate": [1e-5, 2e-5]}}
    definition = define_search(given | {"overrides": {"judge_api_key": SECRET, "weights": {"a": 1}}})
    store = SearchStore.create(workspace, definition, {})
    assert store.load().definition.overrides["judge_api_key"] == SECRET
    assert SECRET not in as_json(store, summarize(store))
    assert set(to_sweep(definition)["parameters"]) == {"learning_rate", "weights"}


def test_a_secret_is_not_sent_to_wandb(session: AgentSession, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from hermes_rl.trainer.tracking import Tracker

    (session.workspace.root / "policy.toml").write_text(
        f'[own_fields.judged.judge_api_key]\nvalue = "{SECRET}"\n[fields.wandb_project]\nvalue = "p"\n'
    )
    sent: dict[str, Any] = {}
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", lambda **options: sent.update(options))
    Tracker(session.workspace.root, session.next_run().config).close()
    assert sent["config"]["env"]["judge_api_key"] == "<secret>"
    assert sent["config"]["tinker"]["lora_rank"] == 32
    assert SECRET not in json.dumps(sent, default=str)


def test_a_field_that_shares_a_name_with_the_catalogue_is_reached_by_its_section(
    session: AgentSession, tmp_path: Path
) -> None:
    shown = call(session, "rl_get_current_config")
    assert shown["tunable"]["env.timeout"]["value"] == 5
    assert shown["locked"]["timeout"]["value"] == 3600
    assert edit(session, "env.timeout", 9)["field"] == "env.timeout"
    assert "locked" in edit(session, "timeout", 9)["error"]
    assert "locked" in edit(session, "openai.timeout", 9)["error"]
    assert "env.timeout" in edit(session, "env.timeout", 61)["error"]
    config = session.next_run().config
    assert (config.value("env.timeout"), config.value("timeout")) == (9, 3600)
    assert config.env.model_dump()["timeout"] == 9

    path = tmp_path / "run.yaml"
    config.to_yaml(path)
    assert RunConfig.from_yaml(path) == config
    assert read_overrides(path)["env.timeout"] == 9
    assert read_overrides(path)["timeout"] == 3600

    policy = "[own_fields.judged.timeout]\nvalue = 7\n[fields.timeout]\nvalue = 60\n"
    (session.workspace.root / "policy.toml").write_text(policy)
    assert "locked" in call(session, "rl_start_training")["error"]
    call(session, "rl_select_environment", {"name": "judged"})
    config = session.next_run().config
    assert (config.value("env.timeout"), config.value("timeout")) == (7, 60)


def test_the_listing_says_how_a_field_is_set(workspace: Workspace) -> None:
    shown = command("environments", "show", "judged")
    lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert "env.timeout" in lines
    assert not {"timeout", "seed"} & set(lines)
    assert "--seed" in shown
    yaml = command("run", "start", "judged", "--set", "env.timeout=8", "--seed", "3", "--dry-run")
    assert "  timeout: 8\n" in yaml
    assert "  timeout: 3600\n" in yaml
    for name in ("seed", "run.seed", "env.seed"):
        with pytest.raises(ConfigError) as caught:
            command("run", "start", "judged", "--set", f"{name}=1", "--dry-run")
        assert "--seed" in str(caught.value), name
    assert "--set env.timeout=VALUE" in command("config", "explain", "env.timeout", "-e", "judged")
    assert "--seed VALUE" in command("config", "explain", "seed")


@pytest.mark.parametrize(
    ("field", "value", "taken"),
    [
        ("sizes", ["3", 4.0], [3, 4]),
        ("sizes", "[5]", [5]),
        ("ranges", [1, 0.25], [1.0, 0.25]),
        ("signs", ["+"], ["+"]),
        ("signs", None, None),
        ("weights", {"a": "0.5"}, {"a": 0.5}),
        ("pairs", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        ("loose", [1, "a", None], [1, "a", None]),
        ("mixed", [1, "a"], [1, "a"]),
        ("task", "hard", "hard"),
    ],
)
def test_elements_are_taken_in_their_own_type(
    session: AgentSession, accepts: Callable[[RunConfig], Any], field: str, value: Any, taken: Any
) -> None:
    assert edit(session, field, value)["value"] == taken
    accepts(session.next_run().config)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("sizes", [1, "many"], "a list, each a whole number"),
        ("sizes", [1.5], "a list, each a whole number"),
        ("sizes", [True], "a list, each a whole number"),
        ("ranges", [2.0], "each a number above 0 to 1"),
        ("ranges", [], "at least 1 long"),
        ("ranges", [0.1] * 4, "at most 3 long"),
        ("signs", ["*"], "one of '+', '-'"),
        ("weights", {"a": "heavy"}, "each value a number"),
        ("pairs", [[1, 2, 3]], "at most 2 long"),
        ("task", "impossible", "one of 'easy', 'hard'"),
    ],
)
def test_elements_that_the_environment_would_refuse_are_refused(
    session: AgentSession, field: str, value: Any, allowed: str
) -> None:
    refused = edit(session, field, value)
    assert field in refused["error"]
    assert allowed in refused["allowed"]
    assert session.next_run().overrides == {}


@pytest.fixture
def accepts() -> Callable[[RunConfig], Any]:
    """What the environment's process does with a configuration before it begins."""
    from hermes_rl.environments.loading import Endpoints, env_values, load_class

    def accept(config: RunConfig) -> Any:
        default, _ = load_class(Path(config.run.environment_file), "Judged").config_init()
        endpoints = Endpoints("http://127.0.0.1:1", "http://127.0.0.1:1/v1", "key")
        return type(default)(**env_values(default, config, endpoints))

    return accept


def test_a_generator_that_reasoning_gym_does_not_have_is_refused_when_it_is_set(workspace: Workspace) -> None:
    session = AgentSession(workspace)
    call(session, "rl_select_environment", {"name": "reasoning_gym_tinker"})
    refused = edit(session, "dataset", "spell_backwards")
    assert "spell_backwards" in refused["error"]
    assert "spell_backward" in refused["allowed"]
    assert len(edit(session, "dataset", "nonsense-without-any-likeness")["allowed"]) > 100
    assert edit(session, "dataset", "spell_backward")["value"] == "spell_backward"


HUGE = {"int": 10**5000, "negative": -(10**5000), "list": [10**5000], "dict": {"a": 10**5000}}
"""Python writes no integer of more than 4,300 digits."""


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    "field", ["lora_rank", "learning_rate", "wandb_name", "loss_fn", "sizes", "use_wandb"]
)
def test_a_number_too_long_to_be_written_is_refused(session: AgentSession, field: str, value: str) -> None:
    refused = edit(session, field, HUGE[value])
    assert "failed inside" not in refused["error"]
    assert field in refused["error"]
    assert len(refused["error"]) < 300


@pytest.mark.parametrize("value", HUGE)
def test_a_number_too_long_to_be_written_is_refused_by_every_tool(session: AgentSession, value: str) -> None:
    for name, tool in TOOLS.items():
        for argument in tool.request.model_fields:
            refused = call(session, name, {argument: HUGE[value]})
            assert "failed inside" not in refused.get("error", ""), (name, argument, refused)
    nested = {"space": {"learning_rate": HUGE[value], "batch_size": {"int": [1, HUGE[value]]}}}
    refused = call(session, "rl_start_search", nested)
    assert "failed inside" not in refused["error"], refused
