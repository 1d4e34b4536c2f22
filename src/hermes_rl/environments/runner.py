"""Driving one environment promptly.

``BaseEnv.env_manager`` sleeps before it starts and polls ten times a second. The runner calls the same
methods of the same object in the same order (``setup``, ``setup_wandb``, ``register_env``,
``get_server_info``, then ``get_status``, step checks and ``add_train_workers`` again and again), but acts
when something has happened: a worker ended, a batch was formed, new weights are served. It long-polls the
API server's ``/state`` for that. Whatever a subclass overrides is called as overridden.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.base import BaseEnv, EvalHandlingEnum

from hermes_rl.environments import position
from hermes_rl.environments.failures import FailureCount
from hermes_rl.environments.group_counts import check_group, count_group
from hermes_rl.environments.loading import describe
from hermes_rl.environments.metric_capture import MetricCapture
from hermes_rl.environments.pinning import evaluated_step
from hermes_rl.environments.redaction import own_secrets, redact
from hermes_rl.errors import EnvironmentFailedError, ServiceError
from hermes_rl.trajectories.client import TrajectoriesClient

log = logging.getLogger("hermes_rl.environments")

_POLL_S = 20.0
_SHORT_PAUSE_S = 0.005


@dataclass(frozen=True)
class RunnerSettings:
    """How the runner behaves.

    Attributes:
        synchronous: rollouts of step k start only once the weights of step k are served
            (``max_batches_offpolicy`` is 0).
        failure_limit: failures in a row that end the run.
        timeout_limit: groups in a row that exceed ``worker_timeout`` and end the run.
        setup_timeout: longest time ``setup`` may take, in seconds.
        evaluation_timeout: longest time ``evaluate`` may take, in seconds (``max_evaluation_seconds``).
        start_patience: longest time to wait for the API server to appear, in seconds.
        silence_patience: longest time the API server may be gone later on, in seconds.
        secrets: what no report of a failure may say.
    """

    synchronous: bool = False
    failure_limit: int = 20
    timeout_limit: int = 3
    setup_timeout: float = 1800.0
    evaluation_timeout: float = 1200.0
    start_patience: float = 300.0
    silence_patience: float = 30.0
    secrets: Sequence[str] = field(default_factory=own_secrets)


class Runner:
    """Drives one environment until the run is finished.

    Args:
        env: the environment.
        client: the API server.
        capture: where the environment's W&B logs arrive; its training logs must be sent to
            :meth:`log_training`.
        settings: how to behave.
    """

    def __init__(
        self, env: Any, client: TrajectoriesClient, capture: MetricCapture, settings: RunnerSettings
    ) -> None:
        self._env = env
        self._client = client
        self._capture = capture
        self._settings = settings
        self._state: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._failures = FailureCount(settings.failure_limit, settings.timeout_limit, self._report_failure)
        self._posts: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None
        self._claimed = False
        self._first_evaluation = True
        self._watched: dict[asyncio.Task[Any], float] = {}
        """Worker → when it was first seen. BaseEnv notes the time of day, which may jump."""
        self._nothing_next_since: float | None = None
        self._retry_at = 0.0
        self._next_item_failures = 0
        self._evaluate: Callable[[], Awaitable[Any]] = env.evaluate
        self._observe_groups()
        self._speed_up()
        position.install(env)

    # Life

    async def run(self) -> None:
        """Run until the API server says that the run is finished.

        Raises:
            EnvironmentFailedError: the environment cannot go on.
            ServiceError: the API server is gone.
        """
        await self._connect()
        self._stand_in_for_env_manager()
        manager = asyncio.create_task(self._env.env_manager(), name="env_manager")
        poller = asyncio.create_task(self._follow_state(), name="follow_state")
        try:
            waiting: set[asyncio.Future[Any]] = {manager, poller, self._failures.too_many}
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if self._failures.too_many in done:
                    await self._look_for_the_server()
                    raise self._failures.too_many.result()
                if poller in done:
                    return poller.result()
                error = manager.exception()
                if isinstance(error, EnvironmentFailedError | ServiceError):
                    raise error
                if error is not None:
                    await self._look_for_the_server()
                    raise EnvironmentFailedError(f"env_manager failed: {describe(error)}") from error
                # An environment with a loop of its own may stop early; evaluations may still be wanted.
                waiting.discard(manager)
        finally:
            await self._leave(manager, poller)

    async def _connect(self) -> None:
        deadline = time.monotonic() + self._settings.start_patience
        while True:
            try:
                self._state = await self._client.state()
                return
            except ServiceError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _look_for_the_server(self) -> None:
        """Raise ServiceError when the API server is gone, for which the environment is not to blame."""
        try:
            await self._client.health()
        except ServiceError as error:
            raise ServiceError("The API server is gone.") from error

    async def _leave(self, *tasks: asyncio.Task[Any]) -> None:
        workers = [worker for worker in self._env.workers if isinstance(worker, asyncio.Task)]
        running = [task for task in (*tasks, self._evaluation, *workers) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=1.0)
        if hasattr(self._env, "env_id") and self._env.wandb_prepend is not None:
            try:
                self._env.save_checkpoint(self._env.curr_step)
            except Exception as error:  # noqa: BLE001 - the environment's own code
                log.warning("save_checkpoint raised %s", describe(error))
            try:
                async with asyncio.timeout(1.0):
                    await self._client.disconnect_env(self._env.env_id)
            except (ServiceError, TimeoutError):
                log.info("the API server is gone already")
        if self._posts:
            await asyncio.wait(self._posts, timeout=1.0)

    async def _follow_state(self) -> None:
        """Keep the state fresh, start evaluations that are wanted, return when the run is finished."""
        last_answer = time.monotonic()
        while True:
            try:
                self._state = await self._client.state(self._state.get("revision"), _POLL_S)
            except ServiceError as error:
                silence = time.monotonic() - last_answer
                if silence > self._settings.silence_patience:
                    raise ServiceError(f"The API server has been gone for {silence:.0f} s.") from error
                await asyncio.sleep(0.25)
                continue
            last_answer = time.monotonic()
            self._wake.set()
            if self._state["finished"]:
                log.info("the run is finished: %s", self._state.get("finish_reason"))
                return
            await self._attend_evaluations()
            await asyncio.sleep(_SHORT_PAUSE_S)

    # The loop in place of BaseEnv.env_manager

    def _stand_in_for_env_manager(self) -> None:
        """Make :meth:`_drive` the loop that ``env_manager`` runs, also when an override calls ``super()``."""

        async def env_manager(this: Any) -> None:
            assert this is self._env
            await self._drive()

        setattr(BaseEnv, "env_manager", env_manager)  # noqa: B010 - a method is replaced, on purpose

    async def _drive(self) -> None:
        env = self._env
        await self._setup()
        await self._until(lambda: self._state["registered"])
        await env.setup_wandb()
        await self._until(lambda: self._state.get("started", True))
        await env.register_env()
        await env.get_server_info()
        self._check_batch_size()
        log.info("registered as environment %s, step %s", env.env_id, env.curr_step)
        while True:
            self._wake.clear()
            if await self._refresh_status():
                await self._step_checks()
                if self._may_roll_out():
                    await self._add_workers()
                self._watch_workers()
            self._expire_workers()
            await self._pause()

    async def _setup(self) -> None:
        try:
            async with asyncio.timeout(self._settings.setup_timeout):
                await self._env.setup()
        except TimeoutError as error:
            self._report_failure("setup", "took too long")
            raise EnvironmentFailedError(
                f"setup did not return within {self._settings.setup_timeout:.0f} s."
            ) from error
        except Exception as error:
            self._report_failure("setup", describe(error))
            raise EnvironmentFailedError(f"setup raised {describe(error)}.") from error

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._wake.clear()
            await self._wake.wait()

    def _check_batch_size(self) -> None:
        group_size, batch_size = self._env.config.group_size, self._env.config.batch_size
        if batch_size > 0 and batch_size % group_size:
            raise EnvironmentFailedError(
                f"group_size ({group_size}) does not divide batch_size ({batch_size}): "
                "no batch can be filled exactly."
            )

    async def _refresh_status(self) -> bool:
        try:
            await self._env.get_status()
        except Exception as error:  # noqa: BLE001 - the environment's own code
            # The poller decides how long the API server may be gone.
            log.warning("get_status failed: %s", describe(error))
            await asyncio.sleep(0.25)
            self._wake.set()
            return False
        return True

    async def _step_checks(self) -> None:
        env = self._env
        if type(env).env_step_checks is not BaseEnv.env_step_checks:
            # An override may call evaluate(); the runner evaluates by the trainer's clock instead.
            env.evaluate = _evaluate_nothing
            await self._guarded("env_step_checks", env.env_step_checks())
            return
        current = env.status_dict["current_step"]
        if env.curr_step == current:
            return
        interval = env.checkpoint_interval
        if interval > 0 and env.curr_step // interval < current // interval:
            try:
                env.save_checkpoint(current // interval * interval)
            except Exception as error:  # noqa: BLE001 - the environment's own code
                self._failures.note("save_checkpoint", error)
        env.curr_step = current
        evaluating = self._evaluation is not None and not self._evaluation.done()
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging and not evaluating:
            env.items_sent_this_step = 0
            await self._guarded("wandb_log", env.wandb_log({}))

    async def _guarded(self, where: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except Exception as error:  # noqa: BLE001 - the environment's own code
            self._failures.note(where, error)

    def _may_roll_out(self) -> bool:
        env = self._env
        step, queued = env.status_dict["current_step"], env.status_dict["queue_size"]
        if self._state.get("finished") or (0 < env.config.total_steps <= step):
            return False
        if time.monotonic() < self._retry_at or env.derived_batch_size == -1:
            return False
        weights_step = self._state.get("weights_step")
        if self._settings.synchronous and weights_step is not None and weights_step < step:
            return False
        room = env.config.max_batches_offpolicy * env.config.batch_size
        if env.config.min_batch_allocation is None and queued * env.config.group_size >= room > 0:
            return False
        return len(env.workers) < env.max_num_workers

    async def _add_workers(self) -> None:
        env = self._env
        before = len(env.workers)
        limit = env.config.worker_timeout if env.config.worker_timeout > 0 else None
        try:
            async with asyncio.timeout(limit):
                await env.add_train_workers()
        except Exception as error:  # noqa: BLE001 - the environment's own code
            timeout = isinstance(error, TimeoutError)
            self._next_item_failures += 1
            self._retry_at = time.monotonic() + min(1.0, 0.02 * 2**self._next_item_failures)
            self._failures.note(
                "get_next_item", f"took longer than {limit:.0f} s" if timeout else error, timeout=timeout
            )
            return
        self._next_item_failures = 0
        self._note_empty_handed(before)

    def _note_empty_handed(self, before: int) -> None:
        """Notice an environment that has no more items to give, and ask it again less and less often."""
        env = self._env
        evaluating = env.eval_runner is not None and not env.eval_runner.done()
        if env.workers or len(env.workers) > before or evaluating or env.status_dict["queue_size"]:
            self._nothing_next_since = None
            return
        now = time.monotonic()
        if self._nothing_next_since is None:
            self._nothing_next_since = now
        self._retry_at = now + min(1.0, 0.05 + (now - self._nothing_next_since) / 4)
        limit = env.config.worker_timeout if env.config.worker_timeout > 0 else 600.0
        if now - self._nothing_next_since > limit:
            raise EnvironmentFailedError(f"get_next_item has had nothing to give for {limit:.0f} s.")

    def _watch_workers(self) -> None:
        for worker in self._env.workers - self._watched.keys():
            self._watched[worker] = time.monotonic()
            worker.add_done_callback(self._worker_ended)

    def _worker_ended(self, worker: asyncio.Task[Any]) -> None:
        self._watched.pop(worker, None)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._failures.note("handle_env", error)
            for key, item in list(self._env.running_items.items()):
                if item["worker"] is worker:
                    del self._env.running_items[key]
        self._wake.set()

    def _expire_workers(self) -> None:
        env = self._env
        limit = env.config.worker_timeout
        if limit <= 0:
            return
        now = time.monotonic()
        for key, item in list(env.running_items.items()):
            if now - self._watched.get(item["worker"], now) > limit:
                item["worker"].cancel()
                env.workers.discard(item["worker"])
                env.running_items.pop(key, None)
                self._wake.set()
                self._failures.note(
                    "collect_trajectories", f"a group took longer than {limit:g} s", timeout=True
                )

    async def _pause(self) -> None:
        """Until something happens, or the next deadline."""
        env = self._env
        until: list[float] = []
        if env.config.worker_timeout > 0 and env.running_items:
            now = time.monotonic()
            oldest = min(self._watched.get(item["worker"], now) for item in env.running_items.values())
            until.append(oldest + env.config.worker_timeout - now + 0.01)
        if self._retry_at > time.monotonic():
            until.append(self._retry_at - time.monotonic())
        try:
            async with asyncio.timeout(max(0.0, min(until)) if until else None):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_SHORT_PAUSE_S)

    # Evaluation

    async def _attend_evaluations(self) -> None:
        env_id = getattr(self._env, "env_id", None)
        if env_id is None:
            return
        if not self._claimed:
            self._capture.prefix = f"{self._env.wandb_prepend}_"
            try:
                await self._client.evaluator(env_id)
            except ServiceError as error:
                log.warning("%s", error)
                return
            self._claimed = True
        wanted = self._state["evaluations_wanted"]
        if not wanted or (self._evaluation is not None and not self._evaluation.done()):
            return
        self._evaluation = asyncio.create_task(self._run_evaluation(wanted[0]), name=f"evaluate-{wanted[0]}")
        # BaseEnv.add_train_workers looks at eval_runner to honour eval_handling. The first evaluation is
        # the baseline: nothing has been learned yet, so the first rollouts run beside it.
        baseline = self._first_evaluation and wanted[0] == self._env.curr_step
        if not baseline:
            self._env.eval_runner = self._evaluation
            if self._env.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
                log.info("no new rollouts while the weights of step %s are evaluated", wanted[0])
        self._first_evaluation = False

    async def _run_evaluation(self, step: int) -> None:
        evaluated_step.set(step)
        limit = self._settings.evaluation_timeout
        started = time.monotonic()
        error: str | None = None
        with self._capture.evaluation() as metrics:
            try:
                async with asyncio.timeout(limit):
                    returned = await self._evaluate()
                    await self._env.wandb_log({})
                if isinstance(returned, dict):
                    metrics.update(
                        (key, value) for key, value in _plain_numbers(returned).items() if key not in metrics
                    )
            except TimeoutError:
                error = f"evaluate did not return within {limit:g} s (max_evaluation_seconds)"
            except Exception as raised:
                error = redact(describe(raised), self._settings.secrets)
                log.error("evaluate failed: %s", error, exc_info=raised)
            seconds = time.monotonic() - started
            found = dict(metrics)
        if error is not None:
            self._report_failure("evaluate", error)
        log.info("evaluated the weights of step %s in %.2f s", step, seconds)
        try:
            await self._client.post_evaluation(self._env.env_id, step, found, seconds, error)
        except ServiceError as gone:
            log.warning("the evaluation of step %s was not delivered: %s", step, gone)
        self._wake.set()

    # What the environment is watched for

    def _observe_groups(self) -> None:
        env = self._env
        collect, postprocess = env.collect_trajectories, env.postprocess_histories
        send, evaluate_log = env.handle_send_to_api, env.evaluate_log

        async def collect_trajectories(*args: Any, **kwargs: Any) -> Any:
            try:
                returned = await collect(*args, **kwargs)
            except Exception as error:
                self._failures.note("collect_trajectories", error)
                raise
            if not isinstance(returned, tuple) or len(returned) != 2:
                message = f"must return (group or groups, backlog), got {type(returned).__name__}"
                self._failures.note("collect_trajectories", message)
                raise TypeError(message)
            if not returned[0]:
                await self._report_counts({"groups_empty": 1})
            return returned

        async def postprocess_histories(trajectories: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                returned = await postprocess(trajectories, *args, **kwargs)
            except Exception as error:
                self._failures.note("postprocess_histories", error)
                raise
            if returned is None:
                await self._report_counts({"groups_empty": 1})
            return returned

        async def handle_send_to_api(scored_data: Any, *args: Any, **kwargs: Any) -> Any:
            await self._count_groups(scored_data)
            try:
                return await send(scored_data, *args, **kwargs)
            except Exception as error:
                self._failures.note("handle_send_to_api", error)
                raise

        async def log_evaluation(metrics: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(metrics, dict):
                self._capture.log(metrics)
            return await evaluate_log(metrics, *args, **kwargs)

        env.collect_trajectories = collect_trajectories
        env.postprocess_histories = postprocess_histories
        env.handle_send_to_api = handle_send_to_api
        env.evaluate_log = log_evaluation

    async def _count_groups(self, scored_data: Any) -> None:
        totals: dict[str, float] = {}
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if group is None:
                counts: dict[str, float] = {"groups_empty": 1}
            elif (problem := check_group(group, self._env.config.group_size)) is not None:
                self._failures.note("collect_trajectories", problem)
                counts = {"groups_malformed": 1}
            else:
                self._failures.success()
                counts = count_group(group, self._env.max_token_len)
            for name, value in counts.items():
                totals[name] = totals.get(name, 0.0) + value
        if totals:
            await self._report_counts(totals)

    # Reports

    def log_training(self, metrics: dict[str, float]) -> None:
        """Send on what the environment logged outside evaluations."""
        if hasattr(self._env, "env_id"):
            self._in_background(
                self._client.environment_log(self._env.env_id, self._env.curr_step, metrics=metrics)
            )

    async def _report_counts(self, counts: dict[str, float]) -> None:
        # Before the group itself is sent: when a batch is formed, its groups have been counted.
        if hasattr(self._env, "env_id"):
            try:
                await self._client.environment_log(self._env.env_id, self._env.curr_step, counts=counts)
            except ServiceError as error:
                log.warning("counts were not delivered: %s", error)

    def _report_failure(self, where: str, error: str) -> None:
        env_id = getattr(self._env, "env_id", None)
        # It is shown in the API server's state and may become the run's reason.
        self._in_background(
            self._client.environment_failure(env_id, where, redact(error, self._settings.secrets))
        )

    def _in_background(self, call: Awaitable[None]) -> None:
        async def deliver() -> None:
            try:
                await call
            except ServiceError as error:
                log.warning("a report was not delivered: %s", error)

        task = asyncio.create_task(deliver())
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    # Waiting that is not needed

    def _speed_up(self) -> None:
        """Replace, on this environment's objects, what would wait or do work for nothing."""
        env = self._env
        if len(env.server.servers) == 1:
            # It waits a whole second when no slot is free, to choose among servers. There is one server,
            # and its semaphores bound the requests in flight by themselves.
            env.server.wait_for_sem = _no_choice_to_make
        if type(env)._send_scored_data_to_api is BaseEnv._send_scored_data_to_api:
            env._send_scored_data_to_api = self._send_scored_data

    async def _send_scored_data(self, scored_data: Any) -> None:
        """As ``BaseEnv._send_scored_data_to_api``, on a kept connection and safe to repeat."""
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            group["env_id"] = getattr(self._env, "env_id", None)
        path = "scored_data_list" if isinstance(scored_data, list) else "scored_data"
        body = json.dumps(scored_data, default=_plain_number).encode()
        try:
            answer = await self._client.post_scored(path, body, key=uuid.uuid4().hex)
        except ServiceError as error:
            self._failures.note("scored_data", error)
            return
        if answer.get("status") == "dropped" or answer.get("dropped"):
            log.warning("the API server dropped a group: %s", answer)


async def _no_choice_to_make(is_training: bool) -> None:
    return None


async def _evaluate_nothing(*_: Any, **__: Any) -> None:
    return None


def _plain_number(value: Any) -> Any:
    """For json: a numpy scalar or array as plain numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _plain_numbers(data: dict[Any, Any]) -> dict[str, float]:
    from hermes_rl.environments.metric_capture import numeric

    return numeric({str(key): value for key, value in data.items()})
