"""A Tinker server elsewhere that falls silent in a step: the run ends by itself, and can go on later."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import EngineSpec, ensure_engine, list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.process_identity import processes_with
from hermes_rl.runs.run_status import RUN_ID_VARIABLE

STEPS = 6


class Service:
    """Stands between a run and an engine, as the network and a service's front do.

    While it is armed, the request for a gradient that comes next is the last that anyone hears of: every
    connection stays open and says nothing more.
    """

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.armed = threading.Event()
        self.silent = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                engine = socket.create_connection(("127.0.0.1", self._engine_port))
                for source, sink in ((caller, engine), (engine, caller)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.armed.is_set() and b"/forward_backward" in data:
                    self.silent.set()
                if not self.silent.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def recover(self) -> None:
        self.armed.clear()
        self.silent.clear()

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path / "w")
    yield made
    for run in runs.list_runs(made):
        if not run.is_final:
            runs.stop(made, run.run_id)
    for engine in list_engines(made):
        stop_engine(made, engine.key)


@pytest.fixture
def service(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    tinker = build_run_config(find(workspace.environments_dirs, "arithmetic_tinker")).tinker
    spec = EngineSpec(tinker.base_model, tinker.device, tinker.lora_alpha, idle_timeout=600.0)
    address = ensure_engine(workspace, spec)
    monkeypatch.setenv("TINKER_API_KEY", address.api_key)
    made = Service(int(address.base_url.rpartition(":")[2]))
    yield made
    made.close()


def test_a_service_that_falls_silent_in_a_step_ends_the_run_which_goes_on_later(
    workspace: Workspace, service: Service
) -> None:
    overrides = {
        "total_steps": STEPS, "steps_per_eval": 0, "num_requests_for_eval": 8, "group_size": 4,
        "batch_size": 8, "save_checkpoint_interval": 1, "base_url": f"http://127.0.0.1:{service.port}",
        "max_seconds_without_progress": 15.0, "max_seconds_without_batch": 15.0,
    }  # fmt: skip
    config = build_run_config(find(workspace.environments_dirs, "arithmetic_tinker"), overrides=overrides)
    service.armed.set()
    run_id = runs.start(workspace, config)
    status = runs.wait(workspace, run_id, timeout=300)
    assert service.silent.is_set()
    assert (status.status, status.guilty_role, status.step) == ("failed", "trainer", 0), status
    assert re.search(r"no step, evaluation or checkpoint came for \d+ s, at step 0 of 6", status.reason or "")
    assert not processes_with(RUN_ID_VARIABLE, run_id)

    service.recover()
    runs.resume(workspace, run_id)
    status = runs.wait(workspace, run_id, timeout=300)
    assert (status.status, status.step) == ("completed", STEPS), status
    trained = [record["step"] for record in runs.read_metrics(workspace, run_id) if record["kind"] == "train"]
    assert trained == list(range(1, STEPS + 1))
