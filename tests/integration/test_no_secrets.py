"""Keys that were set in the environment are nowhere in the workspace and in no list of processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.engine.registry import list_engines, stop_engine

DATA = Path(__file__).resolve().parents[1] / "data" / "environments"
SECRETS = {
    "TINKER_API_KEY": "tml-recognisable-tinker",
    "WANDB_API_KEY": "recognisable-wandb".ljust(40, "w"),
    "HF_TOKEN": "hf_recognisable",
    "OPENAI_API_KEY": "sk-recognisable-openai",
}
CAPABILITY = re.compile(rb"r-[0-9a-f]{32}|key-[0-9a-f]{32}|tml-[0-9a-f]{48}")
MAY_HOLD_ADDRESSES = re.compile(r"^engines/[0-9a-f]+\.json$")
"""Of running engines, readable by their owner only."""
TINY = ["total_steps=2", "steps_per_eval=1", "num_requests_for_eval=8", "group_size=4", "batch_size=8"]


class ProcessList:
    """Reads the command lines of a workspace's processes again and again.

    Those of others are left out: tests beside this one start servers whose address is an argument.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._root = str(workspace.root)
        self.seen: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProcessList:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.2):
            for process in psutil.process_iter(["cmdline", "environ"]):
                line = " ".join(process.info["cmdline"] or [])
                if self._root in line or self._root in (process.info["environ"] or {}).values():
                    self.seen.add(line)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    made = Workspace.resolve(tmp_path_factory.mktemp("secrets") / "w")
    shutil.copy(DATA / "leaking.py", made.environments)
    yield made
    for run in runs.list_runs(made):
        if not run.is_final:
            runs.stop(made, run.run_id)
    for engine in list_engines(made):
        stop_engine(made, engine.key)


def hermes(workspace: Workspace, *arguments: str, wandb: str = "disabled") -> str:
    env = {**os.environ, **SECRETS, "HERMES_RL_WORKSPACE": str(workspace.root), "WANDB_MODE": wandb}
    settings = [part for one in TINY for part in ("--set", one)] if "start" in arguments else []
    command = [sys.executable, "-m", "hermes_rl", *arguments, *settings]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    return done.stdout + done.stderr


def test_no_secret_is_in_any_file_output_or_process_list(workspace: Workspace) -> None:
    with ProcessList(workspace) as listed:
        project = ("--set", "wandb_project=secrets")
        shown = hermes(workspace, "run", "start", "arithmetic_tinker", "--follow", *project, wandb="offline")
        shown += hermes(workspace, "run", "start", "leaking", "--follow", *project, wandb="offline")
        shown += hermes(
            workspace, "search", "start", "--space", "learning_rate=4e-5,8e-5", "--replicate", "0"
        )
        shown += hermes(workspace, "run", "list") + hermes(workspace, "search", "status", "last")
        for status in runs.list_runs(workspace):
            shown += hermes(workspace, "run", "status", status.run_id)
            shown += json.dumps(runs.results(workspace, status.run_id), default=str)
        shown += hermes(workspace, "doctor")
    ended = [status.status for status in runs.list_runs(workspace)]
    assert sorted(ended) == ["completed", "completed", "completed", "failed"], shown
    leaked = (workspace.logs / f"env_{_failed(workspace)}.log").read_text()
    assert "by descriptor: <secret>\n" in leaked
    assert "by buffer: <secret>\n" in leaked
    assert leaked.count("\nOPENAI_API_KEY=<secret>\n") == 2, "what subprocesses wrote is in the log"

    for status in runs.list_runs(workspace)[:2]:
        kept = list((workspace.run_dir(status.run_id) / "wandb").glob("offline-run-*/*.wandb"))
        assert len(kept) == 1, "what W&B keeps is looked through below"

    _check("the output of commands", shown.encode())
    assert any("hermes_rl.engine.process" in line for line in listed.seen)
    _check("the process list", "\n".join(listed.seen).encode())
    for file in workspace.root.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # an engine that ends takes its away
            name = str(file.relative_to(workspace.root))
            _check(name, file.read_bytes(), addresses=not MAY_HOLD_ADDRESSES.match(name))
            if MAY_HOLD_ADDRESSES.match(name):
                assert file.stat().st_mode & 0o077 == 0


def _failed(workspace: Workspace) -> str:
    return next(status.run_id for status in runs.list_runs(workspace) if status.status == "failed")


def _check(where: str, data: bytes, *, addresses: bool = True) -> None:
    for name, secret in SECRETS.items():
        assert secret.encode() not in data, f"{name} is in {where}"
    if addresses:
        found = CAPABILITY.search(data)
        assert found is None, f"{found and found[0]} is in {where}"
