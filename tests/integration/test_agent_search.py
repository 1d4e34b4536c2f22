"""What an agent loses if these fail: a search that it starts, looks at, stops and learns from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.short_runs import SHORT, end_everything, short_workspace

from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import call
from hermes_rl.config import RunConfig, Workspace
from hermes_rl.search.store import SearchStore, list_search_ids


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = short_workspace(tmp_path, SHORT.replace("value = 4", "value = 2"))
    yield found
    for search_id in list_search_ids(found):
        if SearchStore(found, search_id).is_driven():
            call(AgentSession(found), "rl_stop_search", {"search_id": search_id})
    end_everything(found)


def ended(session: AgentSession, search_id: str) -> dict[str, Any]:
    """The search once it is over."""
    deadline = time.monotonic() + 400
    while True:
        found = call(session, "rl_check_search", {"search_id": search_id})
        assert "error" not in found, found
        if found["state"] != "running":
            return found
        assert found["check_again_in_seconds"] > 0
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def test_a_search_goes_on_by_itself_and_its_best_can_be_taken(workspace: Workspace) -> None:
    session = AgentSession(workspace)
    call(session, "rl_edit_config", {"field": "group_size", "value": 4})
    started = call(
        session,
        "rl_start_search",
        {"space": {"learning_rate": [2e-5, 6e-5], "batch_size": [16]}, "replicate": 1},
    )
    assert (started["planned_trials"], started["planned_replicates"]) == (2, 3), started
    assert started["set_in_every_trial"]["group_size"] == 4
    search_id = started["search_id"]
    found = ended(session, search_id)
    assert found["state"] == "completed", found
    # The default configuration is not in the space, so it is a trial of its own.
    assert found["finished_trials"] == 6
    assert found["check_again_in_seconds"] is None

    results = call(session, "rl_get_search_results")
    assert results["search_id"] == search_id
    best = results["best"]
    assert best["params"]["learning_rate"] in (2e-5, 4e-5, 6e-5)
    assert Path(results["report"]).is_file()
    config = RunConfig.from_yaml(workspace.run_dir(best["run_id"]) / "run.yaml")
    assert (config.env.total_steps, config.env.group_size) == (2, 4), "policy and edits hold in every trial"
    for name, value in best["params"].items():
        assert call(session, "rl_edit_config", {"field": name, "value": value})["value"] == value


def test_a_search_can_be_stopped(workspace: Workspace) -> None:
    session = AgentSession(workspace)
    started = call(session, "rl_start_search")
    assert started["planned_trials"] == 27, started
    stopped = call(session, "rl_stop_search", {"search_id": started["search_id"]})
    assert stopped["state"] == "stopped"
    listed = call(session, "rl_list_runs")["runs"]
    assert all(run["status"] in ("stopped", "completed", "failed") for run in listed)
