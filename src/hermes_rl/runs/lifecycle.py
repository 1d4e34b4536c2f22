"""Starting, stopping, awaiting and reading runs. Runs in the process of whoever asks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from hermes_rl.config import RunConfig, Workspace, without_secrets
from hermes_rl.errors import ConfigError, HermesRLError, UnknownRunError, WorkspaceError
from hermes_rl.process_identity import process_mark, signal_process, wait_for_end
from hermes_rl.runs.branching import begin_from
from hermes_rl.runs.files import (
    ENDPOINTS,
    METRICS,
    PROGRESS,
    RUN_CONFIG,
    failure_file,
    read_checkpoints,
    read_json,
    write_progress,
)
from hermes_rl.runs.forking import fork_server
from hermes_rl.runs.launch import LaunchRequest, open_log
from hermes_rl.runs.metrics import Record, best_evaluation, curves, is_metric, last_of, read_records
from hermes_rl.runs.roles import ROLES
from hermes_rl.runs.run_status import RunStatus, current_status, list_statuses, settle
from hermes_rl.runs.states import ACTIVE, FINAL, ProcessState, RunState
from hermes_rl.runs.store import RunStore, as_json, open_store, utc_now

SUPERVISOR = "hermes_rl.runs.supervisor"
PENDING_SECONDS = 10.0
"""How long a run can take from being recorded to having a supervisor."""
STOP_SECONDS = 60.0
"""How long a supervisor may take to stop its processes before it is killed itself."""


def start(
    workspace: Workspace,
    config: RunConfig,
    *,
    search_id: str | None = None,
    trial: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    from_checkpoint: str | None = None,
    external_environment: bool = False,
    modules: Mapping[str, str] | None = None,
) -> str:
    """Start a run. Returns as soon as its supervisor is on its own; the run survives the caller's exit.

    Args:
        workspace: where the run lies.
        config: what it is told; ``config.run.run_id`` is its id.
        search_id, trial: the search it is a trial of.
        overrides: the fields that were set by hand, to show in listings.
        from_checkpoint: ``RUN`` or ``RUN@STEP``: begin with the weights and the optimizer of that run's last
            checkpoint, or the one of that step, and count steps on from there.
        external_environment: start no environment; someone else's joins (see ``environment.yaml`` in the
            run's folder).
        modules: role → Python module, in place of the role's own.

    Returns:
        The run's id.

    Raises:
        ConfigError: something the run needs is missing.
        UnknownRunError: there is no run to begin from.
        WorkspaceError: there is a run of that id, or its files cannot be written.
    """
    run_id = config.run.run_id
    _check_key(config)
    run_dir = workspace.run_dir(run_id)
    try:
        run_dir.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise WorkspaceError(f"There is a run {run_id} already.") from None
    except OSError as error:
        raise WorkspaceError(f"{run_dir} cannot be made: {error.strerror or error}.") from error
    if from_checkpoint is not None:
        try:
            config = begin_from(workspace, config, from_checkpoint)
        except HermesRLError:
            run_dir.rmdir()
            raise
    config.to_yaml(run_dir / RUN_CONFIG)
    store = open_store(workspace.state_url)
    store.add_run(
        run_id=run_id,
        environment=config.run.environment,
        profile=config.run.profile,
        seed=config.run.seed,
        overrides=as_json(without_secrets(overrides or {})),
        search_id=search_id,
        trial=trial,
        external_environment=external_environment,
        total_steps=config.env.total_steps,
        **_answering_process(),
    )
    _add_processes(store, run_id, external_environment)
    _supervise(workspace, store, run_id, external_environment, modules)
    return run_id


def resume(workspace: Workspace, run_id: str, *, modules: Mapping[str, str] | None = None) -> str:
    """Go on with a run that was stopped or failed, from its last checkpoint.

    Steps after the checkpoint are taken again, and their records replaced. A run without a checkpoint
    begins anew; its former metrics are kept beside the new ones.

    Args:
        workspace: where the run lies.
        run_id: a run that has ended without completing.
        modules: role → Python module, in place of the role's own.

    Returns:
        The run's id.

    Raises:
        UnknownRunError: there is no such run.
        ConfigError: the run cannot be resumed.
    """
    store = open_store(workspace.state_url)
    row = settle(workspace, store, store.run(run_id))
    if row.status == RunState.COMPLETED:
        raise ConfigError(f"Run {run_id} has completed: there is nothing to resume.")
    run_dir = workspace.run_dir(run_id)
    _check_key(RunConfig.from_yaml(run_dir / RUN_CONFIG))
    resumed = store.move_run(
        run_id,
        RunState.PENDING,
        **_answering_process(),
        reason=None,
        guilty_role=None,
        log_tail=None,
        ended_at=None,
        stop_requested=False,
        phase=None,
    )
    if not resumed:
        raise ConfigError(
            f"Run {run_id} is {store.run(run_id).status}: it goes on already.",
            hint=f"`hermes-rl run watch {run_id}` shows it.",
        )
    try:
        _put_back(run_dir, row.total_steps)
    except OSError as error:
        reason = f"its files cannot be written: {error.strerror or error}"
        own = (os.getpid(), process_mark(os.getpid()))
        store.move_run(run_id, RunState.FAILED, answered_by=own, reason=reason, ended_at=utc_now())
        raise WorkspaceError(f"Run {run_id}: {reason}.") from error
    _add_processes(store, run_id, row.external_environment)
    _supervise(workspace, store, run_id, row.external_environment, modules)
    return run_id


def _set_metrics_aside(run_dir: Path) -> None:
    """Keep the metrics of an attempt that left no checkpoint, apart from those of the next."""
    if (run_dir / METRICS).exists():
        number = 1 + len(list(run_dir.glob("metrics.before-resume-*.jsonl")))
        (run_dir / METRICS).rename(run_dir / f"metrics.before-resume-{number}.jsonl")
    (run_dir / PROGRESS).unlink(missing_ok=True)


def _put_back(run_dir: Path, total_steps: int) -> None:
    """Bring the files of a run that is resumed to where it goes on."""
    for role in ("api", "trainer", "env"):
        failure_file(run_dir, role).unlink(missing_ok=True)
    checkpoints = read_checkpoints(run_dir)
    if checkpoints:
        _rewind_progress(run_dir, max(entry["step"] for entry in checkpoints), total_steps)
    else:
        _set_metrics_aside(run_dir)


def _rewind_progress(run_dir: Path, step: int, total_steps: int) -> None:
    """Have a run that goes on from a checkpoint stand there, until its trainer speaks for itself."""
    latest: dict[str, Any] = {}
    for record in read_records(run_dir):
        if record.get("kind") in ("train", "eval") and record.get("step", 0) <= step:
            latest |= {name: value for name, value in record.items() if is_metric(name, value)}
    progress = {"step": step, "total_steps": total_steps, "phase": "starting", "latest": latest}
    write_progress(run_dir, progress)


def _answering_process() -> dict[str, Any]:
    """This process answers for the run until the supervisor does."""
    return {"supervisor_pid": os.getpid(), "supervisor_mark": process_mark(os.getpid())}


def _add_processes(store: RunStore, run_id: str, external_environment: bool) -> None:
    environment_state = ProcessState.EXTERNAL if external_environment else ProcessState.STARTING
    states = {spec.role: ProcessState.STARTING for spec in ROLES} | {"env": environment_state}
    blank = {"pid": None, "mark": None, "exit_code": None, "started_at": None, "ended_at": None}
    store.put_processes(run_id, {role: blank | {"state": state} for role, state in states.items()})


def _supervise(
    workspace: Workspace,
    store: RunStore,
    run_id: str,
    external_environment: bool,
    modules: Mapping[str, str] | None,
) -> None:
    """Start the supervisor of a pending run, for which this process answers until then."""
    starter = (os.getpid(), process_mark(os.getpid()))
    arguments = ["--workspace", str(workspace.root), "--run-id", run_id]
    arguments += ["--starter", f"{starter[0]}:{starter[1]}"]
    if external_environment:
        arguments.append("--external-environment")
    for role, module in (modules or {}).items():
        arguments += ["--module", f"{role}={module}"]
    try:
        pid = _detach(arguments, workspace, run_id)
    except OSError as error:
        reason = f"its supervisor could not be started: {error}"
        store.move_run(run_id, RunState.FAILED, answered_by=starter, reason=reason, ended_at=utc_now())
        raise WorkspaceError(f"Run {run_id}: {reason}.") from error
    mark = process_mark(pid)
    supervised = {"supervisor_pid": pid, "supervisor_mark": mark, "phase": "starting"}
    store.move_run(run_id, RunState.STARTING, answered_by=starter, **supervised)
    if mark is not None and store.run(run_id).stop_requested:
        signal_process(pid, mark, signal.SIGTERM)  # whoever stopped the pending run could not know the pid


def _check_key(config: RunConfig) -> None:
    if config.tinker.base_url != "local" and not os.environ.get("TINKER_API_KEY"):
        server = config.tinker.base_url or "the Tinker service"
        raise ConfigError(
            f"No key for {server}: TINKER_API_KEY is not set.",
            hint="Set TINKER_API_KEY in the environment, or use the profile 'embedded', which needs none.",
        )


def _detach(arguments: list[str], workspace: Workspace, run_id: str) -> int:
    """Start the supervisor in a session of its own, its output in its log; its pid.

    Raises:
        OSError: it cannot be started.
    """
    log_path = workspace.log_path("supervisor", run_id)
    server = fork_server()
    if server is not None and server.is_ready():
        request = LaunchRequest(SUPERVISOR, arguments, dict(os.environ), log_path)
        with contextlib.suppress(OSError):  # it went this very moment
            return server.detach(request)
    log = open_log(log_path)
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", SUPERVISOR, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    # It is this process's child, so this process must take note of its end while it lives.
    threading.Thread(target=supervisor.wait, name=f"reap-{run_id}", daemon=True).start()
    return supervisor.pid


def status(workspace: Workspace, run_id: str) -> RunStatus:
    """The true status of a run, whatever happened to its processes.

    Raises:
        UnknownRunError: there is no such run.
    """
    return current_status(workspace, run_id)


def list_runs(workspace: Workspace, search_id: str | None = None) -> list[RunStatus]:
    """Every run of the workspace, or of one search, oldest first, without processes."""
    return list_statuses(workspace, search_id)


def resolve_id(workspace: Workspace, text: str) -> str:
    """The full id of the run that ``text`` means: an id, the beginning of just one, or ``latest``.

    Raises:
        UnknownRunError: it means none, or several.
    """
    store = open_store(workspace.state_url)
    if text == "latest":
        latest = store.latest_run_id()
        if latest is None:
            raise UnknownRunError(
                "There are no runs yet.", hint="`hermes-rl run start ENVIRONMENT` starts one."
            )
        return latest
    found = store.run_ids_from(text) if text else []
    if text in found:
        return text
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownRunError(
            f"{text!r} is the beginning of {len(found)} runs.",
            allowed=found[:10],
            hint="Give more of the id.",
        )
    raise UnknownRunError(f"There is no run {text!r}.", hint="`hermes-rl run list` shows them all.")


def stop(workspace: Workspace, run_id: str, wait: bool = True) -> RunStatus:
    """Stop a run: environment, trainer, API server, in this order. A run that has ended stays as it is.

    Args:
        wait: return only when no process of the run is left (at most about :data:`STOP_SECONDS`).

    Raises:
        UnknownRunError: there is no such run.
    """
    store = open_store(workspace.state_url)
    row = store.run(run_id)
    if RunState(row.status) in FINAL:
        return current_status(workspace, run_id)
    store.update_run(run_id, stop_requested=True)
    row = _once_supervised(workspace, store, run_id)
    if RunState(row.status) in ACTIVE and row.status != RunState.PENDING:
        pid, mark = row.supervisor_pid, row.supervisor_mark
        signal_process(pid, mark, signal.SIGTERM)
        if wait and not wait_for_end(pid, mark, STOP_SECONDS):
            signal_process(pid, mark, signal.SIGKILL)
            wait_for_end(pid, mark, 5.0)
    return current_status(workspace, run_id)


def _once_supervised(workspace: Workspace, store: RunStore, run_id: str) -> Row[Any]:
    """The row of a run when it is no longer pending, or after a while all the same."""
    deadline = time.monotonic() + PENDING_SECONDS
    row = settle(workspace, store, store.run(run_id))
    while row.status == RunState.PENDING and time.monotonic() < deadline:
        time.sleep(0.02)
        row = settle(workspace, store, store.run(run_id))
    return row


def wait(workspace: Workspace, run_id: str, timeout: float | None = None) -> RunStatus:
    """Wait until a run has ended.

    Args:
        timeout: seconds; None waits for ever. When they pass, the status of the run that goes on is
            returned.

    Raises:
        UnknownRunError: there is no such run.
    """
    row = _once_supervised(workspace, open_store(workspace.state_url), run_id)
    if RunState(row.status) in ACTIVE and row.status != RunState.PENDING:
        wait_for_end(row.supervisor_pid, row.supervisor_mark, timeout)
    return current_status(workspace, run_id)


def read_metrics(workspace: Workspace, run_id: str) -> list[Record]:
    """Every metrics record of a run, in order, each step once."""
    return read_records(workspace.run_dir(run_id))


def results(workspace: Workspace, run_id: str) -> dict[str, Any]:
    """What came of a run, also while it goes on.

    Returns:
        ``status``, ``reason``, ``step``, ``total_steps``; ``metrics`` (last training record),
        ``evaluation`` (last evaluation with its count), ``best_evaluation``; ``curves`` (columns over
        steps); ``checkpoints`` (step, path); ``tokens`` and ``seconds`` in total; ``files``.

    Raises:
        UnknownRunError: there is no such run.
    """
    now = current_status(workspace, run_id)
    run_dir = workspace.run_dir(run_id)
    records = read_records(run_dir)
    until = now.ended_at or utc_now()
    return {
        "run_id": run_id,
        "environment": now.environment,
        "profile": now.profile,
        "seed": now.seed,
        "overrides": now.overrides,
        "status": now.status,
        "reason": now.reason,
        "step": now.step,
        "total_steps": now.total_steps,
        "metrics": _plain(last_of(records, "train")),
        "evaluation": _plain(last_of(records, "eval")),
        "best_evaluation": _plain(best_evaluation(records)),
        "curves": curves(records),
        "checkpoints": read_checkpoints(run_dir),
        "tokens": sum(record.get("trained_tokens", 0) for record in records if record.get("kind") == "train"),
        "seconds": (until - now.started_at).total_seconds() if now.started_at else 0.0,
        "files": {
            "config": str(run_dir / RUN_CONFIG),
            "metrics": str(run_dir / METRICS),
            "progress": str(run_dir / PROGRESS),
            **now.logs,
        },
    }


def endpoints(workspace: Workspace, run_id: str) -> dict[str, str]:
    """The URLs of a running run's servers, by the names of the environment variables that carry them.

    Whoever knows a URL may use the server.

    Raises:
        UnknownRunError: there is no such run.
        HermesRLError: the run has no servers now.
    """
    urls = read_json(workspace.run_dir(run_id) / ENDPOINTS)
    now = current_status(workspace, run_id)
    if urls is None or now.is_final:
        raise HermesRLError(f"Run {run_id} has no servers: it is {now.status}.")
    return urls


def _plain(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in ("kind",)}
