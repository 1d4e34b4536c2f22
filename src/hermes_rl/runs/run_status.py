"""What is known of a run at this moment, for whoever asks. Runs in the asking process.

The supervisor writes the state of its run; when it was killed it cannot, so whoever asks checks that it
still runs, and if not, ends what it left behind and records that the run failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import psutil
from pydantic import BaseModel
from sqlalchemy.engine import Row

from hermes_rl.config import Role, Workspace, without_secrets
from hermes_rl.process_identity import end_processes, is_alive, process_mark, processes_with
from hermes_rl.runs.files import read_progress, tail
from hermes_rl.runs.roles import ROLES
from hermes_rl.runs.states import ProcessState, RunState
from hermes_rl.runs.store import RunStore, answering, is_active, open_store, utc_now

CPU_SAMPLE_SECONDS = 0.1
LEFTOVER_GRACE_SECONDS = 5.0
RUN_ID_VARIABLE = "HERMES_RL_RUN_ID"
SUPERVISOR_VARIABLE = "HERMES_RL_SUPERVISOR"
SUPERVISOR_DIED = "its supervisor died"


class ProcessStatus(BaseModel):
    """One process of a run.

    Attributes:
        role: ``api``, ``trainer``, ``env`` or ``engine`` (shared with other runs).
        state: see :class:`hermes_rl.runs.states.ProcessState`.
        cpu_percent: of one core, over the last tenth of a second; None when it does not run.
        memory_mb: memory with its children, pages shared with others in parts, in
            2**20 bytes; None when it does not run.
    """

    role: str
    pid: int | None
    state: str
    exit_code: int | None = None
    cpu_percent: float | None = None
    memory_mb: float | None = None


class RunStatus(BaseModel):
    """Everything that `run status` shows.

    Attributes:
        status: see :class:`hermes_rl.runs.states.RunState`.
        phase: what goes on inside ``starting`` and ``running``.
        reason: why the run ended.
        guilty_role: the process whose end ended the run.
        log_tail: the last lines of that process's log.
        step, total_steps: optimizer steps taken and wanted.
        reward_mean, percent_correct: of the last training batch; None before the first step.
        eval_percent_correct: of the last evaluation; None before the first.
        logs: role → log file.
        overrides: the fields that were set by hand, without secrets.
    """

    run_id: str
    environment: str
    profile: str
    seed: int
    status: str
    phase: str | None = None
    reason: str | None = None
    guilty_role: str | None = None
    log_tail: str | None = None
    step: int = 0
    total_steps: int
    reward_mean: float | None = None
    percent_correct: float | None = None
    eval_percent_correct: float | None = None
    loss: float | None = None
    processes: list[ProcessStatus] = []
    logs: dict[str, str]
    run_dir: str
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    search_id: str | None = None
    trial: int | None = None
    overrides: dict[str, Any] = {}

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.status in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED)


def current_status(workspace: Workspace, run_id: str) -> RunStatus:
    """The true status of one run.

    Raises:
        UnknownRunError: there is no such run.
    """
    store = open_store(workspace.state_url)
    row = settle(workspace, store, store.run(run_id))
    recorded = store.processes(run_id)
    usage = _measure([process for process in recorded if is_alive(process.pid, process.mark)])
    order = {spec.role: place for place, spec in enumerate(ROLES)}
    listed = [
        _process_status(process, usage, active=is_active(row))
        for process in sorted(recorded, key=lambda process: order.get(process.role, len(order)))
        if process.role != "engine" or (is_active(row) and process.pid in usage)
    ]
    return _status(workspace, row, listed)


def glance(workspace: Workspace, run_id: str) -> RunStatus:
    """The true status of one run without its processes: cheap enough for several times a second.

    Raises:
        UnknownRunError: there is no such run.
    """
    store = open_store(workspace.state_url)
    return _status(workspace, settle(workspace, store, store.run(run_id)), [])


def list_statuses(workspace: Workspace, search_id: str | None = None) -> list[RunStatus]:
    """The status of every run (of one search), oldest first, without its processes."""
    store = open_store(workspace.state_url)
    return [_status(workspace, settle(workspace, store, row), []) for row in store.all_runs(search_id)]


def settle(workspace: Workspace, store: RunStore, row: Row[Any]) -> Row[Any]:
    """Find out whether an active run still has the process that answers for it; if not, record its failure.

    Ending what it left takes seconds, in which the run may be resumed by someone else, or a supervisor whose
    starter was killed may get so far as to record itself. So everything here is about the one attempt that
    was found dead, and of a run that is another attempt's by then nothing is changed.

    Returns:
        The row as it is now.
    """
    while True:
        if not is_active(row) or is_alive(row.supervisor_pid, row.supervisor_mark):
            return row
        recorded = store.processes(row.run_id)
        before, row = answering(row), store.run(row.run_id)  # it may have ended, or go on, meanwhile
        if is_active(row) and answering(row) == before:
            break  # so the processes are those of the dead attempt
    end_leftovers(row.run_id, recorded)
    interrupted = row.status == RunState.PENDING
    state, reason = RunState.FAILED, "its start was interrupted" if interrupted else SUPERVISOR_DIED
    if row.stop_requested:
        state, reason = RunState.STOPPED, "stopped on request"
    store.move_run(
        row.run_id,
        state,
        answered_by=answering(row),
        reason=reason,
        guilty_role=None if row.stop_requested else "supervisor",
        log_tail=tail(workspace.log_path("supervisor", row.run_id)) or None,
        progress=read_progress(workspace.run_dir(row.run_id)) or None,
        phase=None,
        ended_at=utc_now(),
    )
    return store.run(row.run_id)


def end_leftovers(run_id: str, recorded: Sequence[Row[Any]]) -> None:
    """End what a supervisor that is gone has left.

    Args:
        run_id: the run.
        recorded: its processes by the store, all of an attempt whose supervisor is gone. What else carries
            the run's id is ended only if its own supervisor is gone.
    """
    left = {
        process.pid: process.mark
        for process in recorded
        if process.role != "engine" and is_alive(process.pid, process.mark)
    }
    for pid in processes_with(RUN_ID_VARIABLE, run_id):
        mark = process_mark(pid)
        if mark is not None and not _has_supervisor(pid):
            left.setdefault(pid, mark)
    end_processes(list(left.items()), grace=LEFTOVER_GRACE_SECONDS)


def _has_supervisor(pid: int) -> bool:
    """Whether the supervisor that started a process still runs."""
    try:
        supervisor = psutil.Process(pid).environ().get(SUPERVISOR_VARIABLE, "")
    except (psutil.Error, OSError):
        return False
    number, _, mark = supervisor.partition(":")
    return number.isdigit() and is_alive(int(number), mark)


def _status(workspace: Workspace, row: Row[Any], listed: list[ProcessStatus]) -> RunStatus:
    progress: Mapping[str, Any] = row.progress or {}
    if is_active(row):
        progress = read_progress(workspace.run_dir(row.run_id))
    latest = progress.get("latest") or {}
    phase = row.phase
    if row.status == RunState.RUNNING and progress.get("phase"):
        phase = progress["phase"]
    roles: Sequence[Role] = ("api", "trainer", "env", "supervisor")
    return RunStatus(
        run_id=row.run_id,
        environment=row.environment,
        profile=row.profile,
        seed=row.seed,
        status=row.status,
        phase=phase,
        reason=row.reason,
        guilty_role=row.guilty_role,
        log_tail=row.log_tail,
        step=progress.get("step") or 0,
        total_steps=progress.get("total_steps") or row.total_steps,
        reward_mean=latest.get("reward_mean"),
        percent_correct=latest.get("percent_correct"),
        eval_percent_correct=latest.get("eval_percent_correct"),
        loss=latest.get("loss"),
        processes=listed,
        logs={role: str(workspace.log_path(cast(Role, role), row.run_id)) for role in roles},
        run_dir=str(workspace.run_dir(row.run_id)),
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        search_id=row.search_id,
        trial=row.trial,
        overrides=without_secrets(row.overrides or {}),  # an earlier version kept them
    )


def _process_status(
    row: Row[Any], usage: Mapping[int, tuple[float, float]], *, active: bool
) -> ProcessStatus:
    cpu, memory = usage.get(row.pid, (None, None))
    state = row.state
    if state in (ProcessState.STARTING, ProcessState.RUNNING) and row.pid not in usage:
        never_started = active and row.pid is None
        gone = ProcessState.FAILED.value if active else ProcessState.STOPPED.value
        state = row.state if never_started else gone
    return ProcessStatus(
        role=row.role, pid=row.pid, state=state, exit_code=row.exit_code, cpu_percent=cpu, memory_mb=memory
    )


def _measure(rows: Sequence[Row[Any]]) -> dict[int, tuple[float, float]]:
    """Per pid: percent of one core over a short while, and memory in MiB, children included."""
    families: dict[int, list[psutil.Process]] = {}
    for row in rows:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(row.pid)
            families[row.pid] = [process, *process.children(recursive=True)]
    if not families:
        return {}
    began = time.monotonic()
    before = {pid: _cpu_seconds(family) for pid, family in families.items()}
    time.sleep(CPU_SAMPLE_SECONDS)
    elapsed = time.monotonic() - began
    usage = {}
    for pid, family in families.items():
        used = max(0.0, _cpu_seconds(family) - before[pid])
        usage[pid] = (round(100 * used / elapsed, 1), round(_memory(family) / 2**20, 1))
    return usage


def _cpu_seconds(family: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in family:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _memory(family: Sequence[psutil.Process]) -> int:
    total = 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            # Pages that forks of one process share count once, not once for each.
            total += getattr(full, "pss", None) or full.rss
    return total
