"""Finds, starts and stops engines of a workspace. Used by every process that needs one; imports no torch.

An engine's address lies in ``WORKSPACE/engines/KEY.json``, readable by its owner only, where KEY stands for
the model and settings it serves. A lock beside it makes sure that of several callers one starts the engine
and the others join it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hermes_rl.config import Workspace
from hermes_rl.config.workspace import STATE_URL_VARIABLE
from hermes_rl.errors import EngineError
from hermes_rl.process_identity import end_processes, is_alive

START_TIMEOUT_S = 600.0
ANSWER_SECONDS = 60.0
"""How long an engine that others may be using has to answer before it is ended and another one started."""
STOP_SECONDS = 10.0
"""How long an engine may take to end before it is killed."""
_KEYS_OF_OTHERS = frozenset(
    {"TINKER_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"}
    | {STATE_URL_VARIABLE}
)
"""Secrets that an engine has no use for and does not get."""
IDLE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class EngineSpec:
    """What an engine serves. Equal specs share one engine.

    Attributes:
        model: folder or hub name of the base model.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        lora_alpha: numerator of every adapter's scaling ``alpha / rank``.
        threads: compute threads; 0 chooses by model size.
        idle_timeout: seconds without a session after which the engine ends; not part of its identity.
    """

    model: str
    device: str = "auto"
    lora_alpha: float = 32.0
    threads: int = 0
    idle_timeout: float = IDLE_TIMEOUT_S

    @property
    def key(self) -> str:
        """Name of the engine's files."""
        model = str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model
        identity = json.dumps([model, self.device, float(self.lora_alpha), self.threads])
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine answers."""

    base_url: str
    api_key: str
    pid: int


@dataclass(frozen=True)
class EngineRecord:
    """A running engine of a workspace.

    Attributes:
        key: name of its files.
        address: where it answers.
        spec: what it serves.
        mark: which process it is; see :func:`hermes_rl.process_identity.process_mark`.
        started: UNIX time, to show.
    """

    key: str
    address: EngineAddress
    spec: dict[str, Any]
    mark: str
    started: float


def ensure_engine(ws: Workspace, spec: EngineSpec, *, timeout: float = START_TIMEOUT_S) -> EngineAddress:
    """The address of a running engine for ``spec``; starts a detached one when there is none.

    Args:
        ws: the workspace whose engines are shared.
        spec: what it must serve.
        timeout: seconds to wait until it is ready.

    Raises:
        EngineError: it did not start; the message holds the end of its log.
    """
    ws.engines.mkdir(parents=True, exist_ok=True)
    ws.logs.mkdir(parents=True, exist_ok=True)
    with _locked(ws.engines / f"{spec.key}.lock", timeout):
        record = _read(ws.engines / f"{spec.key}.json")
        if record is not None and _answers_in_time(record):
            return record.address
        if record is not None:
            _end(record)
        return _start(ws, spec, timeout)


def list_engines(ws: Workspace) -> list[EngineRecord]:
    """Engines of this workspace that are alive."""
    records = [_read(file) for file in sorted(ws.engines.glob("*.json"))]
    return [record for record in records if record is not None]


def stop_engine(ws: Workspace, key: str) -> bool:
    """End an engine. Returns whether one was running."""
    record = _read(ws.engines / f"{key}.json")
    if record is None:
        return False
    _end(record)
    (ws.engines / f"{key}.json").unlink(missing_ok=True)
    return True


def engine_log(ws: Workspace, key: str) -> Path:
    """The log file of an engine."""
    return ws.logs / f"engine_{key}.log"


def _start(ws: Workspace, spec: EngineSpec, timeout: float) -> EngineAddress:
    address_file = ws.engines / f"{spec.key}.json"
    address_file.unlink(missing_ok=True)
    log = engine_log(ws, spec.key)
    command = [
        sys.executable, "-P", "-m", "hermes_rl.engine.process",
        "--model", spec.model,
        "--device", spec.device,
        "--lora-alpha", str(spec.lora_alpha),
        "--threads", str(spec.threads),
        "--idle-timeout", str(spec.idle_timeout),
        "--checkpoints", str(ws.checkpoints),
        "--address-file", str(address_file),
    ]  # fmt: skip
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name not in _KEYS_OF_OTHERS},
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        record = _read(address_file)
        if record is not None and record.address.pid == process.pid and _answers(record.address):
            return record.address
        if process.poll() is not None:
            raise EngineError(
                f"The engine for {spec.model} ended with status {process.returncode}: {_tail(log, begin)}",
                hint=f"Its log is {log}.",
            )
        time.sleep(0.05)
    process.terminate()
    raise EngineError(
        f"The engine for {spec.model} was not ready after {timeout:.0f} s.", hint=f"Its log is {log}."
    )


def _read(file: Path) -> EngineRecord | None:
    """The engine a file names, if that process is still the one that wrote it."""
    try:
        data = json.loads(file.read_text())
        record = EngineRecord(
            file.stem,
            EngineAddress(data["base_url"], data["api_key"], int(data["pid"])),
            dict(data["spec"]),
            str(data["mark"]),
            float(data["started"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if is_alive(record.address.pid, record.mark) else None


def _answers(address: EngineAddress) -> bool:
    try:
        response = httpx.get(
            f"{address.base_url}/api/v1/get_server_capabilities",
            headers={"X-API-Key": address.api_key},
            timeout=10.0,
        )
        return response.status_code == 200
    except httpx.HTTPError:
        return False


def _answers_in_time(record: EngineRecord) -> bool:
    """Whether an engine answers; False at once when it ends, as one that was idle does."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while is_alive(record.address.pid, record.mark):
        if _answers(record.address):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return False


def _end(record: EngineRecord) -> None:
    end_processes([(record.address.pid, record.mark)], grace=STOP_SECONDS)


def _tail(log: Path, begin: int, lines: int = 5) -> str:
    try:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return " | ".join(text.splitlines()[-lines:])


@contextlib.contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    with path.open("a") as file:
        os.chmod(path, 0o600)
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"Another process has held {path} for {timeout:.0f} s.",
                        hint="It is starting an engine; look at its log, or remove the file.",
                    ) from None
                time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
