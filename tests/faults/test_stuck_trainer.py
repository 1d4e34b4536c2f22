"""A trainer whose Tinker server is gone still ends when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hermes_rl.config import build_run_config

TOLD_TO_STOP_SECONDS = 15.0
"""The SDK would go on for minutes."""


@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_a_trainer_that_cannot_reach_its_engine_ends_on_sigterm(tmp_path: Path, server: str) -> None:
    environment = SimpleNamespace(name="x", file_path="/none", class_name="None")
    build_run_config(environment).to_yaml(tmp_path / "run.yaml")
    engine = socket.socket()
    engine.bind(("127.0.0.1", 0))  # nobody else gets the port, and until it listens it refuses
    port = engine.getsockname()[1]
    if server == "is silent":
        engine.listen(8)
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("wb") as output:
        inference = f"http://127.0.0.1:{listening.getsockname()[1]}/r-{'0' * 32}/v1"
        arguments = ["--run-dir", str(tmp_path), "--fd", str(listening.fileno())]
        trainer = subprocess.Popen(
            [sys.executable, "-m", "hermes_rl.trainer.process", *arguments],
            pass_fds=[listening.fileno()],
            stdout=output,
            stderr=output,
            env=os.environ
            | {
                "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
                "TINKER_API_KEY": "tml-nobody",
                "HERMES_RL_TRAJECTORIES_URL": f"http://127.0.0.1:{port}/r",
                "HERMES_RL_INFERENCE_URL": inference,
            },
        )
        try:
            _until_serving(inference, trainer, log)
            trainer.send_signal(signal.SIGTERM)
            told = time.monotonic()
            assert trainer.wait(timeout=120) == 0, log.read_text()
            assert time.monotonic() - told < TOLD_TO_STOP_SECONDS
        finally:
            trainer.kill()
            trainer.wait()
            engine.close()


def _until_serving(url: str, trainer: subprocess.Popen[bytes], log: Path) -> None:
    """The trainer serves before it looks for its engine."""
    import httpx

    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert trainer.poll() is None, log.read_text()
        try:
            httpx.get(url.removesuffix("/v1") + "/health", timeout=5.0)
            return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise AssertionError(log.read_text())
