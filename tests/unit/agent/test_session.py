"""What an agent loses if these fail: answers that it can use, and a selection that is its own."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.answers import answer, plain
from hermes_rl.agent.hermes_plugin import Conversations
from hermes_rl.agent.pacing import LONGEST_SECONDS, SHORTEST_SECONDS, STARTING_SECONDS, next_look
from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import TOOLS, call
from hermes_rl.agent.training import thinned
from hermes_rl.config import Workspace
from hermes_rl.runs.run_status import RunStatus

SUMS = """
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from pydantic import Field
class SumsConfig(BaseEnvConfig):
    digits: int = Field(2, ge=1, le=6)
class Sums(BaseEnv):
    name = "sums"
    env_config_cls = SumsConfig
    async def get_next_item(self): ...
    async def evaluate(self): ...
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.resolve(tmp_path)


@pytest.fixture
def session(workspace: Workspace) -> AgentSession:
    return AgentSession(workspace)


def test_the_schemas_say_what_each_argument_is() -> None:
    for tool in TOOLS.values():
        schema = tool.parameters
        json.dumps(schema)
        assert tool.description
        assert len(tool.description) < 1024, tool.name
        assert set(schema["required"]) <= set(schema["properties"])
        for name, part in schema["properties"].items():
            assert part.get("description"), f"{tool.name}.{name}"
            assert "type" in part or name == "value", f"{tool.name}.{name}"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rl_nothing", {}),
        ("rl_edit_config", {}),
        ("rl_edit_config", {"field": ["learning_rate"], "value": 1}),
        ("rl_edit_config", {"field": "learning_rate", "value": 1e-5, "force": True}),
        ("rl_edit_config", "learning_rate"),
        ("rl_check_status", {"run_id": 7}),
        ("rl_check_status", {"run_id": "../../etc"}),
        ("rl_check_status", {}),
        ("rl_list_runs", {"limit": -1}),
        ("rl_get_results", {"run_id": "none"}),
        ("rl_stop_training", {"run_id": "x" * 10_000}),
        ("rl_select_environment", {"name": "your_environment_name"}),
        ("rl_select_environment", {"name": "\ud800"}),
        ("rl_select_environment", {"name": "arithmetic_tinker", "profile": "qwen3-8b"}),
        ("rl_check_search", {"search_id": "s1"}),
        ("rl_start_search", {"space": {"total_steps": [1, 2]}}),
        ("rl_start_search", {"space": {"learning_rate": [5.0]}}),
        ("rl_start_search", {"preset": "best"}),
        ("rl_test_inference", {"models": ["https://elsewhere"]}),
        ("rl_test_inference", {"test_id": "../x"}),
    ],
)
def test_bad_input_is_answered_with_an_error_that_helps(session: AgentSession, name: str, given: Any) -> None:
    found = call(session, name, given)
    assert found["error"]
    assert "failed inside" not in found["error"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("value", "taken"), [("6e-5", 6e-5), (0.00006, 6e-5), ("0.00006", 6e-5)])
def test_numbers_are_understood_as_a_language_model_sends_them(
    session: AgentSession, value: Any, taken: float
) -> None:
    assert call(session, "rl_edit_config", {"field": "learning_rate", "value": value})["value"] == taken


def test_null_stands_for_what_is_left_out(session: AgentSession) -> None:
    assert "error" not in call(session, "rl_list_runs", {"limit": None})
    found = call(session, "rl_edit_config", {"field": "wandb_project", "value": None})
    assert found["value"] is None


def test_the_default_environment_is_selected_when_nobody_selects_one(session: AgentSession) -> None:
    assert "error" in call(session, "rl_select_environment", {"name": "your_environment_name"})
    found = call(session, "rl_edit_config", {"field": "batch_size", "value": 32})
    assert "arithmetic_tinker" in found["note"]
    assert session.next_run().config.run.environment == "arithmetic_tinker"
    assert session.next_run().note is None


def test_selecting_begins_again_from_the_defaults(session: AgentSession) -> None:
    call(session, "rl_edit_config", {"field": "batch_size", "value": 32})
    found = call(session, "rl_select_environment", {"name": "gsm8k_tinker"})
    assert found["dropped_edits"] == {"batch_size": 32}
    assert session.next_run().config.env.batch_size == 16


def test_a_refused_selection_changes_nothing(session: AgentSession) -> None:
    call(session, "rl_edit_config", {"field": "batch_size", "value": 32})
    call(session, "rl_select_environment", {"name": "nothing"})
    assert session.next_run().config.env.batch_size == 32


def test_two_sessions_do_not_disturb_each_other(workspace: Workspace) -> None:
    one, two = AgentSession(workspace), AgentSession(workspace)
    call(one, "rl_edit_config", {"field": "batch_size", "value": 32})
    assert two.next_run().config.env.batch_size == 16


def test_fields_that_contradict_each_other_leave_the_configuration_as_it_was(session: AgentSession) -> None:
    found = call(session, "rl_edit_config", {"field": "group_size", "value": 32})
    assert found["allowed"] == "group_size <= batch_size"
    assert "error" not in call(session, "rl_edit_config", {"field": "batch_size", "value": 64})
    assert "error" not in call(session, "rl_edit_config", {"field": "group_size", "value": 32})


def test_the_operator_can_narrow_after_an_edit_was_made(session: AgentSession) -> None:
    call(session, "rl_edit_config", {"field": "learning_rate", "value": 1e-3})
    (session.workspace.root / "policy.toml").write_text("[fields.learning_rate]\nmaximum = 1e-4\n")
    assert "learning_rate" in call(session, "rl_start_training")["error"]
    assert "learning_rate" in call(session, "rl_start_search")["error"]


def test_nothing_is_edited_or_started_under_a_damaged_policy(session: AgentSession) -> None:
    (session.workspace.root / "policy.toml").write_text("[fields.learning_rate\n")
    for name in ("rl_start_training", "rl_start_search", "rl_test_inference", "rl_get_current_config"):
        assert "policy.toml" in call(session, name)["error"], name
    edit = {"field": "learning_rate", "value": 1e-5}
    assert "policy.toml" in call(session, "rl_edit_config", edit)["error"]
    assert "error" not in call(session, "rl_list_runs"), "reading goes on"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "[fields.learning_rate]\nminimum = 1e-4\n[fields.batch_size]\nchoices = [32, 64]\n",
            "leave out its default",
        ),
        ("[own_fields.sums.digit]\nmaximum = 3\n", "does not have: digit"),
        ("[own_fields.sums.digits]\nmaximum = 1\n", "leave out its default"),
        ("[own_fields.sum.digits]\nmaximum = 3\n", r"own_fields.sum]"),
    ],
)
def test_nothing_is_edited_or_started_under_a_policy_that_means_nothing(
    session: AgentSession, policy: str, said: str
) -> None:
    (session.workspace.environments / "sums.py").write_text(SUMS)
    call(session, "rl_select_environment", {"name": "sums"})
    assert session.next_run().config.run.environment == "sums"
    (session.workspace.root / "policy.toml").write_text(policy)
    for edit in ({"field": "lora_rank", "value": 8}, {"field": "learning_rate", "value": 2e-4}):
        assert said in call(session, "rl_edit_config", edit)["error"]
    for name in ("rl_start_training", "rl_start_search", "rl_test_inference"):
        assert said in call(session, name)["error"], name
    assert said in call(session, "rl_select_environment", {"name": "sums"})["error"]
    assert "error" not in call(session, "rl_list_runs"), "reading goes on"
    (session.workspace.root / "policy.toml").unlink()
    assert session.next_run().config.tinker.lora_rank == 32


def test_an_environment_that_the_operator_misspelt_is_not_replaced_by_another(session: AgentSession) -> None:
    (session.workspace.root / "policy.toml").write_text('environment = "gsm8k_tinkr"\n')
    listed = call(session, "rl_list_environments")
    assert "gsm8k_tinkr" in listed["note"]
    assert not any(entry["default"] for entry in listed["environments"])
    refused = call(session, "rl_start_training")
    assert "gsm8k_tinkr" in refused["error"]
    assert refused["allowed"] == ["gsm8k_tinker"]
    assert "error" not in call(session, "rl_select_environment", {"name": "gsm8k_tinker"})
    assert session.next_run().config.run.environment == "gsm8k_tinker"


def test_environments_the_operator_hides_cannot_be_selected(session: AgentSession) -> None:
    (session.workspace.root / "policy.toml").write_text('environments = ["gsm8k*"]\n')
    listed = call(session, "rl_list_environments")["environments"]
    assert [entry["name"] for entry in listed] == ["gsm8k_tinker"]
    assert "error" in call(session, "rl_select_environment", {"name": "arithmetic_tinker"})
    assert session.next_run().config.run.environment == "gsm8k_tinker"


def test_a_search_cannot_reach_what_an_edit_cannot(session: AgentSession) -> None:
    (session.workspace.root / "policy.toml").write_text("[fields.learning_rate]\nmaximum = 1e-4\n")
    refused = call(session, "rl_start_search", {"space": {"learning_rate": "log:1e-5..1e-3"}})
    assert "learning_rate" in refused["error"]
    assert "locked" in call(session, "rl_start_search", {"space": {"lora_alpha": [1, 2]}})["error"]
    assert not list(session.workspace.searches.iterdir())


def test_what_json_cannot_hold_is_left_out() -> None:
    found = plain({"nan": math.nan, "inf": [math.inf], "path": Path("a"), "lone": "\ud800", 3: {4}})
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "nan": None,
        "inf": [None],
        "path": "a",
        "lone": "?",
        "3": [4],
    }


def test_no_secret_is_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret-value")
    text = (
        "sk-very-secret-value at http://127.0.0.1:1/r-0123456789abcdef0123456789abcdef/v1 "
        "with tml-abcdefghijkl from https://user:word@host/x"
    )
    found = plain({"log_tail": text})["log_tail"]
    for secret in ("very-secret", "0123456789abcdef", "abcdefghijkl", "user:word"):
        assert secret not in found


def test_the_key_of_a_model_is_in_no_answer_whatever_its_variable_is_called(
    session: AgentSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_MODEL", "recognisable-value")
    (session.workspace.root / "policy.toml").write_text(
        '[models.big]\nbase_url = "http://127.0.0.1:9/v1"\nmodel_name = "m"\napi_key_env = "BIG_MODEL"\n'
    )
    found = call(session, "rl_edit_config", {"field": "loss_fn", "value": "recognisable-value"})
    assert "loss_fn cannot be '<secret>'" in found["error"]


def test_a_fault_inside_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    def fault() -> dict[str, Any]:
        raise ZeroDivisionError

    assert "ZeroDivisionError" in answer(fault, "rl_x")["error"]
    assert "rl_x failed" in caplog.text


def test_a_curve_is_thinned_between_its_ends() -> None:
    found = thinned(list(range(100)), [None, *map(float, range(1, 100))], 5)
    assert found["step"][0] == 1
    assert found["step"][-1] == 99
    assert len(found["step"]) == len(found["value"]) == 5
    assert thinned([1, 2], [0.5, None], 40) == {"step": [1], "value": [0.5]}


def status(step: int, seconds: float, state: str = "running") -> RunStatus:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return RunStatus(
        run_id="r",
        environment="e",
        profile="p",
        seed=0,
        status=state,
        step=step,
        total_steps=100,
        logs={},
        run_dir="",
        created_at=now,
        started_at=now - timedelta(seconds=seconds),
    )


def test_the_next_look_follows_the_speed_of_the_run() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert next_look(status(0, 5), now) == STARTING_SECONDS
    assert next_look(status(50, 100), now) == 20
    assert next_look(status(99, 100), now) == SHORTEST_SECONDS
    assert next_look(status(1, 100_000), now) == LONGEST_SECONDS
    assert next_look(status(100, 100, "completed"), now) is None


def test_a_conversation_that_goes_on_under_a_new_id_keeps_its_selection(workspace: Workspace) -> None:
    parents = {"second": "first"}
    conversations = Conversations(parents.get)
    conversations._sessions["first"] = AgentSession(workspace)
    call(conversations.session("first"), "rl_edit_config", {"field": "batch_size", "value": 32})
    assert conversations.session("second").next_run().config.env.batch_size == 32
    call(conversations.session("second"), "rl_edit_config", {"field": "batch_size", "value": 64})
    assert conversations.session("first").next_run().config.env.batch_size == 32
