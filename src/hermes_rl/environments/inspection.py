"""An environment's own configuration fields, read in a child process and remembered on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hermes_rl.config import CatalogueField, Workspace, write_private
from hermes_rl.environments.discovery import DiscoveredEnvironment
from hermes_rl.errors import EnvironmentFailedError

INSPECTION_TIMEOUT_S = 120.0
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "HERMES_RL_")
_FORMAT = "3"


def environment_fields(
    workspace: Workspace, environment: DiscoveredEnvironment, *, timeout: float = INSPECTION_TIMEOUT_S
) -> list[CatalogueField]:
    """The fields of an environment's configuration class that only it has.

    The environment is imported in a child process, which gets no keys or tokens in its environment
    variables. The answer is remembered in the workspace until one of the Python files beside the
    environment's file changes.

    Args:
        workspace: where answers are remembered.
        environment: what discovery found.
        timeout: longest time the import may take, in seconds.

    Raises:
        EnvironmentFailedError: the file cannot be used, its import fails, ends the interpreter or never
            ends.
    """
    if environment.error is not None:
        raise EnvironmentFailedError(f"Environment {environment.name!r} cannot be used: {environment.error}")
    remembered = workspace.root / "cache" / "fields" / f"{_fingerprint(environment)}.json"
    try:
        return _as_fields(json.loads(remembered.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        pass  # never read before, or by another version
    fields = read_in_child(environment, timeout=timeout)
    with contextlib.suppress(OSError):
        remembered.parent.mkdir(parents=True, exist_ok=True)
        write_private(remembered, json.dumps({"fields": fields}))
    return _as_fields({"fields": fields})


def read_in_child(environment: DiscoveredEnvironment, *, timeout: float) -> list[dict[str, object]]:
    """The fields as the child process gives them.

    Raises:
        EnvironmentFailedError: the child failed, died or took longer than ``timeout`` seconds.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.upper() for word in _SECRET_WORDS)
    }
    variables["WANDB_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "fields.json")
        log = Path(folder, "log.txt")
        with log.open("wb") as stream:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hermes_rl.environments.field_reader",
                    str(environment.file_path.resolve()),
                    environment.class_name,
                    str(output),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=folder,
                start_new_session=True,
            )
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                raise EnvironmentFailedError(
                    f"Importing {environment.file_path} did not end within {timeout:.0f} s."
                ) from None
            finally:
                # Also what the environment may have started in the child's session.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        try:
            answer = json.loads(output.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise EnvironmentFailedError(
                f"Importing {environment.file_path} ended the interpreter (status {status})."
                + (f" Last output: {tail[0][:300]}" if tail else "")
            ) from None
    if "error" in answer:
        raise EnvironmentFailedError(answer["error"], hint=answer.get("hint"))
    return answer["fields"]


def _as_fields(answer: dict[str, Any]) -> list[CatalogueField]:
    return [_as_field(values) for values in answer["fields"]]


def _as_field(values: dict[str, Any]) -> CatalogueField:
    choices, items = values.get("choices"), values.get("items")
    fixed = tuple(choices) if isinstance(choices, list) else None
    inner = _as_field(items) if isinstance(items, dict) else None
    return CatalogueField(**{**values, "choices": fixed, "items": inner})


def _fingerprint(environment: DiscoveredEnvironment) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    path = environment.file_path.resolve()
    digest.update(f"{path}\0{environment.class_name}\0".encode())
    with contextlib.suppress(OSError):
        digest.update(path.read_bytes())
    # Its neighbours may hold its base class.
    for neighbour in sorted(path.parent.glob("*.py")):
        with contextlib.suppress(OSError):
            status = neighbour.stat()
            digest.update(f"{neighbour.name}\0{status.st_mtime_ns}\0{status.st_size}\0".encode())
    return digest.hexdigest()[:32]
