"""Runs whose processes are forked off the fork server: the same life, without the imports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_runs_supervisor import PATIENCE, SECRET, STAND_INS, Hold, Runs, hold  # noqa: F401

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.process_identity import is_alive, process_mark, signal_process, wait_for_end
from hermes_rl.runs.forking import ForkServer, fork_server
from hermes_rl.runs.roles import role_spec
from hermes_rl.runs.store import open_store
from hermes_rl.runs.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork servers are used on Linux only")


def server_pids(path: Path) -> list[int]:
    """Of the servers at that socket, without their forks, whose command line is the same."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        if str(path) in (process.info["cmdline"] or []) and not process.info["name"].startswith("rl-"):
            found.append(process.pid)
    return found


class Served(Runs):
    """Runs in a workspace whose fork server has imported nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        found = fork_server()
        assert found is not None
        self.server = ForkServer(found.path, preload=())
        assert self.server.ensure()

    def leftovers(self, run_id: str) -> list[int]:
        rows = open_store(self.workspace.state_url).processes(run_id)
        return super().leftovers(run_id) + [row.pid for row in rows if is_alive(row.pid, row.mark)]

    def end_server(self) -> None:
        for pid in server_pids(self.server.path):
            mark = process_mark(pid)
            if mark is not None:  # a fork that came too late may be listed and end by itself
                signal_process(pid, mark, signal.SIGTERM)
                assert wait_for_end(pid, mark, PATIENCE)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Starts a fork server in an environment with further variables, as runs started there have."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setenv("TINKER_API_KEY", SECRET)
    # The path of a Unix socket has little room: pytest's folder would leave none for a long user name.
    folder = tempfile.mkdtemp(prefix="rl-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    made: list[Served] = []

    def start(**variables: str) -> Served:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        made.append(Served(tmp_path / "w"))
        return made[-1]

    yield start
    for served in made:
        for run_id in served.started:
            runs.stop(served.workspace, run_id)
            assert not served.leftovers(run_id)
        served.end_server()
    shutil.rmtree(folder)


def test_a_run_off_the_fork_server_completes_like_any_other(serve: Callable[..., Served]) -> None:
    served = serve()
    run_id = served.start()
    status = served.wait(run_id)
    assert status.status == "completed", status
    assert "forked off the fork server" in served.log(run_id, "supervisor")
    assert {process.role: process.state for process in status.processes} == {
        "api": "stopped",
        "trainer": "exited",
        "env": "exited",
    }
    assert "env stand-in begins" in served.log(run_id, "env")


def test_the_fork_server_holds_no_secret_and_the_environment_gets_none(serve: Callable[..., Served]) -> None:
    served = serve()
    run_id = served.start()
    served.wait(run_id)
    assert "TINKER_API_KEY" in served.log(run_id, "trainer")
    assert "secrets []" in served.log(run_id, "env")
    (pid,) = server_pids(served.server.path)
    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("role", ["api", "trainer", "env"])
def test_a_killed_fork_ends_the_run_and_is_named(serve: Callable[..., Served], role: str) -> None:
    served = serve(STAND_IN_STEP_SECONDS="0.1")
    run_id = served.start(total_steps=1000)
    pids = {process.role: process.pid for process in served.running(run_id).processes}
    os.kill(pids[role] or 0, signal.SIGKILL)
    status = served.wait(run_id)
    assert (status.status, status.guilty_role) == ("failed", role)
    assert "SIGKILL" in (status.reason or "")
    assert not served.leftovers(run_id)


def test_a_fork_that_crashes_leaves_its_traceback_in_the_log(serve: Callable[..., Served]) -> None:
    served = serve(STAND_IN_ENV="crash")
    status = served.wait(served.start())
    assert (status.status, status.guilty_role) == ("failed", "env")
    assert "crashed for no reason" in (status.log_tail or "")


def test_forks_end_when_their_supervisor_was_killed(serve: Callable[..., Served]) -> None:
    served = serve(STAND_IN_STEP_SECONDS="0.1")
    run_id = served.start(total_steps=1000)
    served.running(run_id)
    os.kill(served.supervisor(run_id), signal.SIGKILL)
    served.until_nothing_is_left(run_id)
    assert served.status(run_id).status == "failed"


def test_a_run_outlives_its_fork_server(serve: Callable[..., Served], hold: Hold) -> None:  # noqa: F811
    served = serve()
    hold.at(1)
    run_id = served.start(total_steps=10)
    served.running(run_id)
    (pid,) = server_pids(served.server.path)
    mark = process_mark(pid)
    os.kill(pid, signal.SIGKILL)
    assert mark is not None
    assert wait_for_end(pid, mark, PATIENCE)
    hold.release()
    assert served.wait(run_id).status == "completed"
    assert not served.leftovers(run_id)


def test_a_fork_server_that_does_not_answer_is_done_without(serve: Callable[..., Served]) -> None:
    served = serve()
    (pid,) = server_pids(served.server.path)
    os.kill(pid, signal.SIGSTOP)
    try:
        run_id = served.start()
        assert served.wait(run_id).status == "completed"
        assert "does not answer" in served.log(run_id, "supervisor")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_many_that_want_the_server_at_once_start_one_which_ends_when_idle(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "f.sock", preload=(), idle_seconds=5.0)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(server.ensure())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 6
    (pid,) = server_pids(server.path)
    mark = process_mark(pid)
    assert mark is None or wait_for_end(pid, mark, PATIENCE)
    assert not server.path.exists()


def test_another_environment_or_user_gets_no_fork_of_this_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = fork_server()
    assert first is not None
    monkeypatch.setenv("TINKER_API_KEY", "a key is not part of it")
    same = fork_server()
    assert same is not None
    assert same.path == first.path
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    other = fork_server()
    assert other is not None
    assert other.path != first.path
    first.path.parent.chmod(0o777)
    assert fork_server() is None
    monkeypatch.setenv("HERMES_RL_FORK_SERVER", "0")
    assert fork_server() is None


def test_the_fork_server_leaves_torch_to_whoever_needs_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys; from hermes_rl.runs.forkserver import preload;"
        "from hermes_rl.runs.forking import PRELOAD;"
        "preload(PRELOAD); print(sorted({'torch', 'pandas', 'sklearn'} & set(sys.modules)));"
        "import torch; print(torch.ones(1).item())"
    )
    with log.open("wb") as output:
        done = subprocess.run([sys.executable, "-c", code], stdout=output, stderr=output, timeout=400)
    assert (done.returncode, log.read_text().splitlines()) == (0, ["[]", "1.0"])


@pytest.mark.parametrize(("imports", "forked"), [("import json", True), ("import torch", False)])
def test_an_environment_with_models_of_its_own_gets_an_interpreter_of_its_own(
    tmp_path: Path, imports: str, forked: bool
) -> None:
    workspace = Workspace.resolve(tmp_path / "w")
    file = tmp_path / "own.py"
    file.write_text(f"{imports}\nfrom atroposlib.envs.base import BaseEnv\n")
    config = build_run_config(SimpleNamespace(name="own", file_path=str(file), class_name="OwnEnv"))
    workspace.run_dir(config.run.run_id).mkdir()
    config.to_yaml(workspace.run_dir(config.run.run_id) / "run.yaml")
    supervisor = Supervisor(workspace, config.run.run_id)
    assert supervisor._may_fork(role_spec("env")) is forked
    assert supervisor._may_fork(role_spec("trainer"))
