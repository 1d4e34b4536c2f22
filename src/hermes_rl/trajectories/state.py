"""Everything one API server knows, in one object.

All methods run on the event loop's thread and none of them awaits, except the ``wait`` methods: every
change is seen whole or not at all.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.trajectories.queue import GroupQueue
from hermes_rl.trajectories.retries import Retries
from hermes_rl.trajectories.wire import (
    EnvironmentFailure,
    EnvironmentLog,
    EnvironmentRegistration,
    Evaluation,
    Publication,
    Registration,
)

SMALLEST_ENVIRONMENT_WEIGHT = 0.01
LONGEST_WAIT_S = 60.0
_LOG_RECORDS = 20_000
_LOG_BYTES = 64 << 20
_EVALUATION_BYTES = 64 << 20
_FAILURES = 50
_ENVIRONMENTS = 4096
_FALLBACK_NAME = "hermes-rl"


@dataclass(slots=True)
class RegisteredEnvironment:
    """One environment. Lengths in tokens, ``group_size`` in sequences, times in seconds since the epoch."""

    env_id: int
    desired_name: str
    real_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    last_seen: float
    connected: bool = True
    evaluator: bool = False


@dataclass(slots=True)
class Registered:
    """The trainer's registration in force, and the step that batches have reached since."""

    registration: Registration
    current_step: int


@dataclass
class TrajectoryState:
    """The API server's state.

    Args:
        max_sequences: sequences held before a trainer registers, and the least held after.
        max_bytes: bytes of JSON held.
        clock: seconds since the epoch.
    """

    max_sequences: int = 1024
    max_bytes: int = 1 << 30
    clock: Callable[[], float] = time.time
    revision: int = 0
    closing: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.trainer: Registered | None = None
        self.trainer_key: str | None = None
        self.started = False
        self.finished = False
        self.finish_reason: str | None = None
        self.weights_step: int | None = None
        self.queue = GroupQueue(max_sequences=self.max_sequences, max_bytes=self.max_bytes)
        self.retries = Retries()
        self.environments: list[RegisteredEnvironment] = []
        self.evaluations_wanted: list[int] = []
        self.evaluations: dict[int, Evaluation] = {}
        self.evaluation_bytes: dict[int, int] = {}
        self.failures: deque[dict[str, Any]] = deque(maxlen=_FAILURES)
        self.failure_count = 0
        self.log: deque[bytes] = deque()
        self.log_start = 0
        self.log_bytes = 0
        self.log_dropped = 0
        self.batches_delivered = 0
        self.last_batch: bytes | None = None

    # Change and waiting

    def bump(self) -> None:
        """Something visible changed: wake everyone who waits."""
        self.revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """The server is going down: end every long poll now."""
        self.closing = True
        self.bump()

    async def wait_until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait at most ``seconds`` (and at most a minute) for ``ready``; True when it became so."""
        deadline = time.monotonic() + min(max(seconds, 0.0), LONGEST_WAIT_S)
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self.closing:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return ready()
        return True

    # Trainer

    def register(self, registration: Registration, key: str | None = None) -> int | None:
        """The trainer registers; a second registration changes nothing, as in Atropos.

        Args:
            registration: what it wants.
            key: what it will show from now on where only a trainer may ask; None when it knows of none, as
                Atropos's own, and anyone may.

        Returns:
            The trainer's id; None when another trainer has registered already, and one of them has a key.
        """
        if self.trainer is not None and key != self.trainer_key:
            return None
        if self.trainer is None:
            self.trainer = Registered(registration, registration.starting_step)
            self.trainer_key = key
            self.finished, self.finish_reason = False, None  # whoever said so was not the trainer
            batches = max(16, 4 * (registration.max_batches_offpolicy or 0))
            self.queue.max_sequences = max(self.max_sequences, batches * registration.batch_size)
            self.bump()
        return uuid.uuid4().int

    def is_trainer(self, key: str | None) -> bool:
        """Whether whoever shows ``key`` may ask for what is the trainer's."""
        if self.trainer_key is None:
            return True
        return hmac.compare_digest((key or "").encode(), self.trainer_key.encode())

    def start(self) -> None:
        """The trainer asked for a batch, or serves weights: environments may register from now on."""
        if not self.started:
            self.started = True
            self.bump()

    def minimums(self) -> dict[int, float]:
        """env_id → share of every batch, of connected environments that asked for one."""
        return {
            environment.env_id: environment.min_batch_allocation
            for environment in self.environments
            if environment.connected and environment.min_batch_allocation is not None
        }

    def form_batches(self, most: int | None = None) -> int:
        """Form batches from the queue (all that can be, or at most ``most``); returns how many.

        Every batch formed is a step taken, as in Atropos.
        """
        if self.trainer is None:
            return 0
        formed = 0
        minimums = self.minimums()
        while most is None or formed < most:
            if not self.queue.form_batch(self.trainer.registration.batch_size, minimums):
                break
            formed += 1
        if formed:
            self.trainer.current_step += formed
            self.bump()
        return formed

    def deliver(self, after: int | None) -> bytes | None:
        """The next formed batch as JSON, or, when ``after`` shows that it never arrived, the last one.

        Args:
            after: number of batches the caller has received so far, when it says so.
        """
        if after is not None and after == self.batches_delivered - 1 and self.last_batch is not None:
            return self.last_batch
        batch = self.queue.pop_formed()
        if batch is not None:
            self.batches_delivered += 1
            # Kept only for callers that count: nobody else can ask for it again.
            self.last_batch = batch if after is not None else None
        return batch

    def publish(self, publication: Publication) -> None:
        """The trainer serves new weights, and may want them evaluated."""
        self.started = True
        self.weights_step = publication.weights_step
        step = publication.weights_step
        if publication.evaluate and step not in self.evaluations_wanted and step not in self.evaluations:
            self.evaluations_wanted.append(step)
        self.bump()

    def finish(self, reason: str) -> None:
        """The run is over."""
        if not self.finished:
            self.finished = True
            self.finish_reason = reason
            self.bump()

    # Environments

    def register_environment(self, wanted: EnvironmentRegistration) -> RegisteredEnvironment | None:
        """A new environment, or None when there is no room for one more."""
        if len(self.environments) >= _ENVIRONMENTS:
            return None
        name = wanted.desired_name or "environment"
        same = sum(environment.desired_name == name for environment in self.environments)
        environment = RegisteredEnvironment(
            env_id=len(self.environments),
            desired_name=name,
            real_name=f"{name}_{same}",
            max_token_length=wanted.max_token_length,
            weight=1.0 if wanted.weight is None else wanted.weight,
            group_size=wanted.group_size,
            min_batch_allocation=wanted.min_batch_allocation,
            last_seen=self.clock(),
        )
        self.environments.append(environment)
        if self.trainer is not None and not self.minimums():
            batch_size = self.trainer.registration.batch_size
            if all(batch_size % other.group_size for other in self.environments):
                self.note_failure(
                    EnvironmentFailure(
                        env_id=environment.env_id,
                        where="register",
                        error=f"group_size {environment.group_size} does not divide batch_size {batch_size}: "
                        "no batch can be filled exactly",
                    )
                )
        self.bump()
        return environment

    def environment(self, env_id: int | None) -> RegisteredEnvironment | None:
        """The environment of that id, marked as seen now."""
        if env_id is None or env_id >= len(self.environments):
            return None
        environment = self.environments[env_id]
        environment.last_seen = self.clock()
        return environment

    def disconnect(self, env_id: int) -> bool:
        """An environment leaves; False when there is none of that id."""
        environment = self.environment(env_id)
        if environment is None:
            return False
        environment.connected = False
        self.bump()
        return True

    def environment_status(self, environment: RegisteredEnvironment) -> dict[str, Any]:
        """What ``/status-env`` answers: Atropos's numbers, from one pass over the queue.

        ``queue_size`` and ``self_queue_size`` are in groups of this environment's size.
        """
        total_weight = sum(
            other.max_token_length * max(0.0, other.weight) for other in self.environments if other.connected
        )
        share = environment.max_token_length * environment.weight / total_weight if total_weight > 0 else 0.0
        allocated = sum(self.minimums().values())
        largest = 1
        own_sequences = 0
        own_largest = environment.group_size
        others: dict[int | None, int] = {}
        for group in self.queue.queued:
            largest = max(largest, group.size)
            if group.env_id == environment.env_id:
                own_largest = max(own_largest, group.size)
                own_sequences += group.size
            else:
                others[group.env_id] = others.get(group.env_id, 0) + group.size
        environment.group_size = own_largest

        batch_size = self.trainer.registration.batch_size if self.trainer else 0
        minimums = self.minimums()
        from_others = 0
        if largest > 1:
            for env_id, sequences in others.items():
                reserved = int(batch_size * minimums.get(env_id, 0.0)) if env_id is not None else 0
                from_others += max(0, math.ceil(sequences / largest) * largest - reserved)
        return {
            "current_step": self.current_step,
            "queue_size": (own_sequences + from_others) // own_largest,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": own_sequences // own_largest,
            "max_group_size": largest,
            "env_weight": max(SMALLEST_ENVIRONMENT_WEIGHT, share),
        }

    @property
    def current_step(self) -> int:
        """Batches formed so far, from the registered starting step on."""
        return self.trainer.current_step if self.trainer else 0

    # Evaluation, logs, failures

    @property
    def has_evaluator(self) -> bool:
        """Whether a connected environment answers evaluations."""
        return any(environment.connected and environment.evaluator for environment in self.environments)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Keep what an evaluation found and take it off the list of those wanted."""
        self.evaluations.pop(evaluation.step, None)  # the newest is the last
        self.evaluations[evaluation.step] = evaluation
        self.evaluation_bytes[evaluation.step] = len(evaluation.model_dump_json())
        if evaluation.step in self.evaluations_wanted:
            self.evaluations_wanted.remove(evaluation.step)
        while len(self.evaluations) > 1 and (
            len(self.evaluations) > 10_000 or sum(self.evaluation_bytes.values()) > _EVALUATION_BYTES
        ):
            oldest = next(iter(self.evaluations))
            del self.evaluations[oldest], self.evaluation_bytes[oldest]
        self.bump()

    def append_log(self, record: EnvironmentLog) -> None:
        """Keep a log record until the trainer drains it, or until there are too many."""
        self.log.append(record.model_dump_json().encode())
        self.log_bytes += len(self.log[-1])
        while len(self.log) > _LOG_RECORDS or self.log_bytes > _LOG_BYTES:
            self._forget_record()
            self.log_dropped += 1
        self.bump()

    def _forget_record(self) -> None:
        self.log_bytes -= len(self.log.popleft())
        self.log_start += 1

    def drain_log(self, after: int) -> tuple[list[bytes], int]:
        """Records from number ``after`` on, as JSON, and the number to ask for next; older ones go."""
        while self.log and self.log_start < after:
            self._forget_record()
        return list(self.log), self.log_start + len(self.log)

    def note_failure(self, failure: EnvironmentFailure) -> None:
        """Keep what went wrong in an environment."""
        self.failures.append({**failure.model_dump(), "time": self.clock()})
        self.failure_count += failure.count
        self.bump()

    # Views

    def snapshot(self) -> dict[str, Any]:
        """What ``/state`` answers."""
        groups = self.queue.counts()
        return {
            "revision": self.revision,
            "registered": self.trainer is not None,
            "started": self.started,
            "current_step": self.current_step,
            "weights_step": self.weights_step,
            "queue_groups": groups["queued"],
            "queue_sequences": sum(group.size for group in self.queue.queued),
            "held_bytes": self.queue.bytes,
            "envs": [
                {
                    "env_id": environment.env_id,
                    "desired_name": environment.desired_name,
                    "connected": environment.connected,
                    "evaluator": environment.evaluator,
                    "last_seen": environment.last_seen,
                }
                for environment in self.environments
            ],
            "evaluations_wanted": list(self.evaluations_wanted),
            "groups": groups,
            "failures": list(self.failures),
            "failure_count": self.failure_count,
            "log_records_dropped": self.log_dropped,
            "finished": self.finished,
            "finish_reason": self.finish_reason,
        }

    def wandb_names(self) -> tuple[str | None, str | None]:
        """W&B group and project; never None once a trainer registered, since environments wait for it."""
        if self.trainer is None:
            return None, None
        registration = self.trainer.registration
        return registration.wandb_group or _FALLBACK_NAME, registration.wandb_project or _FALLBACK_NAME

    def reset(self) -> None:
        """Forget everything (Atropos's ``/reset_data``)."""
        self._clear()
        self.bump()
