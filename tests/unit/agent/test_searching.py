"""What an operator loses if these fail: a policy that an agent's searches keep to as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.search_simulation import search

from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import TOOLS, call
from hermes_rl.config import Workspace

POLICY = """
[fields.batch_size]
choices = [16, 64]
[fields.learning_rate]
choices = [0.00001, 0.00004, 0.0001]
[fields.group_size]
maximum = 8
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSession:
    monkeypatch.setattr("hermes_rl.search.drive.detach", lambda *_: 0)  # made, but not started
    (tmp_path / "policy.toml").write_text(POLICY)
    session = AgentSession(Workspace.resolve(tmp_path))
    assert "error" not in call(session, "rl_select_environment", {"name": "arithmetic_tinker"})
    return session


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"batch_size": {"int": [16, 64], "step": 8}}, "24"),
        ({"batch_size": {"int": [16, 64]}}, "17"),
        ({"batch_size": {"log_int": [16, 64]}}, "17"),
        ({"batch_size": [16, 32]}, "32"),
        ({"learning_rate": "log:0.00001..0.0001"}, "continuous"),
        ({"learning_rate": [0.00001, 0.00002]}, "2e-05"),
        ({"group_size": "int:4..16:4"}, "16"),
        ({"batch_size": {"int": [16, 64], "step": "8"}}, "step"),
        ({"batch_size": {"int": [16, 64], "when": 5}}, "condition"),
    ],
)
def test_a_search_may_only_set_what_could_be_set_by_hand(
    session: AgentSession, space: dict[str, Any], reason: str
) -> None:
    answer = call(session, "rl_start_search", {"space": space, "strategy": "random", "trials": 2})
    assert reason in answer["error"], answer
    assert "fault of hermes-rl" not in str(answer)
    assert not list(session.workspace.searches.glob("*"))


@pytest.mark.parametrize(
    "space",
    [
        {"batch_size": {"int": [16, 64], "step": 48}},
        {"batch_size": [16, 64], "learning_rate": [0.00001, 0.0001]},
        {"group_size": {"int": [4, 8]}},
    ],
)
def test_what_the_policy_allows_is_searched(session: AgentSession, space: dict[str, Any]) -> None:
    answer = call(session, "rl_start_search", {"space": space, "strategy": "random", "trials": 2})
    assert "error" not in answer, answer
    assert answer["planned_trials"] == 2


def test_an_agent_can_search_a_space_of_many_points_and_constrain_it_by_what_it_does_not_search(
    session: AgentSession,
) -> None:
    given = {
        "space": {
            "group_size": "int:2..8",
            "lora_rank": "int:4..128",
            "num_requests_for_eval": "int:32..512",
        },
        "strategy": "tpe",
        "constraints": ["batch_size % group_size == 0"],
    }
    answer = call(session, "rl_start_search", given)
    assert "error" not in answer, answer
    assert answer["planned_trials"] == 24


def test_a_tool_that_says_it_changes_nothing_changes_nothing(tmp_path: Path) -> None:
    store, _, loop = search(tmp_path, space={"batch_size": [16, 32]})
    loop.run()
    session = AgentSession(store.workspace)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in store.folder.rglob("*") if path.name != "lock"}

    for name in ("rl_check_search", "rl_get_search_results"):
        before = files()
        assert "error" not in call(session, name, {"search_id": store.search_id})
        assert TOOLS[name].read_only == (files() == before)
