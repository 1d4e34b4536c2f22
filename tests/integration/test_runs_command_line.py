"""``hermes-rl run`` as a user meets it: exit statuses, messages, Ctrl-C, output that is piped."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_runs_supervisor import STAND_INS, Runs

from hermes_rl import runs

ENVIRONMENT = '''
"""Counts."""
from atroposlib.envs.base import BaseEnv


class CountEnv(BaseEnv):
    """Counts up to a number."""

    name = "count"

    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs): ...
'''

# What `run start --follow` does once the run is started, with stand-ins in place of the real processes.
FOLLOW = """
import sys
from pathlib import Path
from hermes_rl.cli import run
from hermes_rl.config import Workspace
run._follow(Workspace.resolve(Path(sys.argv[1])), sys.argv[2], stop_on_interrupt=sys.argv[3] == "stop")
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "work space"
    monkeypatch.setenv("HERMES_RL_WORKSPACE", str(root))
    monkeypatch.setenv("HERMES_RL_FORK_SERVER", "0")
    folder = root / "tinker_atropos" / "environments"
    folder.mkdir(parents=True)
    (folder / "count.py").write_text(ENVIRONMENT)
    (folder / "broken.py").write_text("class Broken(BaseEnv:\n")
    return root


@pytest.fixture
def stand_ins(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    made = Runs(workspace)
    yield made
    for run_id in made.started:
        runs.stop(made.workspace, run_id)
        assert not made.leftovers(run_id)


def hermes_rl(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hermes_rl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "start", "cuont"], "count"),
        (["run", "start", "broken"], "broken"),
        (["run", "start", "count", "--set", "learning_rat=1"], "learning_rate"),
        (["run", "start", "count", "--set", "learning_rate=-1"], "learning_rate"),
        (["run", "start", "count", "--set", "learning_rate=fast"], "learning_rate"),
        (["run", "start", "count", "--set", "group_size=64", "--set", "batch_size=16"], "group_size"),
        (["run", "start", "count", "--set", "batch_size"], "NAME=VALUE"),
        (["run", "start", "count", "--set", "batch_size=[1"], "JSON"),
        (["run", "start", "count", "--profile", "none"], "embedded"),
        (["run", "start", "count", "--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["run", "start", "count", "--seed", "-1"], "seed"),
        (["run", "status", "nothing"], "nothing"),
        (["run", "status"], "no runs yet"),
        (["run", "stop", "../../etc"], "etc"),
        (["run", "logs", "latest"], "no runs yet"),
        (["run", "sart"], "start"),
        (["rum"], "run"),
    ],
)
def test_bad_input_gives_a_short_message_and_exit_status_2(
    workspace: Path, arguments: list[str], message: str
) -> None:
    done = hermes_rl(*arguments)
    assert done.returncode == 2, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 15


def test_a_workspace_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = hermes_rl("run", "list", "--workspace", str(tmp_path / "file" / "w"))
    assert done.returncode == 2
    assert "cannot be used" in done.stderr


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, hermes_rl.cli.main, hermes_rl.cli.run, hermes_rl.cli.environments;"
        "heavy = ('torch', 'tinker', 'atroposlib', 'optuna', 'transformers', 'sqlalchemy', 'pydantic');"
        "print([name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
    assert "run start ENVIRONMENT --follow" in hermes_rl("--help").stdout


def test_a_dry_run_prints_the_whole_configuration_and_starts_nothing(workspace: Path) -> None:
    done = hermes_rl("run", "start", "count", "--set", "learning_rate=6e-5", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "learning_rate: 6.0e-05" in done.stdout
    assert "No runs yet" in hermes_rl("run", "list").stdout


def test_environments_are_listed_with_the_broken_one_named(workspace: Path) -> None:
    done = hermes_rl("environments", "list")
    assert done.returncode == 0
    assert "Counts up to a number." in done.stdout
    assert "cannot be used" in done.stdout


def test_what_is_piped_has_plain_lines_a_step_each(stand_ins: Runs) -> None:
    run_id = stand_ins.start(total_steps=4)
    done = hermes_rl("run", "watch", run_id)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reward_mean") == 4
    assert "evaluation at step 4: eval_percent_correct 0.750 ± 0.027 (256 items)" in done.stdout
    assert "completed after" in done.stdout
    assert "\x1b" not in done.stdout


def test_status_list_and_results_can_be_read_by_programs(stand_ins: Runs) -> None:
    run_id = stand_ins.start(total_steps=4)
    assert hermes_rl("run", "wait", run_id).returncode == 0
    status = json.loads(hermes_rl("run", "status", run_id[:-1], "--json").stdout)
    assert (status["status"], status["step"]) == ("completed", 4)
    assert [entry["run_id"] for entry in json.loads(hermes_rl("run", "list", "--json").stdout)] == [run_id]
    results = json.loads(hermes_rl("run", "results", "--json").stdout)
    assert results["evaluation"]["eval_percent_correct"] == 0.75
    assert "step     4  0.750" in hermes_rl("run", "results").stdout
    assert "env stand-in begins" in hermes_rl("run", "logs", "--role", "env").stdout


def test_a_failed_run_gives_its_reason_and_exit_status_1(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_ENV", "crash")
    run_id = stand_ins.start()
    done = hermes_rl("run", "watch", run_id)
    assert done.returncode == 1
    assert "the environment ended" in done.stdout
    assert "crashed for no reason" in done.stdout
    assert hermes_rl("run", "wait", run_id).returncode == 1
    assert "crashed for no reason" in hermes_rl("run", "logs", run_id).stdout


def test_waiting_too_long_gives_exit_status_124(stand_ins: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    assert hermes_rl("run", "wait", run_id, "--timeout", "0.1").returncode == 124


def _followed(stand_ins: Runs, run_id: str, on_interrupt: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", FOLLOW, str(stand_ins.workspace.root), run_id, on_interrupt]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts)


def _heed_interrupts() -> None:
    """Undo what a shell does to a command in the background, which this test may be part of."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt_after_a_step(follower: subprocess.Popen[str], number: int = signal.SIGINT) -> str:
    assert follower.stdout is not None
    for line in follower.stdout:
        if line.startswith("step"):
            break
    follower.send_signal(number)
    out = follower.stdout.read()
    follower.wait(240)
    follower.stdout.close()
    return out


def test_ctrl_c_on_a_followed_run_stops_it_cleanly(stand_ins: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    out = _interrupt_after_a_step(_followed(stand_ins, run_id, "stop"))
    assert "stopped after" in out
    assert stand_ins.status(run_id).status == "stopped"
    assert not stand_ins.leftovers(run_id)


def test_ctrl_c_on_a_watched_run_ends_the_watching_only(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.1")
    run_id = stand_ins.start(total_steps=1000)
    out = _interrupt_after_a_step(_followed(stand_ins, run_id, "detach"))
    assert f"run {run_id} goes on" in out
    stand_ins.running(run_id)


def test_a_closed_terminal_ends_the_following_and_not_the_run(
    stand_ins: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_SECONDS", "0.05")
    run_id = stand_ins.start(total_steps=60)
    terminal, side = pty.openpty()
    command = [sys.executable, "-c", FOLLOW, str(stand_ins.workspace.root), run_id, "stop"]
    follower = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    seen = b""
    while b"reward" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    follower.send_signal(signal.SIGHUP)
    follower.wait(240)
    assert stand_ins.wait(run_id).status == "completed"


def test_a_log_can_be_followed_until_the_run_ends(stand_ins: Runs) -> None:
    run_id = stand_ins.start(total_steps=4)
    done = hermes_rl("run", "logs", run_id, "--role", "supervisor", "-f")
    assert done.returncode == 0
    assert "completed: all steps were taken" in done.stdout


def test_a_list_of_two_hundred_runs_takes_less_than_a_second(stand_ins: Runs) -> None:
    from hermes_rl.runs.store import open_store

    store = open_store(stand_ins.workspace.state_url)
    for number in range(200):
        store.add_run(
            run_id=f"run-{number:03}", environment="count", profile="embedded", seed=0, overrides={},
            external_environment=False, total_steps=10, supervisor_pid=None, supervisor_mark=None,
        )  # fmt: skip
        store.move_run(f"run-{number:03}", "stopped", reason="enough [of it]", progress={"step": 3})
    taken = []
    for _ in range(5):  # one undisturbed of several will do
        began = time.monotonic()
        assert len(runs.list_runs(stand_ins.workspace)) == 200
        taken.append(time.monotonic() - began)
    assert min(taken) < 1.0
    assert "run-199" in hermes_rl("run", "list", "--limit", "0").stdout
