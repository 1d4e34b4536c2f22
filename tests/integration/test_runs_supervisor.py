"""The supervisor with real processes: what starts, what ends a run, what is left behind (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.config.workspace import STATE_URL_VARIABLE
from hermes_rl.errors import ConfigError, HermesRLError, UnknownRunError, WorkspaceError
from hermes_rl.process_identity import process_mark, processes_with
from hermes_rl.runs import lifecycle
from hermes_rl.runs.run_status import RUN_ID_VARIABLE, RunStatus
from hermes_rl.runs.store import open_store

STAND_INS = Path(__file__).parent / "run_stand_ins"
MODULES = {role: f"stand_in_{role}" for role in ("api", "trainer", "env")}
SECRET = "tml-a-secret-of-the-user"
PATIENCE = 180.0
"""Seconds within which anything comes to pass, however busy the machine is."""


class Runs:
    """Starts runs made of stand-ins in one workspace."""

    def __init__(self, root: Path) -> None:
        self.workspace = Workspace.resolve(root)
        self.started: list[str] = []

    def start(self, **options: Any) -> str:
        fields = {"base_url": "http://127.0.0.1:9", "total_steps": options.pop("total_steps", 5)}
        fields |= {name: options.pop(name) for name in list(options) if name.startswith("max_seconds_")}
        environment = SimpleNamespace(name="stand_in", file_path="/none", class_name="None")
        config = build_run_config(environment, overrides=fields)
        run_id = runs.start(self.workspace, config, modules=MODULES, **options)
        self.started.append(run_id)
        return run_id

    def status(self, run_id: str) -> RunStatus:
        return runs.status(self.workspace, run_id)

    def wait(self, run_id: str) -> RunStatus:
        status = runs.wait(self.workspace, run_id, timeout=PATIENCE)
        assert status.is_final, status
        return status

    def until(self, run_id: str, condition: Callable[[RunStatus], Any]) -> RunStatus:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            status = self.status(run_id)
            if condition(status):
                return status
            assert not status.is_final, status
            time.sleep(0.02)
        raise AssertionError(f"never came: {self.status(run_id)}")

    def running(self, run_id: str) -> RunStatus:
        return self.until(run_id, lambda status: status.status == "running" and status.step > 0)

    def until_nothing_is_left(self, run_id: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.leftovers(run_id):
            assert time.monotonic() < deadline, self.leftovers(run_id)
            time.sleep(0.02)

    def log(self, run_id: str, role: str) -> str:
        return Path(self.status(run_id).logs[role]).read_text()

    def leftovers(self, run_id: str) -> list[int]:
        return processes_with(RUN_ID_VARIABLE, run_id)

    def supervisor(self, run_id: str) -> int:
        return open_store(self.workspace.state_url).run(run_id).supervisor_pid


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    monkeypatch.setenv("HERMES_RL_FORK_SERVER", "0")
    monkeypatch.setenv("WANDB_API_KEY", "another-secret")
    made = Runs(tmp_path / "work space")
    yield made
    for run_id in made.started:
        runs.stop(made.workspace, run_id)
        assert not made.leftovers(run_id)


class Hold:
    """Keeps the stand-in of a trainer from going past a step, so that a test meets it there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def at(self, step: int) -> None:
        self._file.write_text(str(step))

    def release(self) -> None:
        self._file.unlink()


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    monkeypatch.setenv("STAND_IN_HOLD", str(tmp_path / "hold"))
    return Hold(tmp_path / "hold")


def _pids(status: RunStatus) -> dict[str, int]:
    return {process.role: process.pid for process in status.processes if process.pid}


def test_a_run_completes_and_leaves_its_results_and_nothing_else(stand_ins: Runs) -> None:
    run_id = stand_ins.start()
    status = stand_ins.wait(run_id)
    assert (status.status, status.step, status.total_steps) == ("completed", 5, 5)
    assert status.reward_mean == 1.0
    assert {process.role: process.state for process in status.processes} == {
        "api": "stopped",
        "trainer": "exited",
        "env": "exited",
    }
    assert not stand_ins.leftovers(run_id)
    results = runs.results(stand_ins.workspace, run_id)
    assert results["curves"]["step"] == [1, 2, 3, 4, 5]
    assert results["best_evaluation"]["eval_count"] == 256


def test_the_status_has_every_field_before_the_first_step(stand_ins: Runs, hold: Hold) -> None:
    hold.at(0)
    run_id = stand_ins.start()
    status = stand_ins.status(run_id)
    assert status.status in ("starting", "running")
    assert (status.step, status.total_steps) == (0, 5)
    assert [process.role for process in status.processes] == ["api", "trainer", "env"]
    assert set(status.logs) == {"api", "trainer", "env", "supervisor"}
    hold.release()
    assert stand_ins.wait(run_id).status == "completed"


def test_a_running_run_shows_processor_time_and_memory_of_each_process(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    status = stand_ins.running(run_id)
    for process in status.processes:
        assert process.state == "running"
        assert process.cpu_percent is not None
        assert process.memory_mb is not None
        assert process.memory_mb > 1
    assert runs.glance(stand_ins.workspace, run_id).processes == []


def test_stopping_ends_every_process_in_reverse_order(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    stand_ins.running(run_id)
    status = runs.stop(stand_ins.workspace, run_id)
    assert (status.status, status.reason) == ("stopped", "stopped on request")
    assert not stand_ins.leftovers(run_id)
    log = stand_ins.log(run_id, "supervisor")
    places = [log.index(f"{name} ended") for name in ("environment", "trainer", "API server")]
    assert places == sorted(places)
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"


@pytest.mark.parametrize("role", ["api", "trainer", "env"])
def test_a_process_that_knows_why_it_failed_gives_the_run_its_reason(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv(f"STAND_IN_{role.upper()}", "fail")
    status = stand_ins.wait(stand_ins.start())
    assert status.status == "failed"
    assert status.guilty_role == role
    assert f"{role} has a reason" in (status.reason or "")
    assert "Do better." in (status.reason or "")


@pytest.mark.parametrize("role", ["api", "trainer", "env"])
def test_a_process_that_crashes_gives_the_run_the_tail_of_its_log(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv(f"STAND_IN_{role.upper()}", "crash")
    status = stand_ins.wait(stand_ins.start())
    assert status.status == "failed"
    assert "crashed for no reason" in (status.reason or "")
    assert "Traceback" in (status.log_tail or "")


@pytest.mark.parametrize("role", ["api", "trainer", "env"])
def test_a_killed_process_ends_the_run_and_is_named(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    os.kill(_pids(stand_ins.running(run_id))[role], signal.SIGKILL)
    status = stand_ins.wait(run_id)
    assert (status.status, status.guilty_role) == ("failed", role)
    assert "SIGKILL" in (status.reason or "")
    assert not stand_ins.leftovers(run_id)
    assert status.step > 0


@pytest.mark.parametrize("role", ["trainer", "env"])
def test_a_process_that_ends_well_too_early_does_not_complete_the_run(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    monkeypatch.setenv(f"STAND_IN_{role.upper()}", "polite")
    run_id = stand_ins.start(total_steps=1000)
    os.kill(_pids(stand_ins.running(run_id))[role], signal.SIGTERM)
    status = stand_ins.wait(run_id)
    assert (status.status, status.guilty_role) == ("failed", role)
    assert "someone stopped the" in (status.reason or "")


def test_a_process_that_ignores_sigterm_and_its_children_are_ended(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    monkeypatch.setenv("STAND_IN_ENV", "deaf")
    monkeypatch.setenv("STAND_IN_TRAINER", "breed")
    run_id = stand_ins.start(total_steps=1000)
    stand_ins.running(run_id)
    assert len(stand_ins.leftovers(run_id)) == 4
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"
    assert not stand_ins.leftovers(run_id)
    assert "did not end within" in stand_ins.log(run_id, "supervisor")


def test_a_run_whose_supervisor_was_killed_is_found_out_by_whoever_asks(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    monkeypatch.setenv("STAND_IN_ENV", "deaf")
    run_id = stand_ins.start(total_steps=1000)
    stand_ins.running(run_id)
    os.kill(stand_ins.supervisor(run_id), signal.SIGKILL)
    status = stand_ins.wait(run_id)
    assert (status.status, status.reason) == ("failed", "its supervisor died")
    assert not stand_ins.leftovers(run_id)
    assert status.step > 0


def test_processes_end_by_themselves_when_their_supervisor_was_killed(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    stand_ins.running(run_id)
    os.kill(stand_ins.supervisor(run_id), signal.SIGKILL)
    stand_ins.until_nothing_is_left(run_id)


def test_a_pid_that_was_given_to_another_process_is_not_mistaken_for_the_supervisor(stand_ins: Runs) -> None:
    run_id = stand_ins.start()
    stand_ins.wait(run_id)
    store = open_store(stand_ins.workspace.state_url)
    store.add_run(
        run_id="old", environment="x", profile="embedded", seed=0, overrides={}, external_environment=False,
        total_steps=3, supervisor_pid=os.getpid(), supervisor_mark="another boot:1",
    )  # fmt: skip
    store.move_run("old", "starting")
    assert stand_ins.status("old").status == "failed"
    assert process_mark(os.getpid())


def test_secrets_reach_the_trainer_only_and_no_file_of_the_run(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_URL_VARIABLE, stand_ins.workspace.state_url)  # of a server it holds a password
    run_id = stand_ins.start()
    stand_ins.wait(run_id)
    assert "TINKER_API_KEY" in stand_ins.log(run_id, "trainer")
    assert "secrets []" in stand_ins.log(run_id, "env")
    assert STATE_URL_VARIABLE not in stand_ins.log(run_id, "trainer")
    for file in stand_ins.workspace.root.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file


def test_the_files_of_a_run_are_readable_by_their_owner_only(stand_ins: Runs) -> None:
    run_id = stand_ins.start()
    status = stand_ins.wait(run_id)
    run_dir = Path(status.run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    for file in [*run_dir.iterdir(), *(Path(path) for path in status.logs.values())]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_the_urls_of_a_run_are_there_while_it_runs_and_gone_after(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    status = stand_ins.running(run_id)
    urls = runs.endpoints(stand_ins.workspace, run_id)
    assert urls["HERMES_RL_TRAJECTORIES_URL"].startswith("http://127.0.0.1:")
    assert "rollout_server_url" in (Path(status.run_dir) / "environment.yaml").read_text()
    runs.stop(stand_ins.workspace, run_id)
    with pytest.raises(HermesRLError, match="no servers"):
        runs.endpoints(stand_ins.workspace, run_id)
    assert not (Path(status.run_dir) / "endpoints.json").exists()


def test_a_run_without_its_environment_waits_for_one_to_join(stand_ins: Runs) -> None:
    run_id = stand_ins.start(external_environment=True)
    status = stand_ins.until(run_id, lambda now: now.status == "running")
    assert {process.role: process.state for process in status.processes}["env"] == "external"
    import urllib.request

    url = runs.endpoints(stand_ins.workspace, run_id)["HERMES_RL_TRAJECTORIES_URL"]
    request = urllib.request.Request(f"{url}/register-env", data=json.dumps({}).encode(), method="POST")
    urllib.request.urlopen(request, timeout=60).read()
    assert stand_ins.wait(run_id).status == "completed"


def test_runs_side_by_side_do_not_disturb_each_other(stand_ins: Runs) -> None:
    ids = [stand_ins.start(search_id="s", trial=number) for number in range(3)]
    assert [stand_ins.wait(run_id).status for run_id in ids] == ["completed"] * 3
    listed = runs.list_runs(stand_ins.workspace, "s")
    assert [status.trial for status in listed] == [0, 1, 2]
    assert [status.run_id for status in listed] == ids
    assert runs.list(stand_ins.workspace, "another") == []


def test_a_run_stopped_before_it_was_ready_is_stopped(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TRAINER", "hang")
    run_id = stand_ins.start()
    stand_ins.until(run_id, lambda status: status.phase == "starting trainer")
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"
    immediately = stand_ins.start()
    assert runs.stop(stand_ins.workspace, immediately).status == "stopped"


def test_a_run_id_is_used_once(stand_ins: Runs) -> None:
    environment = SimpleNamespace(name="stand_in", file_path="/none", class_name="None")
    run_id = stand_ins.start()
    config = build_run_config(environment, run_id=run_id, overrides={"base_url": "http://127.0.0.1:9"})
    with pytest.raises(WorkspaceError, match="already"):
        runs.start(stand_ins.workspace, config)
    stand_ins.wait(run_id)


def test_a_stopped_run_goes_on_from_its_checkpoint_with_every_step_once(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    monkeypatch.setenv("STAND_IN_CHECKPOINTS", "1")
    hold.at(5)
    run_id = stand_ins.start(total_steps=40)
    stand_ins.until(run_id, lambda status: status.step == 5)
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"
    begun = runs.results(stand_ins.workspace, run_id)["checkpoints"][-1]["step"]
    assert begun == 3
    assert runs.resume(stand_ins.workspace, run_id, modules=MODULES) == run_id
    assert not stand_ins.status(run_id).is_final
    hold.release()
    status = stand_ins.wait(run_id)
    assert (status.status, status.step) == ("completed", 40)
    lines = (Path(status.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert sum('"train"' in line and f'"step": {begun},' in line for line in lines) == 1
    records = runs.read_metrics(stand_ins.workspace, run_id)
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 41))


def test_a_resumed_run_stands_at_its_checkpoint_before_it_goes_on(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    monkeypatch.setenv("STAND_IN_CHECKPOINTS", "1")
    hold.at(5)
    run_id = stand_ins.start(total_steps=10)
    stand_ins.until(run_id, lambda status: status.step == 5)
    assert runs.stop(stand_ins.workspace, run_id).step == 5
    with monkeypatch.context() as not_yet_supervised:
        not_yet_supervised.setattr(lifecycle, "_supervise", lambda *_: None)
        runs.resume(stand_ins.workspace, run_id)
    status = stand_ins.status(run_id)
    assert (status.status, status.step, status.reward_mean) == ("pending", 3, 0.3)
    hold.release()
    store = open_store(stand_ins.workspace.state_url)
    lifecycle._supervise(stand_ins.workspace, store, run_id, False, MODULES)
    assert stand_ins.wait(run_id).step == 10


def test_a_failed_run_without_a_checkpoint_begins_anew(stand_ins: Runs, hold: Hold) -> None:
    hold.at(1)
    run_id = stand_ins.start(total_steps=8)
    os.kill(_pids(stand_ins.running(run_id))["trainer"], signal.SIGKILL)
    assert stand_ins.wait(run_id).status == "failed"
    hold.release()
    runs.resume(stand_ins.workspace, run_id, modules=MODULES)
    status = stand_ins.wait(run_id)
    assert (status.status, status.reason, status.log_tail) == ("completed", "all steps were taken", None)
    records = runs.read_metrics(stand_ins.workspace, run_id)
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 9))
    assert (Path(status.run_dir) / "metrics.before-resume-1.jsonl").exists()


def test_of_many_that_resume_a_run_at_once_one_does(stand_ins: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = stand_ins.start(total_steps=1000)
    runs.stop(stand_ins.workspace, run_id)
    outcomes: list[str] = []

    def resume() -> None:
        try:
            outcomes.append(runs.resume(stand_ins.workspace, run_id, modules=MODULES))
        except ConfigError as error:
            outcomes.append(error.message)

    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(run_id) == 1
    assert sum("goes on already" in outcome for outcome in outcomes) == 3
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"


def test_a_run_that_completed_or_goes_on_is_not_resumed(stand_ins: Runs, hold: Hold) -> None:
    hold.at(0)
    run_id = stand_ins.start()
    with pytest.raises(ConfigError, match="goes on already"):
        runs.resume(stand_ins.workspace, run_id)
    hold.release()
    stand_ins.wait(run_id)
    with pytest.raises(ConfigError, match="nothing to resume"):
        runs.resume(stand_ins.workspace, run_id)


def test_a_start_that_was_interrupted_does_not_stay_pending_for_ever(stand_ins: Runs) -> None:
    open_store(stand_ins.workspace.state_url).add_run(
        run_id="half", environment="x", profile="embedded", seed=0, overrides={}, external_environment=False,
        total_steps=3, supervisor_pid=os.getpid(), supervisor_mark="a process that is gone",
    )  # fmt: skip
    status = stand_ins.status("half")
    assert (status.status, status.reason) == ("failed", "its start was interrupted")


def test_a_supervisor_whose_run_was_given_up_meanwhile_leaves_it_alone(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as starter_was_killed:
        starter_was_killed.setattr(lifecycle, "_supervise", lambda *_: None)
        run_id = stand_ins.start()
    store = open_store(stand_ins.workspace.state_url)
    assert store.move_run(run_id, "failed", reason="its start was interrupted")
    lifecycle._supervise(stand_ins.workspace, store, run_id, False, MODULES)
    deadline = time.monotonic() + PATIENCE
    while "API server ended" not in stand_ins.log(run_id, "supervisor"):
        assert time.monotonic() < deadline, stand_ins.log(run_id, "supervisor")
        time.sleep(0.02)
    stand_ins.until_nothing_is_left(run_id)
    status = stand_ins.status(run_id)
    assert (status.status, status.reason, status.step) == ("failed", "its start was interrupted", 0)
    assert "trainer stand-in begins" not in stand_ins.log(run_id, "trainer")
    assert not (Path(status.run_dir) / "endpoints.json").exists()


def test_a_supervisor_whose_run_was_taken_away_while_it_trained_ends_its_processes(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    monkeypatch.setenv("STAND_IN_TRAINER", "deaf")  # it must not be asked: it would write a last checkpoint
    hold.at(2)
    run_id = stand_ins.start(total_steps=6)
    stand_ins.until(run_id, lambda status: status.status == "running" and status.step == 2)
    first = _pids(stand_ins.status(run_id)) | {"supervisor": stand_ins.supervisor(run_id)}
    store = open_store(stand_ins.workspace.state_url)
    # As by someone in another container, where no process of the run can be seen.
    assert store.move_run(run_id, "failed", reason="its supervisor died", phase=None)
    marks = {pid: process_mark(pid) for pid in first.values()}
    deadline = time.monotonic() + PATIENCE
    while any(mark is not None and process_mark(pid) == mark for pid, mark in marks.items()):
        assert time.monotonic() < deadline, stand_ins.log(run_id, "supervisor")
        time.sleep(0.02)
    status = stand_ins.status(run_id)
    assert (status.status, status.reason) == ("failed", "its supervisor died")
    assert "trainer did not end" not in stand_ins.log(run_id, "supervisor")
    hold.release()
    runs.resume(stand_ins.workspace, run_id, modules=MODULES)
    assert stand_ins.wait(run_id).status == "completed"


def test_ids_may_be_shortened_and_latest_is_the_latest(stand_ins: Runs) -> None:
    with pytest.raises(UnknownRunError, match="no runs yet"):
        runs.resolve_id(stand_ins.workspace, "latest")
    first, second = stand_ins.start(), stand_ins.start()
    assert runs.resolve_id(stand_ins.workspace, "latest") == second
    assert runs.resolve_id(stand_ins.workspace, first[:-1]) == first
    with pytest.raises(UnknownRunError, match="beginning of 2"):
        runs.resolve_id(stand_ins.workspace, first[:4])
    with pytest.raises(UnknownRunError):
        runs.resolve_id(stand_ins.workspace, "nothing")
    for run_id in (first, second):
        stand_ins.wait(run_id)


def test_a_service_without_a_key_is_refused_before_anything_starts(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        stand_ins.start()
    assert runs.list_runs(stand_ins.workspace) == []


FIELDS = {"run_id", "environment", "profile", "seed", "status", "step", "total_steps", "reward_mean"}
FIELDS |= {"percent_correct", "eval_percent_correct", "processes", "logs", "run_dir", "created_at"}


def _check_fields(status: RunStatus) -> dict[str, Any]:
    """What `run status` and `rl_check_status` promise, at any moment."""
    shown = status.model_dump(mode="json")
    assert set(shown) >= FIELDS
    assert [process["role"] for process in shown["processes"]][:3] == ["api", "trainer", "env"]
    for process in shown["processes"]:
        alive = process["state"] in ("starting", "running") and process["pid"] is not None
        assert (process["cpu_percent"] is not None) == alive, process
        assert (process["memory_mb"] is not None) == alive, process
    assert set(shown["logs"]) == {"api", "trainer", "env", "supervisor"}
    return shown


def test_the_status_has_every_field_at_every_moment_of_a_run(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    with monkeypatch.context() as before_it_is_supervised:
        before_it_is_supervised.setattr(lifecycle, "_supervise", lambda *_: None)
        pending = stand_ins.start(total_steps=9)
    shown = _check_fields(stand_ins.status(pending))
    assert (shown["status"], shown["step"], shown["total_steps"]) == ("pending", 0, 9)
    assert (shown["reward_mean"], shown["percent_correct"], shown["eval_percent_correct"]) == (None,) * 3
    open_store(stand_ins.workspace.state_url).move_run(pending, "failed", reason="a test")

    monkeypatch.setenv("STAND_IN_TRAINER", "hang")
    starting = stand_ins.start(total_steps=9)
    shown = _check_fields(stand_ins.until(starting, lambda status: status.phase == "starting trainer"))
    assert (shown["status"], shown["step"], shown["total_steps"]) == ("starting", 0, 9)
    runs.stop(stand_ins.workspace, starting)

    monkeypatch.setenv("STAND_IN_TRAINER", "")
    hold.at(2)
    running = stand_ins.start(total_steps=9)
    shown = _check_fields(stand_ins.running(running))
    assert shown["status"] == "running"
    assert 0 < shown["step"] <= shown["total_steps"] == 9
    assert shown["reward_mean"] > 0
    hold.release()
    shown = _check_fields(stand_ins.wait(running))
    assert (shown["status"], shown["step"], shown["reward_mean"]) == ("completed", 9, 1.0)
    assert all(process["exit_code"] is not None for process in shown["processes"])
    assert shown["ended_at"] >= shown["started_at"] >= shown["created_at"]


def test_a_server_that_is_gone_refuses_connections_at_once(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    status = stand_ins.running(run_id)
    urls = runs.endpoints(stand_ins.workspace, run_id)
    supervisor = stand_ins.supervisor(run_id)
    os.kill(supervisor, signal.SIGSTOP)  # it cannot end the run meanwhile
    try:
        for role, name in (("trainer", "HERMES_RL_INFERENCE_URL"), ("api", "HERMES_RL_TRAJECTORIES_URL")):
            os.kill(_pids(status)[role], signal.SIGKILL)
            parts = urlsplit(urls[name])
            deadline = time.monotonic() + PATIENCE
            while not _refuses(parts.hostname or "", parts.port or 0):
                assert time.monotonic() < deadline, role
                time.sleep(0.02)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert stand_ins.wait(run_id).status == "failed"


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it goes this very moment
        return False
    return False


@pytest.mark.parametrize("role", ["api", "trainer"])
def test_a_server_that_is_stuck_ends_the_run_by_name(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000, max_seconds_without_answer=5.0)
    status = stand_ins.running(run_id)
    os.kill(_pids(status)[role], signal.SIGSTOP)
    status = stand_ins.wait(run_id)
    assert (status.status, status.guilty_role) == ("failed", role)
    assert "does not answer: it has been silent for" in (status.reason or "")
    assert not stand_ins.leftovers(run_id)


def test_a_run_that_stands_still_although_all_answer_ends_with_the_numbers(
    stand_ins: Runs, hold: Hold
) -> None:
    hold.at(2)  # as a Tinker server does that answers questions about a step and never ends it
    run_id = stand_ins.start(max_seconds_without_progress=3.0, max_seconds_without_batch=2.0)
    status = stand_ins.wait(run_id)
    assert (status.status, status.guilty_role, status.step) == ("failed", "trainer", 2)
    assert re.search(r"no step, evaluation or checkpoint came for \d+ s, at step 2 of 5", status.reason or "")
    assert "max_seconds_without_progress (3) besides max_seconds_without_batch (2)" in (status.reason or "")
    assert not stand_ins.leftovers(run_id)


def test_a_run_that_takes_longer_than_the_limit_but_goes_on_is_left_alone(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    limits = {"max_seconds_without_progress": 6.0, "max_seconds_without_batch": 1.0}
    run_id = stand_ins.start(total_steps=100, **limits)
    status = stand_ins.wait(run_id)
    assert status.status == "completed", status
    assert status.ended_at is not None
    assert status.started_at is not None
    assert (status.ended_at - status.started_at).total_seconds() > 7.0


def test_a_supervisor_that_slept_takes_no_server_for_stuck(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000, max_seconds_without_answer=5.0)
    stand_ins.running(run_id)
    os.kill(stand_ins.supervisor(run_id), signal.SIGSTOP)
    time.sleep(6.0)  # longer than the limit: that is what is tested
    os.kill(stand_ins.supervisor(run_id), signal.SIGCONT)
    step = stand_ins.status(run_id).step
    stand_ins.until(run_id, lambda status: status.step > step + 10)
    assert runs.stop(stand_ins.workspace, run_id).status == "stopped"
