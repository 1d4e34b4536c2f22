"""``hermes-rl doctor``: what a user loses if these fail is knowing why nothing works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from hermes_rl.config import Workspace, embedded_model_dir
from hermes_rl.runs.diagnosis import broken_model
from hermes_rl.runs.run_status import RUN_ID_VARIABLE
from hermes_rl.runs.store import open_store

SECRETS = {"TINKER_API_KEY": "tml-recognisable", "WANDB_API_KEY": "w" * 40}


def examine(
    root: Path, *arguments: str, path: Path | None = None, **variables: str
) -> tuple[int, dict[str, Any], str]:
    env = {name: value for name, value in os.environ.items() if name not in (*SECRETS, "WANDB_MODE")}
    env |= {"HF_HUB_OFFLINE": "1", "NETRC": os.devnull} | variables
    command = [sys.executable, "-m", "hermes_rl", "doctor", "--json", "--workspace", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.stdout.startswith("["), done.stderr
    return done.returncode, {entry["name"]: entry for entry in json.loads(done.stdout)}, done.stdout


def test_this_machine_can_walk_the_default_path_and_what_is_missing_has_a_remedy(tmp_path: Path) -> None:
    status, found, _ = examine(tmp_path / "w")
    assert status == 0
    assert {"Python", "cores", "memory", "disk", "GPU", "torch", "packages", "workspace", "W&B"} <= set(found)
    assert {"TINKER_API_KEY", "hub", "embedded model", "engines", "leftover processes"} <= set(found)
    for entry in found.values():
        assert entry["state"] in ("ok", "note"), entry
    for name in ("W&B", "TINKER_API_KEY", "hub"):
        assert found[name]["state"] == "note"
        assert found[name]["needed_for"]
        assert found[name]["remedy"]


def test_keys_are_said_to_be_there_and_never_shown(tmp_path: Path) -> None:
    _, found, shown = examine(tmp_path / "w", **SECRETS)
    assert found["TINKER_API_KEY"]["found"].startswith("is set")
    assert found["W&B"]["found"].startswith("online")
    assert not any(secret in shown for secret in SECRETS.values())


def test_the_mode_of_wandb_is_said_with_its_reason(tmp_path: Path) -> None:
    _, found, _ = examine(tmp_path / "w", WANDB_MODE="offline")
    assert found["W&B"]["found"] == "offline: WANDB_MODE is offline"


def test_a_hub_that_answers_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        _, found, _ = examine(tmp_path / "w", HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint, NO_PROXY="127.0.0.1")
        assert found["hub"]["state"] == "ok"
    finally:
        server.shutdown()
        server.server_close()
    _, found, _ = examine(tmp_path / "w", HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint, NO_PROXY="127.0.0.1")
    assert found["hub"]["state"] == "note"


def test_a_workspace_that_is_no_folder_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, found, _ = examine(tmp_path / "file")
    assert (status, found["workspace"]["state"]) == (1, "wrong")
    assert found["workspace"]["remedy"]


def test_a_state_store_of_another_version_is_wrong(tmp_path: Path) -> None:
    workspace = Workspace.resolve(tmp_path / "w")
    open_store(workspace.state_url)
    with create_engine(workspace.state_url).begin() as connection:
        connection.execute(text("update runs_schema set version = 999"))
    status, found, _ = examine(workspace.root)
    assert (status, found["state store"]["state"]) == (1, "wrong")


def test_what_an_ended_run_has_left_is_named_with_how_to_end_it(tmp_path: Path) -> None:
    workspace = Workspace.resolve(tmp_path / "w")
    store = open_store(workspace.state_url)
    store.add_run(
        run_id="old", environment="x", profile="embedded", seed=0, overrides={}, external_environment=False,
        total_steps=3, supervisor_pid=1, supervisor_mark="gone",
    )  # fmt: skip
    store.move_run("old", "failed", reason="a test")
    (workspace.engines / "feed.json").write_text("{}")
    left = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, RUN_ID_VARIABLE: "old"}
    )
    try:
        _, found, _ = examine(workspace.root)
    finally:
        left.communicate(b"\n")
    assert found["leftover processes"]["remedy"] == f"kill {left.pid}"
    assert "feed" in found["engines"]["found"]


@pytest.mark.parametrize("damage", ["missing", "short", "nonsense"])
def test_a_damaged_model_is_recognised(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded_model_dir(), folder)
    assert broken_model(folder) is None
    weights = folder / "model.safetensors"
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "short":
        os.truncate(weights, weights.stat().st_size - 10)
    else:
        weights.write_bytes(b"not a model at all")
    assert broken_model(folder)
