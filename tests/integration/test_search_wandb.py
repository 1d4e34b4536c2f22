"""W&B Sweeps with the real client against a stand-in for the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweep_service import ENTITY, SweepService
from test_search_runs import hermes, newest, wait_until, workspace  # noqa: F401

from hermes_rl import runs
from hermes_rl.config import RunConfig, Workspace
from hermes_rl.search.store import list_search_ids
from hermes_rl.search.trial import TrialRecord

TINY = ["--set", "total_steps=2", "--set", "steps_per_eval=1", "--set", "num_requests_for_eval=16"]
TINY += ["--set", "group_size=4", "--set", "batch_size=8", "--set", "wandb_project=tuning"]
RATES = "learning_rate=2e-5,6e-5"


def use(service: SweepService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have W&B's client talk to the stand-in."""
    monkeypatch.setenv("WANDB_BASE_URL", service.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def test_a_sweep_chooses_and_each_trial_is_a_run_of_the_sweep(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [{"learning_rate": 6e-5, "total_steps": 2}, {"learning_rate": 2e-5, "total_steps": 2}]
    with SweepService(wanted) as service:
        use(service, monkeypatch)
        done = hermes(
            workspace, "search", "start", "--strategy", "wandb", "--sweep-method", "grid",
            "--space", RATES, "--replicate", "0", *TINY,
        )  # fmt: skip
        store = newest(workspace)
        records = store.records()
        assert store.load().sweep == f"{ENTITY}/tuning/sweep0"
        sweep = service.sweeps["sweep0"]
        assert sweep["method"] == "grid"
        assert sweep["metric"] == {"name": "eval/eval_percent_correct", "goal": "maximize"}
        assert sweep["parameters"]["learning_rate"]["values"] == [2e-5, 6e-5]
        assert sweep["parameters"]["total_steps"]["value"] == 2
        # The service chose, in its order; then the default was tried, outside the sweep.
        assert [r.state for r in records] == ["completed"] * 3, done.stdout
        assert [r.params["learning_rate"] for r in records] == [6e-5, 2e-5, 4e-5]
        assert [r.stage for r in records] == ["search", "search", "default"]
        for record in records[:2]:
            assert record.run_id is not None
            swept = service.runs[record.run_id]
            assert swept["joined"] == "sweep0"
            assert swept["exit_code"] == 0
            logged: dict[str, Any] = swept["logged_config"]
            assert logged["learning_rate"]["value"] == record.params["learning_rate"]
            curve = {row["step"]: row["eval/eval_percent_correct"] for row in swept["history"] if
                     "eval/eval_percent_correct" in row}  # fmt: skip
            assert curve == {p.step: p.value for p in record.points("eval_percent_correct")}
        config = RunConfig.from_yaml(workspace.run_dir(records[2].run_id or "") / "run.yaml")
        assert config.tinker.wandb_sweep is None
        assert not [line for line in service.unknown if "Sweep" in line or "Agent" in line]


def test_the_winner_of_a_sweep_is_replicated_outside_it_and_more_can_be_asked_for_later(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SweepService([{"learning_rate": 6e-5, "total_steps": 2}]) as service:
        use(service, monkeypatch)
        done = hermes(
            workspace, "search", "start", "--strategy", "wandb", "--space", RATES, "--trials", "1",
            "--replicate", "2", "--replicate-top", "1", *TINY,
        )  # fmt: skip
        store = newest(workspace)

        def replicates() -> list[TrialRecord]:
            return [r for r in store.records() if r.stage == "replicate"]

        assert [(r.state, r.reason) for r in store.records()] == [("completed", None)] * 6, done.stdout
        assert [(r.replicate_of, r.params["learning_rate"]) for r in replicates()] == [
            (0, 6e-5),
            (1, 4e-5),
        ] * 2
        assert len({r.seed for r in store.records()}) == 3
        hermes(workspace, "search", "resume", store.search_id, "--replicate", "+1")
        assert len(replicates()) == 6
        assert {r.state for r in replicates()} == {"completed"}
        assert len({r.seed for r in replicates()}) == 3
        for record in replicates():
            # A run of the same project; the sweep never hears of it, so it cannot steer by it.
            assert record.sweep_run is None
            assert "joined" not in service.runs[record.run_id or ""]
        assert list(service.sweeps) == ["sweep0"]
        results = json.loads(hermes(workspace, "search", "results", store.search_id, "--json").stdout)
        assert "over 3 fresh seeds" in results["replication"]["sentence"]


def test_a_sweep_that_exists_is_joined_with_its_own_space_and_its_word_to_stop_is_heard(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with SweepService([{"learning_rate": 6e-5}, {"learning_rate": 4e-5}]) as service:
        use(service, monkeypatch)
        service.sweeps["existing"] = {
            "method": "random",
            "metric": {"name": "eval/eval_percent_correct", "goal": "maximize"},
            "parameters": {
                "learning_rate": {"values": [4e-5, 6e-5]},
                "total_steps": {"value": 400},
                "steps_per_eval": {"value": 1},
                "num_requests_for_eval": {"value": 16},
                "group_size": {"value": 4},
                "batch_size": {"value": 8},
            },
        }
        hermes(
            workspace, "search", "start", "--strategy", "wandb", "--sweep", "tuning/existing",
            "--parallel", "1", "--replicate", "0", "--detach",
        )  # fmt: skip
        store = newest(workspace)
        wait_until(lambda: any(r.step > 0 for r in runs.list_runs(workspace, store.search_id)), "a step")
        wait_until(lambda: store.records()[0].run_id is not None, "its record")
        first = store.records()[0].run_id or ""
        service.stop.add(first)
        wait_until(lambda: store.records()[0].state == "pruned", "the stop")
        assert "stopped by the W&B sweep" in (store.records()[0].reason or "")
        assert list(service.sweeps) == ["existing"]
        assert store.load().definition.overrides["total_steps"] == 400
        # Stopped in the middle of the second, it goes on with it, in the same run of the sweep.
        wait_until(lambda: any(r.trial == 1 and r.run_id for r in store.records()), "the second")
        second = store.records()[1].run_id
        hermes(workspace, "search", "stop", store.search_id)
        assert store.records()[1].state == "stopped"
        hermes(workspace, "search", "resume", store.search_id, "--detach")
        wait_until(lambda: store.records()[1].state == "running", "the second again")
        assert store.records()[1].run_id == second
        asked = len(service.operations)
        wait_until(lambda: "Heartbeat" in service.operations[asked:], "a heartbeat")
        hermes(workspace, "search", "stop", store.search_id)
        assert len(service.runs) == 2


def test_without_a_key_a_sweep_is_refused_before_anything_is_made(
    workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    before = list_search_ids(workspace)
    done = hermes(workspace, "search", "start", "--strategy", "wandb", "--space", RATES, check=False)
    assert done.returncode == 2
    assert "WANDB_API_KEY" in done.stderr
    assert list_search_ids(workspace) == before


def test_a_sweep_file_can_be_given_to_the_service(
    workspace: Workspace,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"method": "bayes", "parameters": {"lora_rank": {"values": [8, 16]}}}))
    done = hermes(workspace, "search", "start", str(file), "--strategy", "wandb", "--dry-run")
    assert "strategy wandb" in done.stdout
