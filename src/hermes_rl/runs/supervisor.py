"""The supervisor of one run: a detached process of its own, ``python -m hermes_rl.runs.supervisor``.

It starts the run's API server, trainer and environment (and joins or starts the shared engine), lets each
begin when the one before it is ready, waits for the first thing that ends the run, stops the processes in
reverse order and records why. It talks to them by signals, pipes and ``GET …/health``; it keeps the state
store up to date. It imports nothing heavy, and trains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from hermes_rl.config import Role, RunConfig, Workspace, write_private
from hermes_rl.environments.light_import import needs_tokenizers_only
from hermes_rl.errors import HermesRLError
from hermes_rl.process_identity import process_mark, wait_for_end
from hermes_rl.runs.external import write_external_config
from hermes_rl.runs.files import (
    ENDPOINTS,
    EXTERNAL_CONFIG,
    RUN_CONFIG,
    failure_file,
    progress_marks,
    read_json,
    read_progress,
    tail,
)
from hermes_rl.runs.forking import UNKNOWN_EXIT, fork_server
from hermes_rl.runs.launch import LaunchRequest, Process, spawn
from hermes_rl.runs.loopback import Endpoint, get_json, wait_until_environment_registered, wait_until_healthy
from hermes_rl.runs.roles import PRIVATE_KEYS, ROLES, THREAD_LIMITS, RoleSpec
from hermes_rl.runs.silence import Probe, engine_probe, health_probe, wait_for_silence
from hermes_rl.runs.states import ProcessState, RunState

if TYPE_CHECKING:
    from hermes_rl.engine.registry import EngineSpec
    from hermes_rl.runs.store import Answering, RunStore

logger = logging.getLogger("hermes_rl.supervisor")

STOP_GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
FINISH_GRACE_SECONDS = 10.0
"""How long the environment may take to end by itself after the trainer has finished."""
TRAINER_FINISH_SECONDS = 300.0
"""How long the trainer may take to end after the environment has, because the run was over."""
ANSWER_SECONDS = 10.0
"""How long the API server may take to say whether the run is over."""
COMPLETED_PHASE = "completed"
"""What the trainer writes as its last phase when all steps were taken."""
LAST_WRITE_ATTEMPTS = 120
"""How often, once a second, the end of a run is tried to be recorded while the store cannot be written."""
LOCAL_ENGINE = "local"
T = TypeVar("T")
RUN_ID_VARIABLE = "HERMES_RL_RUN_ID"
SUPERVISOR_VARIABLE = "HERMES_RL_SUPERVISOR"
OWNERSHIP_SECONDS = 5.0
"""How often the supervisor of a run that goes on looks whether the run is still its own."""
GIVEN_UP = "the run was given up, or goes on elsewhere"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: RunState
    reason: str
    guilty_role: str | None = None


@dataclass
class Child:
    """One process of the run, as the supervisor sees it."""

    spec: RoleSpec
    process: Process
    state: ProcessState = ProcessState.STARTING
    exit_code: int | None = None


class Supervisor:
    """Leads one run from its first process to its end.

    Args:
        workspace: where the run lies.
        run_id: a run that the store knows.
        modules: role → module, in place of the role's own.
        external_environment: whether someone else starts the environment.
        starter: the process that answers for the run until this one does; None asks nobody's leave.
    """

    def __init__(
        self,
        workspace: Workspace,
        run_id: str,
        *,
        modules: Mapping[str, str] | None = None,
        external_environment: bool = False,
        starter: Answering | None = None,
    ) -> None:
        self._launcher: Callable[[LaunchRequest, int], Process] = spawn
        self._workspace = workspace
        self._run_id = run_id
        self._run_dir = workspace.run_dir(run_id)
        self._modules = dict(modules or {})
        self._external = external_environment
        self._config = RunConfig.from_yaml(self._run_dir / RUN_CONFIG)
        self._children: dict[str, Child] = {}
        self._exits: dict[str, asyncio.Task[None]] = {}
        self._record = Recorder(workspace, run_id, starter)
        self._engine_pid: int | None = None
        self._engine_watch: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._judging: asyncio.Task[None] | None = None
        self._ports: dict[str, tuple[int, str]] = {}

    async def run(self) -> Outcome:
        """Lead the run; returns when no process of it is left and its end is recorded."""
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = loop.create_future()
        self._record.when_lost = lambda: self._conclude(Outcome(RunState.FAILED, GIVEN_UP))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._conclude, Outcome(RunState.STOPPED, "stopped on request"))
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # a closed terminal does not end a run
        starting = loop.create_task(self._guarded(self._start()))
        try:
            outcome = await self._outcome
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            logger.info("%s: %s", outcome.state.value, outcome.reason)
            self._record.stopping()
            await self._stop_children(outcome)
        finally:
            for child in self._children.values():
                child.process.signal(signal.SIGKILL)
        if self._record.is_ours:
            self._remove_capabilities()
        for watching in (self._engine_watch, self._judging, *self._watches):
            if watching is not None:
                watching.cancel()
        self._record.ended(outcome, self._log_tail(outcome.guilty_role))
        return outcome

    def _conclude(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HermesRLError as error:
            self._conclude(Outcome(RunState.FAILED, str(error)))
        except Exception as error:
            logger.exception("the supervisor itself failed")
            self._conclude(Outcome(RunState.FAILED, f"the supervisor failed: {error!r}", "supervisor"))

    # Starting

    async def _start(self) -> None:
        began = time.monotonic()
        engine = asyncio.create_task(self._connect_engine())
        engine.add_done_callback(self._on_engine)
        try:
            await self._bring_up(engine)
        finally:
            engine.cancel()
        self._record.phase("training")
        self._watches.append(asyncio.create_task(self._end_when_nothing_comes()))
        logger.info("every process is ready after %.2f s", time.monotonic() - began)

    async def _bring_up(self, engine: asyncio.Task[dict[str, str]]) -> None:
        """Start the processes and let each begin when the one before it is ready."""
        await self._choose_launcher()
        api, trainer = Endpoint.bind(), Endpoint.bind()
        inference_key = f"key-{secrets.token_hex(16)}"
        shared = {
            "HERMES_RL_TRAJECTORIES_URL": api.url,
            "HERMES_RL_INFERENCE_URL": f"{trainer.url}/v1",
            "HERMES_RL_INFERENCE_KEY": inference_key,
        }
        sockets = {"api": api, "trainer": trainer}
        self._watch_pipe, self._held_pipe = os.pipe()
        for spec in ROLES:
            if spec.role == "env" and self._external:
                continue
            self._launch(spec, shared, sockets.get(spec.role))
        ports = {role: (endpoint.port, endpoint.capability) for role, endpoint in sockets.items()}
        self._ports = ports
        for endpoint in sockets.values():
            endpoint.close()
        self._children["api"].process.release({})
        if not self._record.starting(self._children):
            raise asyncio.CancelledError
        self._watches.append(asyncio.create_task(self._watch_ownership()))
        self._write_capabilities(shared)
        await self._until_ready("api", wait_until_healthy(*ports["api"]))
        if not engine.done():
            self._record.phase("starting engine")
        await engine
        # Once more: what was joined a while ago may have ended as idle since.
        tinker = await self._connect_engine()
        self._watch_engine(tinker)
        self._record.phase("starting trainer")
        self._children["trainer"].process.release(tinker)
        await self._until_ready("trainer", wait_until_healthy(*ports["trainer"]))
        if self._external:
            self._record.phase("waiting for the environment")
            self._record.running()
            await wait_until_environment_registered(*ports["api"])
        else:
            self._record.phase("starting environment")
            self._children["env"].process.release({})
            await self._until_ready("env", wait_until_environment_registered(*ports["api"]))
            self._record.running()

    async def _choose_launcher(self) -> None:
        """Fork processes off the fork server, which is started if need be: it imports once what several
        processes need, and is there already for the next run.
        """
        server = fork_server()
        if server is not None and (server.is_ready() or await _in_daemon_thread(server.ensure)):
            self._launcher = server.launch
            logger.info("processes are forked off the fork server")

    def _launch(self, spec: RoleSpec, shared: Mapping[str, str], endpoint: Endpoint | None) -> None:
        env = {
            name: value for name, value in os.environ.items() if name not in PRIVATE_KEYS or name in spec.keys
        }
        env |= shared
        env |= {RUN_ID_VARIABLE: self._run_id, "PYTHONUNBUFFERED": "1"}
        env[SUPERVISOR_VARIABLE] = f"{os.getpid()}:{process_mark(os.getpid())}"
        env = THREAD_LIMITS | env
        request = LaunchRequest(
            module=self._modules.get(spec.role, spec.module),
            arguments=["--run-dir", str(self._run_dir)],
            env=env,
            log=self._workspace.log_path(spec.role, self._run_id),
            preload=() if spec.role in self._modules else spec.preload,
            socket_fd=endpoint.socket.fileno() if endpoint else None,
        )
        launcher = self._launcher if self._may_fork(spec) else spawn
        try:
            process = launcher(request, self._watch_pipe)
        except OSError as error:
            if launcher is spawn:
                raise
            logger.warning("%s", error)
            self._launcher = spawn
            process = spawn(request, self._watch_pipe)
        logger.info("%s started, pid %d", spec.title, process.pid)
        child = Child(spec, process)
        self._children[spec.role] = child
        self._exits[spec.role] = asyncio.create_task(self._watch(child))

    def _may_fork(self, spec: RoleSpec) -> bool:
        """Whether a process can do with what the fork server has imported, which knows of no torch."""
        if spec.role != "env" or spec.role in self._modules:
            return True
        return needs_tokenizers_only(Path(self._config.run.environment_file))

    async def _connect_engine(self) -> dict[str, str]:
        """Environment variables with which the trainer reaches its Tinker server."""
        tinker = self._config.tinker
        if tinker.base_url != LOCAL_ENGINE:
            return {"TINKER_BASE_URL": tinker.base_url} if tinker.base_url else {}
        from hermes_rl.engine.registry import ensure_engine

        spec = self._engine_spec()
        address = await _in_daemon_thread(lambda: ensure_engine(self._workspace, spec))
        if address.pid != self._engine_pid:
            self._engine_pid = address.pid
            self._record.engine(address.pid)
        return {"TINKER_BASE_URL": address.base_url, "TINKER_API_KEY": address.api_key}

    def _engine_spec(self) -> EngineSpec:
        from hermes_rl.engine.registry import EngineSpec

        tinker = self._config.tinker
        return EngineSpec(model=tinker.base_model, device=tinker.device, lora_alpha=tinker.lora_alpha)

    def _on_engine(self, engine: asyncio.Task[dict[str, str]]) -> None:
        error = None if engine.cancelled() else engine.exception()
        if isinstance(error, HermesRLError):
            self._conclude(Outcome(RunState.FAILED, str(error), "engine"))

    def _watch_engine(self, tinker: Mapping[str, str]) -> None:
        """Fail the run when its engine ends or is silent: a trainer would try to reach it for a long time."""
        if self._engine_pid is None:
            return
        self._engine_watch = asyncio.create_task(self._outlive_engine(self._engine_pid))
        port = urlsplit(tinker["TINKER_BASE_URL"]).port
        assert port is not None
        probe = engine_probe(port, tinker["TINKER_API_KEY"])
        self._watch_silence("engine", f"engine (pid {self._engine_pid})", probe)

    def _watch_silence(self, role: str, title: str, probe: Probe) -> None:
        self._watches.append(asyncio.create_task(self._end_when_silent(role, title, probe)))

    async def _end_when_silent(self, role: str, title: str, probe: Probe) -> None:
        limit = self._config.tinker.max_seconds_without_answer
        silence = await wait_for_silence(probe, limit)
        if role == "trainer" and read_progress(self._run_dir).get("phase") == COMPLETED_PHASE:
            return  # it serves no longer: it closes what it has open
        self._conclude(
            Outcome(
                RunState.FAILED,
                f"the {title} does not answer: it has been silent for {silence:.0f} s "
                f"(max_seconds_without_answer is {limit:g}).",
                role,
            )
        )

    async def _end_when_nothing_comes(self) -> None:
        """Fail the run when its processes live and answer and yet it stands still.

        The SDK asks a Tinker server that has stopped working again and again, for as long as it is silent.
        """
        working = self._config.tinker.max_seconds_without_progress
        waiting = self._config.tinker.max_seconds_without_batch
        seen: object = None

        async def has_changed() -> bool:
            nonlocal seen
            before, seen = seen, progress_marks(self._run_dir)
            return seen != before

        idle = await wait_for_silence(has_changed, working + waiting)
        progress = read_progress(self._run_dir)
        if progress.get("phase") == COMPLETED_PHASE:
            return
        self._conclude(
            Outcome(
                RunState.FAILED,
                f"the run stands still: no step, evaluation or checkpoint came for {idle:.0f} s, at step "
                f"{progress.get('step', 0)} of {self._config.env.total_steps} "
                f"({progress.get('phase', 'starting')}). Each may take max_seconds_without_progress "
                f"({working:g}) besides max_seconds_without_batch ({waiting:g}). All processes answer; the "
                "Tinker server or the environment may have stopped working.",
                "trainer",
            )
        )

    async def _outlive_engine(self, pid: int) -> None:
        mark = process_mark(pid)
        if mark is not None:
            await _in_daemon_thread(functools.partial(wait_for_end, pid, mark))
        self._conclude(Outcome(RunState.FAILED, f"the engine (pid {pid}) ended", "engine"))

    async def _watch_ownership(self) -> None:
        """Notice that the run was given to another attempt, by someone who could not see this process."""
        while True:
            await asyncio.sleep(OWNERSHIP_SECONDS)
            self._record.check()

    async def _until_ready(self, role: str, readiness: Coroutine[Any, Any, None]) -> None:
        child = self._children[role]
        try:
            await asyncio.wait_for(readiness, child.spec.ready_within)
        except TimeoutError:
            self._conclude(
                Outcome(
                    RunState.FAILED,
                    f"the {child.spec.title} was not ready after {child.spec.ready_within:.0f} s",
                    role,
                )
            )
            raise asyncio.CancelledError from None
        if child.exit_code is None:
            if role in self._ports:
                self._watch_silence(role, child.spec.title, health_probe(*self._ports[role]))
            child.state = ProcessState.RUNNING
            self._record.process(child)
            logger.info("%s ready", child.spec.title)

    def _write_capabilities(self, urls: Mapping[str, str]) -> None:
        import json

        write_private(self._run_dir / ENDPOINTS, json.dumps(dict(urls), indent=2) + "\n")
        write_external_config(
            self._run_dir / EXTERNAL_CONFIG,
            self._config,
            trajectories_url=urls["HERMES_RL_TRAJECTORIES_URL"],
            inference_url=urls["HERMES_RL_INFERENCE_URL"],
            key=urls["HERMES_RL_INFERENCE_KEY"],
        )

    def _remove_capabilities(self) -> None:
        for name in (ENDPOINTS, EXTERNAL_CONFIG):
            (self._run_dir / name).unlink(missing_ok=True)

    # Watching

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        if code == UNKNOWN_EXIT:
            code = self._guess_exit(child)
        child.exit_code = code
        stopping = self._outcome.done()
        if code == 0:
            child.state = ProcessState.EXITED
        else:
            child.state = ProcessState.STOPPED if stopping else ProcessState.FAILED
        logger.info("%s ended: %s", child.spec.title, describe_exit(code))
        if not stopping:
            self._judge(child, code)
        self._record.process(child)

    def _guess_exit(self, child: Child) -> int:
        """The exit status of a process that nobody could observe, from what it wrote."""
        if child.spec.role == "trainer":
            return 0 if read_progress(self._run_dir).get("phase") == COMPLETED_PHASE else UNKNOWN_EXIT
        failed = child.spec.role == "api" or failure_file(self._run_dir, child.spec.role).exists()
        return UNKNOWN_EXIT if failed else 0

    def _judge(self, child: Child, code: int) -> None:
        """What the end of one process means for the run."""
        role = child.spec.role
        if role == "trainer" and code == 0:
            progress = read_progress(self._run_dir)
            if progress.get("phase") == COMPLETED_PHASE:
                self._conclude(Outcome(RunState.COMPLETED, "all steps were taken"))
            else:
                self._conclude(Outcome(RunState.FAILED, "someone stopped the trainer", role))
        elif role == "env" and code == 0:
            self._judging = asyncio.create_task(self._judge_environment())
        else:
            self._conclude(Outcome(RunState.FAILED, self._reason(child, code), role))

    async def _judge_environment(self) -> None:
        """An environment that ended with status 0 has either been told that the run is over, or to stop."""
        try:
            port, capability = self._ports["api"]
            _, state = await asyncio.wait_for(get_json(port, f"/{capability}/state"), ANSWER_SECONDS)
            finished = bool(state and state.get("finished"))
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            finished = read_progress(self._run_dir).get("phase") == COMPLETED_PHASE
        if finished:
            await asyncio.sleep(TRAINER_FINISH_SECONDS)
            self._conclude(
                Outcome(RunState.FAILED, "the trainer did not end when the run was over", "trainer")
            )
        else:
            self._conclude(Outcome(RunState.FAILED, "someone stopped the environment", "env"))

    def _reason(self, child: Child, code: int) -> str:
        failure = read_json(failure_file(self._run_dir, child.spec.role))
        if failure and failure.get("error"):
            parts = [f"the {child.spec.title} failed: {failure['error']}"]
            if failure.get("allowed") is not None:
                parts.append(f"Allowed: {failure['allowed']}.")
            if failure.get("hint"):
                parts.append(str(failure["hint"]))
            return " ".join(parts)
        last = self._log_tail(child.spec.role).rpartition("\n")[2].strip()
        return f"the {child.spec.title} ended: {describe_exit(code)}" + (
            f"; its last line: {last[:500]}" if last else ""
        )

    def _log_tail(self, role: str | None) -> str:
        if role is None:
            return ""
        if role == "engine":
            return self._engine_log_tail()
        return tail(self._workspace.log_path(cast(Role, role), self._run_id))

    def _engine_log_tail(self) -> str:
        if self._config.tinker.base_url != LOCAL_ENGINE:
            return ""
        from hermes_rl.engine.registry import engine_log

        return tail(engine_log(self._workspace, self._engine_spec().key))

    # Stopping

    async def _stop_children(self, outcome: Outcome) -> None:
        """End the processes in reverse order, each before the next."""
        for spec in reversed(ROLES):
            child = self._children.get(spec.role)
            if child is None:
                continue
            ends_by_itself = spec.role == "env" and outcome.state is RunState.COMPLETED
            if not (ends_by_itself and await self._ended(child, FINISH_GRACE_SECONDS)):
                await self._end(child)

    async def _end(self, child: Child) -> None:
        if child.exit_code is None and not self._record.is_ours:
            child.process.signal(signal.SIGKILL)  # a last checkpoint would get into another attempt's way
        elif child.exit_code is None:
            child.process.signal(signal.SIGTERM)
            if not await self._ended(child, STOP_GRACE_SECONDS):
                logger.warning(
                    "%s did not end within %.0f s of SIGTERM", child.spec.title, STOP_GRACE_SECONDS
                )
                child.process.signal(signal.SIGKILL)
        await self._exits[child.spec.role]

    async def _ended(self, child: Child, timeout: float) -> bool:
        if child.exit_code is not None:
            return True
        done, _ = await asyncio.wait({self._exits[child.spec.role]}, timeout=timeout)
        return bool(done)


class Recorder:
    """Keeps the state store up to date. What it cannot write it logs: a full disk must not end a run here.

    The store is opened at the first use, after the processes were started, because its import takes as
    long as theirs.

    Args:
        workspace: where the run lies.
        run_id: the run.
        starter: the process that answers for the run until this one does; None asks nobody's leave.

    Attributes:
        is_ours: whether the run is this supervisor's. Whoever asks for a run whose starter was killed records
            that its start was interrupted, and it may be resumed, before its first supervisor gets so far;
            and one who asks from where this process cannot be seen takes it for dead.
            Nothing is written of a run that is not ours.
        when_lost: called once when the run turns out not to be ours.
    """

    def __init__(self, workspace: Workspace, run_id: str, starter: Answering | None = None) -> None:
        self._workspace = workspace
        self._run_id = run_id
        self._starter = starter
        self._self: Answering = (os.getpid(), process_mark(os.getpid()))
        self._has_taken_over = False
        self._began = datetime.now(UTC)
        self.is_ours = True
        self.when_lost: Callable[[], object] = lambda: None

    def _write(self, change: Callable[[RunStore], bool]) -> bool:
        """Make a change that is conditional on this process answering for the run.

        Args:
            change: makes it; says whether it was made.

        Returns:
            False when the store cannot be written.
        """
        if not self.is_ours:
            return True
        from sqlalchemy.exc import SQLAlchemyError

        from hermes_rl.runs.store import open_store

        try:
            store = open_store(self._workspace.state_url)
            if not self._has_taken_over:
                self._take_over(store)
            if not change(store) and not self._answers(store):
                self.is_ours = False
        except (SQLAlchemyError, HermesRLError, OSError) as error:
            logger.error("the state store could not be written: %s", error)
            return False
        if not self.is_ours:
            logger.error("%s", GIVEN_UP)
            self.when_lost()
        return True

    def _take_over(self, store: RunStore) -> None:
        """Answer for the run from now on; whoever started this process may have recorded that already."""
        pid, mark = self._self
        taken = {"supervisor_pid": pid, "supervisor_mark": mark}
        store.move_run(self._run_id, RunState.STARTING, answered_by=self._starter, **taken)
        self._has_taken_over = True

    def _answers(self, store: RunStore) -> bool:
        from hermes_rl.runs.store import answering, is_active

        row = store.run(self._run_id)
        return is_active(row) and answering(row) == self._self

    def check(self) -> None:
        """Look whether the run is still this supervisor's."""
        self._write(lambda store: False)

    def starting(self, children: Mapping[str, Child]) -> bool:
        """Record the first processes; False when the run is not this supervisor's any more."""
        rows = {role: _row(child) for role, child in children.items()}
        begun = {"started_at": self._began, "phase": "starting API server"}

        def change(store: RunStore) -> bool:
            return store.update_run(self._run_id, answered_by=self._self, **begun) and store.put_processes(
                self._run_id, rows, answered_by=self._self
            )

        self._write(change)
        return self.is_ours

    def phase(self, phase: str) -> None:
        logger.info("%s", phase)
        self._write(lambda store: store.update_run(self._run_id, answered_by=self._self, phase=phase))

    def engine(self, pid: int) -> None:
        row = {
            "pid": pid,
            "mark": process_mark(pid),
            "state": ProcessState.RUNNING.value,
            "started_at": _now(),
        }
        self._put({"engine": row})

    def process(self, child: Child) -> None:
        row = {"state": child.state.value, "exit_code": child.exit_code}
        if child.exit_code is not None:
            row["ended_at"] = _now()
        self._put({child.spec.role: row})

    def _put(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self._write(lambda store: store.put_processes(self._run_id, rows, answered_by=self._self))

    def running(self) -> None:
        self._move(RunState.RUNNING)

    def stopping(self) -> None:
        self._move(RunState.STOPPING, phase="stopping")

    def _move(self, target: RunState, **values: Any) -> None:
        self._write(lambda store: store.move_run(self._run_id, target, answered_by=self._self, **values))

    def ended(self, outcome: Outcome, log_tail: str) -> None:
        progress = read_progress(self._workspace.run_dir(self._run_id))

        def change(store: RunStore) -> bool:
            if outcome.state is not RunState.FAILED:
                store.move_run(self._run_id, RunState.STOPPING, answered_by=self._self)
            return store.move_run(
                self._run_id,
                outcome.state,
                answered_by=self._self,
                reason=outcome.reason,
                guilty_role=outcome.guilty_role,
                log_tail=log_tail or None,
                progress=progress or None,
                phase=None,
                ended_at=_now(),
            )

        for _ in range(LAST_WRITE_ATTEMPTS):
            if self._write(change):
                return
            time.sleep(1.0)  # nothing else is left to do; whoever asks meanwhile finds a run that is stopping


def _row(child: Child) -> dict[str, Any]:
    return {
        "pid": child.process.pid,
        "mark": child.process.mark,
        "state": child.state.value,
        "started_at": _now(),
    }


def _now() -> datetime:
    return datetime.now(UTC)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code == UNKNOWN_EXIT:
        return "exit status unknown, its fork server went before it"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"exit status {code}"


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not keep the process alive when nobody waits any more."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def body() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - handed on to whoever awaits
            outcome = (result.set_exception, error)
        else:
            outcome = (result.set_result, value)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=body, daemon=True).start()
    return await result


def main(argv: Sequence[str] | None = None) -> int:
    """Lead the run that the arguments name. Exit status 0: it ended and the end is recorded."""
    parser = argparse.ArgumentParser(description="Supervisor of one run; started by `hermes-rl run start`.")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--starter", required=True, metavar="PID:MARK", help="who answers for it until then")
    parser.add_argument("--external-environment", action="store_true")
    parser.add_argument("--module", action="append", default=[], metavar="ROLE=MODULE")
    arguments = parser.parse_args(argv)
    os.umask(0o077)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write URLs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    workspace = Workspace(arguments.workspace)
    modules = dict(entry.split("=", 1) for entry in arguments.module)
    pid, _, mark = arguments.starter.partition(":")
    starter = (int(pid), mark)
    try:
        supervisor = Supervisor(
            workspace,
            arguments.run_id,
            modules=modules,
            external_environment=arguments.external_environment,
            starter=starter,
        )
    except HermesRLError as error:
        Recorder(workspace, arguments.run_id, starter).ended(Outcome(RunState.FAILED, str(error)), "")
        return 1
    asyncio.run(supervisor.run())
    logging.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
