"""``rl_test_inference``: started, awaited and read. Runs in the caller's process.

The work is done by a process of its own (:mod:`hermes_rl.agent.inference_process`), so that a caller who
cannot wait asks again later.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hermes_rl.agent.arguments import TestInference
from hermes_rl.agent.inference_process import BASE, PROGRESS, REQUEST, RESULT
from hermes_rl.agent.session import AgentSession
from hermes_rl.config import Policy, Workspace, checked_name, write_private
from hermes_rl.errors import ConfigError, HermesRLError
from hermes_rl.process_identity import is_alive, process_mark
from hermes_rl.runs.files import read_json, tail

FOLDER = "inference-tests"
PROCESS = "process.json"
LOG = "test.log"
_POLL_SECONDS = 0.1


def check_inference(session: AgentSession, request: TestInference) -> dict[str, Any]:
    """Start a test, or go on waiting for one, for as long as the request or the session says."""
    workspace = session.workspace
    note: str | None = None
    if request.test_id is None:
        test_id, note = _start(session, request)
    else:
        test_id = checked_name(request.test_id)
    folder = workspace.root / FOLDER / test_id
    if not (folder / REQUEST).exists():
        raise HermesRLError(f"There is no test {test_id!r}.", hint="Leave test_id out to start one.")
    patience = session.patience if request.wait_seconds is None else request.wait_seconds
    deadline = None if patience is None else time.monotonic() + patience
    result = _await_result(folder, deadline)
    answer: dict[str, Any] = {"test_id": test_id}
    if note is not None:
        answer["note"] = note
    if result is not None:
        return {**answer, "state": "completed", **result, "folder": str(folder)}
    return {
        **answer,
        "state": "running",
        "progress": read_json(folder / PROGRESS),
        "check_again_in_seconds": 10,
        "next": f"rl_test_inference(test_id={test_id!r})",
    }


def _start(session: AgentSession, request: TestInference) -> tuple[str, str | None]:
    planned = session.next_run()
    models = _chosen(session.policy(), request.models)
    config = planned.config
    if request.group_size is not None:
        # Beyond the batch size only training needs whole batches; a trial takes single groups.
        env = config.env.model_copy(update={"group_size": request.group_size})
        config = config.model_copy(update={"env": env})
    test_id = f"t{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = session.workspace.root / FOLDER / test_id
    folder.mkdir(parents=True, mode=0o700)
    config.to_yaml(folder / "run.yaml")
    write_private(folder / REQUEST, json.dumps({"num_steps": request.num_steps, "models": models}))
    _spawn(session.workspace, folder)
    return test_id, planned.note


def _chosen(policy: Policy, names: list[str] | None) -> dict[str, dict[str, Any] | None]:
    models: dict[str, dict[str, Any] | None] = {}
    for name in dict.fromkeys(names or [BASE]):
        if name == BASE:
            models[name] = None
        elif name in policy.models:
            models[name] = policy.models[name].model_dump()
        else:
            raise ConfigError(
                f"There is no model {name[:80]!r}.",
                allowed=[BASE, *policy.models],
                hint="The operator configures models under [models.NAME] in the policy file.",
            )
    return models


def _spawn(workspace: Workspace, folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "hermes_rl.agent.inference_process"]
    command += ["--workspace", str(workspace.root), "--dir", str(folder)]
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(log)
    write_private(folder / PROCESS, json.dumps({"pid": process.pid, "mark": process_mark(process.pid)}))
    threading.Thread(target=process.wait, name=f"reap-{folder.name}", daemon=True).start()


def _await_result(folder: Path, deadline: float | None) -> dict[str, Any] | None:
    """The result; None when it is not there at the deadline."""
    while True:
        process = read_json(folder / PROCESS) or {}
        alive = is_alive(process.get("pid"), process.get("mark"))
        result = read_json(folder / RESULT)
        if result is not None:
            return result
        if not alive:
            raise HermesRLError(
                f"The test {folder.name} ended without a result. {tail(folder / LOG, 1)}".strip(),
                hint=f"See {folder / LOG}.",
            )
        if deadline is not None and time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
