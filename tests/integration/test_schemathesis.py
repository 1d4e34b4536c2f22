"""Both servers fuzzed from their own OpenAPI descriptions: no 5xx, no hang, no leak of memory.

``$HERMES_RL_FUZZ_SECONDS`` sets how long each server is fuzzed (10).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace, build_run_config
from hermes_rl.engine.registry import list_engines, stop_engine
from hermes_rl.environments.discovery import find
from hermes_rl.runs.store import open_store

pytest.importorskip("schemathesis")

SECONDS = int(os.environ.get("HERMES_RL_FUZZ_SECONDS", "10"))
HANG_SECONDS = 15.0
MOST_MEMORY = 2 * 2**30
CONFIG = """
[parameters]
"query.wait" = 0.01
"""
"""Long polls are meant to wait; here they must not."""


def fuzz(url: str, base: str, folder: Path) -> str:
    """Fuzz the server that describes itself below ``url``; what schemathesis says at the end.

    Args:
        url: where the description lies.
        base: what its paths are relative to.
        folder: for schemathesis's files.
    """
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    command += [f"{url}/openapi.json", "--url", base, "--checks", "not_a_server_error"]
    command += ["--request-timeout", str(HANG_SECONDS), "--max-time", str(SECONDS), "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS + 400, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """URL and pid of an API server."""
    address = tmp_path / "address.json"
    command = [sys.executable, "-m", "hermes_rl.trajectories.process", "--address-file", str(address)]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 240
        while not address.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield json.loads(address.read_text())["url"], server.pid
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


@pytest.fixture
def inference(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """URL and pid of the trainer of a run that waits for its environment."""
    workspace = Workspace.resolve(tmp_path / "w")
    environment = find(workspace.environments_dirs, "arithmetic_tinker")
    config = build_run_config(environment, overrides={"total_steps": 1, "max_token_length": 64})
    run_id = runs.start(workspace, config, external_environment=True)
    try:
        deadline = time.monotonic() + 300
        while (status := runs.status(workspace, run_id)).status != "running":
            assert not status.is_final, status
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        rows = open_store(workspace.state_url).processes(run_id)
        url = runs.endpoints(workspace, run_id)["HERMES_RL_INFERENCE_URL"].removesuffix("/v1")
        yield url, next(row.pid for row in rows if row.role == "trainer")
        assert runs.status(workspace, run_id).status == "running"
    finally:
        runs.stop(workspace, run_id)
        for engine in list_engines(workspace):
            stop_engine(workspace, engine.key)


@pytest.mark.parametrize("server", ["api_server", "inference"])
def test_no_request_that_the_description_allows_breaks_a_server(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url, pid = request.getfixturevalue(server)
    parts = urlsplit(url)
    base = url if server == "api_server" else f"{parts.scheme}://{parts.netloc}"
    assert httpx.get(f"{parts.scheme}://{parts.netloc}/openapi.json", timeout=60).status_code == 404
    said = fuzz(url, base, tmp_path)
    print(said[-2500:])
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert psutil.Process(pid).memory_info().rss < MOST_MEMORY
