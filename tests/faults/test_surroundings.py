"""Around a real run: a full disk, a clock that jumps, an engine that is restarted, a closed terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.errors import WorkspaceError
from hermes_rl.process_identity import is_alive, processes_with
from hermes_rl.runs.run_status import RUN_ID_VARIABLE, RunStatus
from hermes_rl.runs.store import open_store

SMALL: dict[str, Any] = {
    "steps_per_eval": 0,
    "num_requests_for_eval": 8,
    "group_size": 4,
    "batch_size": 8,
    "save_checkpoint_interval": 3,
}
DISK = 150_000_000
CLOCK = '''
"""Loaded by every interpreter: the clock jumps by what the file says."""
import os
import time

_time = time.time


def jumped():
    try:
        with open(os.environ["JUMP_FILE"]) as file:
            return _time() + float(file.read() or 0)
    except (OSError, KeyError, ValueError):
        return _time()


time.time = jumped
'''


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path / "w")
    yield made
    _end_everything(made)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace on a file system of 150 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        made = Workspace.resolve(folder / "w")
        yield made
    finally:
        (folder / "w" / "filler").unlink(missing_ok=True)
        _end_everything(Workspace(folder / "w"))
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _end_everything(workspace: Workspace) -> None:
    for run in runs.list_runs(workspace):
        if not run.is_final:
            runs.stop(workspace, run.run_id)
    for engine in list_engines(workspace):
        stop_engine(workspace, engine.key)


def start(workspace: Workspace, **overrides: Any) -> str:
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    return runs.start(workspace, build_run_config(environment, overrides=SMALL | overrides))


def _supervisor(workspace: Workspace, run_id: str) -> int:
    return open_store(workspace.state_url).run(run_id).supervisor_pid


def _processes(workspace: Workspace, run_id: str) -> list[Any]:
    """The run's own processes, the shared engine and the supervisor excepted."""
    return [row for row in open_store(workspace.state_url).processes(run_id) if row.role != "engine"]


def until_step(workspace: Workspace, run_id: str, step: int) -> RunStatus:
    deadline = time.monotonic() + 180
    while (status := runs.glance(workspace, run_id)).step < step:
        assert not status.is_final, status
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def ended(workspace: Workspace, run_id: str, state: str) -> RunStatus:
    status = runs.wait(workspace, run_id, timeout=400)
    assert status.status == state, status
    assert not any(is_alive(row.pid, row.mark) for row in _processes(workspace, run_id))
    assert not processes_with(RUN_ID_VARIABLE, run_id)
    return status


def trained(workspace: Workspace, run_id: str) -> list[int]:
    return [record["step"] for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]


def fill(folder: Path, leave: int) -> Path:
    """Fill the file system of ``folder`` up to ``leave`` bytes."""
    filler = folder / "filler"
    with filler.open("ab") as file:
        free = shutil.disk_usage(folder).free
        while free > leave:
            file.write(b"\0" * min(1_000_000, free - leave))
            file.flush()
            free = shutil.disk_usage(folder).free
    return filler


def test_a_disk_that_fills_up_ends_the_run_which_goes_on_once_there_is_room(small_disk: Workspace) -> None:
    run_id = start(small_disk, total_steps=60, min_free_disk_mb=10, save_checkpoint_interval=0)
    reached = until_step(small_disk, run_id, 2).step
    filler = fill(small_disk.root, leave=6_000_000)
    status = ended(small_disk, run_id, "failed")
    assert "The disk is nearly full" in (status.reason or "")
    saved = runs.results(small_disk, run_id)["checkpoints"][-1]["step"]
    assert saved == status.step >= reached

    filler.unlink()
    runs.resume(small_disk, run_id)
    assert ended(small_disk, run_id, "completed").step == 60
    assert trained(small_disk, run_id) == list(range(1, 61))


def test_a_disk_without_a_byte_left_loses_no_step_that_was_saved(small_disk: Workspace) -> None:
    fill(small_disk.root, leave=60_000_000).rename(small_disk.root / "filled before")
    run_id = start(small_disk, total_steps=150, min_free_disk_mb=0, save_checkpoint_interval=15)
    until_step(small_disk, run_id, 16)
    processes = _processes(small_disk, run_id)
    filler = fill(small_disk.root, leave=0)
    deadline = time.monotonic() + 120
    while any(is_alive(row.pid, row.mark) for row in processes):
        assert time.monotonic() < deadline
        fill(small_disk.root, leave=0)  # a checkpoint that failed gives its room back
        time.sleep(0.02)
    with pytest.raises(WorkspaceError, match="disk"):
        runs.status(small_disk, run_id)
    filler.unlink()  # the supervisor waits for room to write why the run has ended
    status = ended(small_disk, run_id, "failed")
    assert "space left" in f"{status.reason} {status.log_tail}", status

    runs.resume(small_disk, run_id)
    assert ended(small_disk, run_id, "completed").step == 150
    assert trained(small_disk, run_id) == list(range(1, 151))


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0], ids=["forward", "back"])
def test_a_clock_that_jumps_by_a_day_ends_nothing(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("JUMP_FILE", str(tmp_path / "jump"))
    run_id = start(workspace, total_steps=40, worker_timeout=60, max_seconds_without_batch=60)
    until_step(workspace, run_id, 3)
    (tmp_path / "jump").write_text(str(jump))
    ended(workspace, run_id, "completed")
    assert trained(workspace, run_id) == list(range(1, 41))
    times = [record["time"] for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]
    assert abs((times[-1] - times[0]) - jump) < 3600, "the clock did not jump"


def test_an_engine_that_is_restarted_costs_the_steps_since_the_checkpoint(workspace: Workspace) -> None:
    run_id = start(workspace, total_steps=40)
    until_step(workspace, run_id, 4)
    (engine,) = list_engines(workspace)
    stop_engine(workspace, engine.key)
    status = ended(workspace, run_id, "failed")
    assert status.guilty_role == "engine" or "Tinker" in (status.reason or ""), status
    runs.resume(workspace, run_id)
    ended(workspace, run_id, "completed")
    assert trained(workspace, run_id) == list(range(1, 41))


def _terminal(command: list[str], folder: Path, env: dict[str, str]) -> tuple[int, int]:
    """Start a command in a terminal of its own; its pid and the other end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background
        os.chdir(folder)
        os.execve(command[0], command, env)
    return pid, terminal


def _read_to_the_end(terminal: int, seen: bytearray) -> None:
    with contextlib.suppress(OSError):  # what a terminal says when nobody has it any more
        while data := os.read(terminal, 4096):
            seen += data


def test_ctrl_c_on_a_followed_run_stops_it_cleanly_and_a_resume_takes_every_step_once(
    workspace: Workspace, tmp_path: Path
) -> None:
    folder = tmp_path / "where the user is"
    folder.mkdir()
    (folder / "secrets.py").write_text("raise RuntimeError('this is not the library')")
    hermes_rl = [sys.executable, "-P", "-m", "hermes_rl"]
    command = [*hermes_rl, "run", "start", "arithmetic_tinker", "--follow"]
    for name, value in (SMALL | {"total_steps": 40}).items():
        command += ["--set", f"{name}={value}"]
    env = {**os.environ, "HERMES_RL_WORKSPACE": str(workspace.root)}
    pid, terminal = _terminal(command, folder, env)
    seen = bytearray()
    reading = threading.Thread(target=_read_to_the_end, args=(terminal, seen), daemon=True)
    reading.start()
    try:
        deadline = time.monotonic() + 300
        while not runs.list_runs(workspace) or runs.list_runs(workspace)[0].step < 2:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
        os.write(terminal, b"\x03")
        _, code = os.waitpid(pid, 0)
    finally:
        reading.join(timeout=60)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(code) == 130, seen
    run_id = runs.list_runs(workspace)[0].run_id
    status = ended(workspace, run_id, "stopped")
    assert status.reason == "stopped on request"
    assert 2 <= status.step < 40

    done = subprocess.run(
        [*hermes_rl, "run", "resume", run_id, "--follow"],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done
    ended(workspace, run_id, "completed")
    assert trained(workspace, run_id) == list(range(1, 41))


def test_a_closed_terminal_ends_the_following_and_not_the_run(workspace: Workspace) -> None:
    command = [sys.executable, "-m", "hermes_rl", "run", "start", "arithmetic_tinker", "--follow"]
    for name, value in (SMALL | {"total_steps": 15}).items():
        command += ["--set", f"{name}={value}"]
    env = {**os.environ, "HERMES_RL_WORKSPACE": str(workspace.root)}
    pid, terminal = _terminal(command, Path.cwd(), env)
    try:
        deadline = time.monotonic() + 300
        while not runs.list_runs(workspace) or runs.list_runs(workspace)[0].step < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.close(terminal)  # the kernel sends SIGHUP to whoever has it
    os.waitpid(pid, 0)
    run_id = runs.list_runs(workspace)[0].run_id
    ended(workspace, run_id, "completed")
    assert trained(workspace, run_id) == list(range(1, 16))


def test_a_hangup_sent_to_every_process_of_a_run_ends_none_of_them_that_matters(workspace: Workspace) -> None:
    run_id = start(workspace, total_steps=15)
    until_step(workspace, run_id, 2)
    os.kill(_supervisor(workspace, run_id), signal.SIGHUP)
    for engine in list_engines(workspace):
        os.kill(engine.address.pid, signal.SIGHUP)
    ended(workspace, run_id, "completed")
    assert trained(workspace, run_id) == list(range(1, 16))
