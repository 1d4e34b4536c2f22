"""One engine for everybody: several callers at once get the same one, and it ends when nobody needs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hermes_rl.config import Workspace
from hermes_rl.engine.registry import EngineSpec, ensure_engine, list_engines, stop_engine
from hermes_rl.errors import EngineError
from hermes_rl.process_identity import is_alive, process_mark


def until(condition, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def ws(tmp_path):
    workspace = Workspace.resolve(tmp_path / "work space")
    yield workspace
    for record in list_engines(workspace):
        stop_engine(workspace, record.key)


CALLER = """
import sys
from hermes_rl.config import Workspace
from hermes_rl.engine.registry import EngineSpec, ensure_engine
address = ensure_engine(Workspace.resolve(sys.argv[1]), EngineSpec(sys.argv[2]))
print(address.pid, "torch" in sys.modules)
"""


def test_callers_at_once_share_one_engine(ws, model_folder):
    command = [sys.executable, "-c", CALLER, str(ws.root), str(model_folder)]
    callers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {caller.communicate()[0].strip() for caller in callers}
    (record,) = list_engines(ws)
    assert answers == {f"{record.address.pid} False"}
    assert (ws.engines / f"{record.key}.json").stat().st_mode & 0o777 == 0o600
    assert os.getsid(record.address.pid) == record.address.pid
    assert stop_engine(ws, record.key)
    assert not is_alive(record.address.pid, record.mark)
    assert list_engines(ws) == []


def test_a_dead_engine_is_replaced(ws, model_folder):
    spec = EngineSpec(str(model_folder))
    first = ensure_engine(ws, spec)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not list_engines(ws))
    second = ensure_engine(ws, spec)
    assert second.pid != first.pid
    assert ensure_engine(ws, spec) == second


def test_a_clock_that_jumps_starts_no_second_engine(ws, model_folder, monkeypatch):
    spec = EngineSpec(str(model_folder))
    first = ensure_engine(ws, spec)
    (record,) = list_engines(ws)
    # Both clocks a day on: the wall clock, and the start of processes that psutil derives from it.
    now, created = time.time, psutil.Process.create_time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created(process) + 86_400)
    assert ensure_engine(ws, spec) == first
    assert [(known.mark, known.mark == process_mark(first.pid)) for known in list_engines(ws)] == [
        (record.mark, True)
    ]
    assert stop_engine(ws, spec.key)
    assert not is_alive(first.pid, record.mark)


def test_another_process_with_the_engines_pid_is_no_engine(ws, model_folder):
    spec = EngineSpec(str(model_folder))
    file = ws.engines / f"{spec.key}.json"
    ws.engines.mkdir(parents=True, exist_ok=True)
    file.write_text(
        json.dumps(
            {
                "base_url": "http://127.0.0.1:9",
                "api_key": "tml-x",
                "pid": os.getpid(),
                "mark": "another",
                "spec": {"model": str(model_folder)},
                "started": time.time(),
            }
        )
    )
    assert list_engines(ws) == []
    assert not stop_engine(ws, spec.key)  # and this process lives
    assert ensure_engine(ws, spec).pid != os.getpid()


def test_an_idle_engine_ends(ws, model_folder):
    address = ensure_engine(ws, EngineSpec(str(model_folder), idle_timeout=6.0))
    (record,) = list_engines(ws)
    until(lambda: not is_alive(address.pid, record.mark))
    assert list(ws.engines.glob("*.json")) == []


@pytest.mark.parametrize(
    ("model", "reason"), [("no/such-model-anywhere", "No model"), ("EMPTY", "config.json")]
)
def test_why_an_engine_did_not_start_is_said(ws, tmp_path, monkeypatch, model, reason):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if model == "EMPTY":
        (tmp_path / "empty").mkdir()
        model = str(tmp_path / "empty")
    with pytest.raises(EngineError, match=reason):
        ensure_engine(ws, EngineSpec(model))
    assert list_engines(ws) == []


def test_specs_that_differ_do_not_share(model_folder):
    key = EngineSpec(str(model_folder)).key
    assert EngineSpec(str(model_folder), lora_alpha=1.0).key != key
    assert EngineSpec(f"{model_folder}/.").key == key
    assert EngineSpec(str(Path(model_folder).parent)).key != key
