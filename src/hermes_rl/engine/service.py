"""What the server knows: sessions, training models, samplers and the futures of their requests.

Everything here runs on the event loop; work on weights is handed to the compute thread, whose results come
back through :meth:`Service.post`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
import secrets
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from hermes_rl.engine.adapter import Adapter, AdapterSpec, parameter_count
from hermes_rl.engine.adapter_table import AdapterTable
from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.checkpoints import CheckpointError, CheckpointMeta, CheckpointStore
from hermes_rl.engine.compute import ComputeThread
from hermes_rl.engine.decoding import NOT_FINITE, DecodeBatch, SampleJob
from hermes_rl.engine.losses import Loss
from hermes_rl.engine.optimizer import Adam, AdamSettings
from hermes_rl.engine.ownership import scratch_folder
from hermes_rl.engine.stopping import StopStrings
from hermes_rl.engine.training import TrainingSequence, run_pass
from hermes_rl.engine.wire import RequestError, SampleOptions, sample_response, training_response

logger = logging.getLogger(__name__)

PROTOBUF = b"application/x-protobuf"
JSON = b"application/json"

MAX_RANK = 1024
MAX_PENDING_SAMPLES = 20_000
WEIGHTS_BYTES = 32 * 2**20
"""Sampler weights kept in memory, if one set a training model is not more; beyond it the ones not used for
longest are put on the disk."""

KEPT_SNAPSHOTS = 16
SNAPSHOT_IDLE_S = 3600.0
"""Sampler weights without a name are dropped when that many newer ones of their model exist and nobody has
sampled from them for this long."""

EXPIRY_CHECK_S = 600.0
"""How often checkpoints whose time to live is over are looked for."""

RESULT_LIFETIME_S = 300.0
"""How long a fetched result is kept, in case the answer was lost on the way."""


class UserError(Exception):
    """Work failed for a reason that is the caller's; the message reaches it."""


@dataclass(eq=False)
class Future:
    """The result of a request, to be fetched by its id."""

    request_id: str
    session: Session
    body: bytes | None = None
    content_type: bytes = JSON
    fetched: float | None = None
    job: SampleJob | None = None
    sequence_ids: list[str] | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def settle(self, body: bytes, content_type: bytes) -> None:
        if self.body is not None:
            return
        self.body, self.content_type, self.job = body, content_type, None
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    def succeed(self, result: dict[str, Any]) -> None:
        self.settle(json.dumps(result).encode(), JSON)

    def fail(self, message: str, category: str) -> None:
        self.settle(json.dumps({"error": message, "category": category}).encode(), JSON)


@dataclass(eq=False)
class TrainingModel:
    """One adapter being trained."""

    model_id: str
    session: Session
    adapter: Adapter
    adam: Adam
    user_metadata: dict[str, str] | None
    created: float = field(default_factory=time.time)
    last_request: float = field(default_factory=time.time)
    version: int = 0
    next_seq: int = 1
    held: list[tuple[int, int, Callable[[], None], Future | None]] = field(default_factory=list)
    inflight: Weights | None = None
    gradient: torch.Tensor | None = None

    def gathered(self) -> torch.Tensor:
        """The gradient since the last optimizer step; takes no memory before there is one."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.adapter.flat)
        return self.gradient


@dataclass(eq=False)
class Weights:
    """Fixed weights that samplers use. ``adapter`` None is the base model.

    ``spilled`` is where the adapter's flat vector lies when it has been moved out of memory; ``running`` how
    many requests sample from it now, ``used`` when the last one came or ended.
    """

    key: object
    adapter: Adapter | None
    path: str | None = None
    spilled: tuple[AdapterSpec, Path] | None = None
    running: int = 0
    used: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Sampler:
    """A sampling session."""

    sampler_id: str
    session: Session
    weights: Weights
    clones: int = 0


@dataclass(eq=False)
class Session:
    """What one client holds. It ends when the client says so or is not heard from."""

    session_id: str
    user_metadata: dict[str, str] | None
    display_name: str | None
    created: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.monotonic)
    finished: bool = False
    finish_reason: str | None = None
    models: dict[str, TrainingModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)


class Service:
    """The engine behind the protocol.

    Args:
        base: the base model.
        store: where checkpoints lie.
        lora_alpha: numerator of every adapter's scaling.
        session_timeout: seconds without a sign of life after which a session ends.
        cache_bytes: room for keys and values of running samples.
    """

    def __init__(
        self,
        base: BaseModel,
        store: CheckpointStore,
        *,
        lora_alpha: float,
        session_timeout: float,
        cache_bytes: int,
    ) -> None:
        self.base = base
        self.store = store
        self.lora_alpha = lora_alpha
        self.session_timeout = session_timeout
        self.table = AdapterTable(base)
        self.compute = ComputeThread(DecodeBatch(base, self.table, cache_bytes=cache_bytes))
        self.stop_strings = StopStrings(base.folder)
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.models: dict[str, TrainingModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self.futures: OrderedDict[str, Future] = OrderedDict()
        self.base_weights = Weights("base", None)
        self._resident: OrderedDict[int, Weights] = OrderedDict()
        self._snapshots: dict[str, list[Sampler]] = {}
        self._scratch: Path | None = None
        self._model_bytes = _room_for_models(base.device)
        self._expiry_checked = float("-inf")
        self.last_alive = time.monotonic()
        self._counter = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending_samples = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work; called on the event loop."""
        self._loop = loop
        self.compute.start()

    def close(self) -> None:
        """End the work and remove what was kept on the disk for it."""
        self.compute.stop()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` run on the event loop; safe from the compute thread. Wake-ups are shared."""
        first = not self._posted
        self._posted.append(call)
        if first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        while self._posted:
            call = self._posted.popleft()
            try:
                call()
            except Exception:
                logger.exception("a result could not be delivered")

    # --- sessions --------------------------------------------------------------------------------------

    def create_session(self, user_metadata: Any, display_name: Any) -> Session:
        session = Session(secrets.token_hex(8), user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """A session that is alive.

        Raises:
            RequestError: 404 when unknown, 410 when it has ended.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise RequestError(f"session_id {session_id!r} is unknown", 404)
        if session.finished:
            raise RequestError(f"session {session_id!r} has ended", 410)
        session.heard = self.last_alive = time.monotonic()
        return session

    def finish_session(self, session: Session, reason: str | None = None) -> None:
        """End a session and free what it held. ``reason`` is what its client says of it."""
        if session.finished:
            return
        session.finished, session.finish_reason = True, reason
        for model in list(session.models.values()):
            self.unload(model)
        for sampler in list(session.samplers.values()):
            self._drop_sampler(sampler)
        for model_id in [each for each in self._snapshots if each.startswith(f"{session.session_id}:")]:
            del self._snapshots[model_id]
        for request_id in session.request_ids:
            future = self.futures.pop(request_id, None)
            if future is not None and future.body is None:
                if future.job is not None:
                    self.compute.cancel(future.job)
                future.fail("the session has ended", "user")
        session.request_ids.clear()

    def expire(self) -> None:
        """End silent sessions; drop what is no longer needed. Called every second."""
        now = time.monotonic()
        self._drop_superseded(now)
        if self._loop is not None and now - self._expiry_checked > EXPIRY_CHECK_S:
            self._expiry_checked = now
            self._loop.run_in_executor(None, self.store.all)
        for session in list(self.sessions.values()):
            if not session.finished and now - session.heard > self.session_timeout:
                logger.info("session %s has gone silent", session.session_id)
                self.finish_session(session)
        if any(not session.finished for session in self.sessions.values()):
            self.last_alive = now
        while len(self.sessions) > 1000 and next(iter(self.sessions.values())).finished:
            self.sessions.popitem(last=False)
        for request_id, future in list(itertools.islice(self.futures.items(), 256)):
            if future.fetched is None:
                self.futures.move_to_end(request_id)
            elif now - future.fetched > RESULT_LIFETIME_S:
                self._drop_future(future)

    def _drop_future(self, future: Future) -> None:
        self.futures.pop(future.request_id, None)
        future.session.request_ids.discard(future.request_id)

    def _new_future(self, session: Session, request_id: str) -> Future:
        future = Future(request_id, session)
        self.futures[request_id] = future
        session.request_ids.add(request_id)
        return future

    # --- models ----------------------------------------------------------------------------------------

    def check_base_model(self, name: str) -> None:
        """Raise unless ``name`` is the base model served here."""
        if name == self.base.name:
            return
        local = Path(name).expanduser()
        if local.is_dir() and local.resolve() == self.base.folder:
            return
        raise RequestError(f"base_model {name!r} is not served here; this engine serves {self.base.name!r}")

    def model(self, model_id: str) -> TrainingModel:
        """A training model.

        Raises:
            RequestError: 404 when unknown.
        """
        model = self.models.get(model_id)
        if model is None:
            raise RequestError(f"model_id {model_id!r} is unknown; it may have been unloaded", 404)
        model.session.heard = self.last_alive = time.monotonic()
        model.last_request = time.time()
        return model

    def create_model(
        self, session: Session, seq: int, spec: AdapterSpec, seed: int | None, user_metadata: Any
    ) -> Future:
        """A new adapter. The same request twice gives the same future.

        Raises:
            RequestError: there is no memory left for it.
        """
        model_id = f"{session.session_id}:train:{seq}"
        request_id = f"{model_id}:0"
        if request_id in self.futures:
            return self.futures[request_id]
        self._check_room(spec)
        future = self._new_future(session, request_id)
        seed = secrets.randbits(63) if seed is None else seed

        def work() -> Adapter:
            return Adapter.create(self.base.architecture, spec, seed, self.base.device)

        def done(adapter: Adapter) -> dict[str, Any]:
            self._register(session, model_id, adapter, user_metadata)
            return {"type": "create_model", "model_id": model_id}

        self._submit(model_id, future, work, done)
        return future

    def create_from_checkpoint(
        self, session: Session, seq: int, path: str, optimizer: bool, user_metadata: Any
    ) -> Future:
        """A training model that goes on from a checkpoint."""
        model_id = f"{session.session_id}:train:{seq}"
        request_id = f"{model_id}:0"
        if request_id in self.futures:
            return self.futures[request_id]
        future = self._new_future(session, request_id)

        def work() -> tuple[Adapter, dict[str, torch.Tensor] | None]:
            loaded = self.store.load(path, optimizer=optimizer)
            return loaded.build(self.base.architecture, self.base.device), loaded.optimizer

        def done(result: tuple[Adapter, dict[str, torch.Tensor] | None]) -> dict[str, Any]:
            adapter, state = result
            model = self._register(session, model_id, adapter, user_metadata)
            if state is not None:
                model.adam.load_state(state)
            return {"type": "load_weights", "path": path, "model_id": model_id}

        self._submit(model_id, future, work, done)
        return future

    def _register(
        self, session: Session, model_id: str, adapter: Adapter, user_metadata: Any
    ) -> TrainingModel:
        if session.finished:
            raise UserError("the session has ended")
        try:
            self._check_room(adapter.spec)
        except RequestError as error:
            raise UserError(str(error)) from error
        model = TrainingModel(model_id, session, adapter, Adam(adapter.flat), user_metadata)
        self.models[model_id] = model
        session.models[model_id] = model
        return model

    def _check_room(self, spec: AdapterSpec) -> None:
        """Raise unless one more adapter can be trained beside those there are."""
        taken = sum(self._adapter_bytes(model.adapter.spec) for model in self.models.values())
        wanted = self._adapter_bytes(spec)
        if taken + wanted > self._model_bytes:
            raise RequestError(
                f"lora_config.rank: an adapter of rank {spec.rank} takes {wanted / 2**20:.0f} MB for "
                f"training, and {taken / 2**20:.0f} of {self._model_bytes / 2**20:.0f} MB are taken; "
                "unload models that are no longer needed, or choose a smaller rank"
            )

    def _adapter_bytes(self, spec: AdapterSpec) -> int:
        """Memory that training an adapter takes: parameters, gradient, two moments."""
        return 16 * parameter_count(self.base.architecture, spec)

    def unload(self, model: TrainingModel) -> None:
        """Free a training model. Its checkpoints and samplers stay; what it was still to do fails."""
        self.models.pop(model.model_id, None)
        model.session.models.pop(model.model_id, None)
        reason = f"model {model.model_id} was unloaded before this request began; nothing was done"
        self.compute.discard(model.model_id, UserError(reason))
        for *_, future in model.held:
            if future is not None:
                future.fail(reason, "user")
        model.held.clear()

    # --- ordered requests of a model -------------------------------------------------------------------

    def ordered(self, model: TrainingModel, seq: int | None, begin: Callable[[Future], None]) -> Future:
        """A request that runs after all with a smaller ``seq``; the same one twice gives one future."""
        seq = model.next_seq if seq is None else seq
        request_id = f"{model.model_id}:{seq}"
        known = self.futures.get(request_id)
        if known is not None:
            return known
        if seq < model.next_seq:
            raise RequestError(f"seq_id {seq} was used before; its result is gone", 410)
        if seq > model.next_seq + 100_000:
            raise RequestError(f"seq_id {seq} is far ahead of {model.next_seq}")
        future = self._new_future(model.session, request_id)
        heapq.heappush(model.held, (seq, next(self._counter), lambda: begin(future), future))
        self._release_held(model)
        return future

    def refuse(self, model_id: str, seq: int | None) -> None:
        """Count a refused request as done, so that those after it are not held for ever."""
        model = self.models.get(model_id)
        if model is not None and seq is not None and model.next_seq <= seq <= model.next_seq + 100_000:
            heapq.heappush(model.held, (seq, next(self._counter), lambda: None, None))
            self._release_held(model)

    def _release_held(self, model: TrainingModel) -> None:
        while model.held and model.held[0][0] <= model.next_seq:
            seq, _, begin, _ = heapq.heappop(model.held)
            model.next_seq = max(model.next_seq, seq + 1)
            begin()

    def _submit(
        self,
        queue: str,
        future: Future,
        work: Callable[[], Any],
        done: Callable[[Any], dict[str, Any] | tuple[bytes, bytes]],
    ) -> None:
        """Run ``work`` on the compute thread, then ``done`` on the event loop, then settle the future."""

        def deliver(result: Any, failure: BaseException | None) -> None:
            try:
                if failure is not None:
                    raise failure
                answer = done(result)
            except (UserError, CheckpointError, FloatingPointError) as error:
                future.fail(str(error), "user")
            except Exception as error:
                logger.error("a request failed", exc_info=error)
                future.fail(f"{type(error).__name__}: {error}", "server")
            else:
                if isinstance(answer, dict):
                    future.succeed(answer)
                else:
                    future.settle(*answer)

        self.compute.submit(queue, work, lambda result, failure: self.post(lambda: deliver(result, failure)))

    def forward_backward(
        self,
        model: TrainingModel,
        seq: int | None,
        sequences: list[TrainingSequence],
        loss: Loss,
        forward_only: bool,
    ) -> Future:
        """Logprobs and loss; unless ``forward_only`` the gradient is added to the model's."""

        def begin(future: Future) -> None:
            gradient = None if forward_only else model.gathered
            self._submit(
                model.model_id,
                future,
                lambda: run_pass(self.base, model.adapter, sequences, loss, gradient),
                lambda outcome: (training_response(outcome, sequences), PROTOBUF),
            )

        return self.ordered(model, seq, begin)

    def optim_step(self, model: TrainingModel, seq: int | None, settings: AdamSettings) -> Future:
        """One Adam step on the gradient gathered since the last one."""

        def work() -> float:
            try:
                return model.adam.step(model.gathered(), settings)
            finally:
                model.gradient = None
                model.version += 1

        def begin(future: Future) -> None:
            self._submit(
                model.model_id,
                future,
                work,
                lambda norm: {"metrics": {"grad_norm": norm, "step": float(model.adam.steps)}},
            )

        return self.ordered(model, seq, begin)

    def save(
        self,
        model: TrainingModel,
        seq: int | None,
        kind: str,
        name: str,
        *,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
    ) -> Future:
        """Write a checkpoint of the model as it is at this point of its requests."""
        meta = CheckpointMeta(
            run=model.model_id,
            kind=kind,
            name=name,
            base_model=self.base.name,
            created=time.time(),
            rank=model.adapter.spec.rank,
            has_optimizer=kind == "weights",
            user_metadata=user_metadata,
            expires=None if ttl_seconds is None else time.time() + ttl_seconds,
        )

        def work() -> CheckpointMeta:
            state = model.adam.state() if kind == "weights" else None
            return self.store.save(meta, model.adapter, state, overwrite=overwrite)

        types = {
            "weights": "save_weights",
            "sampler_weights": "save_weights_for_sampler",
            "external_weights": "save_weights_external",
        }

        def begin(future: Future) -> None:
            self._submit(model.model_id, future, work, lambda meta: {"type": types[kind], "path": meta.path})

        return self.ordered(model, seq, begin)

    def load(self, model: TrainingModel, seq: int | None, path: str, optimizer: bool) -> Future:
        """Overwrite a model's weights (and optimizer state) with a checkpoint's."""

        def work() -> None:
            loaded = self.store.load(path, optimizer=optimizer)
            different = self.differences(loaded.spec, model)
            if different is not None:
                raise UserError(f"{path} {different}")
            adapter = loaded.build(self.base.architecture, self.base.device)
            fresh = Adam(model.adapter.flat)
            if loaded.optimizer is not None:
                fresh.load_state(loaded.optimizer)
            model.adapter.flat.copy_(adapter.flat)
            model.adam = fresh
            model.gradient = None
            model.version += 1

        def begin(future: Future) -> None:
            self._submit(
                model.model_id,
                future,
                work,
                lambda _: {"type": "load_weights", "path": path, "model_id": model.model_id},
            )

        return self.ordered(model, seq, begin)

    @staticmethod
    def differences(spec: AdapterSpec, model: TrainingModel) -> str | None:
        """Why weights of an adapter are not the same in a model, in words that follow a checkpoint's path."""
        saved, mine = asdict(spec), asdict(model.adapter.spec)
        names = [name for name in saved if saved[name] != mine[name]]
        if not names:
            return None

        def listed(values: dict[str, Any]) -> str:
            return ", ".join(f"{name} {values[name]}" for name in names)

        way = "create the training client from the checkpoint (create_training_client_from_state)"
        if "alpha" in names:
            way += f", or serve with --lora-alpha {saved['alpha']:g}"
        return f"was saved with {listed(saved)}, and the model has {listed(mine)}: {way}"

    # --- samplers --------------------------------------------------------------------------------------

    def publish(self, model: TrainingModel, seq: int | None, sampler_seq: int, *, inflight: bool) -> Future:
        """A sampler with the model's weights as they are at this point of its requests.

        ``inflight``: all such samplers of the model share one set of weights, the latest published.
        """
        sampler_id = f"{model.session.session_id}:sample:{sampler_seq}"

        def done(adapter: Adapter) -> dict[str, Any]:
            weights = Weights(f"{model.model_id}:{next(self._counter)}", adapter)
            if inflight:
                if model.inflight is None:
                    model.inflight = weights
                else:
                    self._forget(model.inflight)
                    model.inflight.key, model.inflight.adapter = weights.key, adapter
                    weights = model.inflight
            sampler = self._add_sampler(model.session, sampler_id, weights)
            if not inflight:
                self._snapshots.setdefault(model.model_id, []).append(sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        def begin(future: Future) -> None:
            self._submit(model.model_id, future, lambda: model.adapter.snapshot(), done)

        return self.ordered(model, seq, begin)

    def _add_sampler(self, session: Session, sampler_id: str, weights: Weights) -> Sampler:
        if session.finished:
            raise UserError("the session has ended")
        sampler = Sampler(sampler_id, session, weights)
        self.samplers[sampler_id] = sampler
        session.samplers[sampler_id] = sampler
        self._use(weights)
        return sampler

    def _use(self, weights: Weights) -> Adapter | None:
        """A sampler's adapter, brought back into memory if need be; others may have to leave it."""
        if weights is self.base_weights:
            return None
        if weights.adapter is None and weights.spilled is not None:
            spec, file = weights.spilled
            flat = torch.from_numpy(np.fromfile(file, np.float32)).to(self.base.device)
            weights.adapter = Adapter(self.base.architecture, spec, flat)
        self._resident[id(weights)] = weights
        self._resident.move_to_end(id(weights))
        held = sum(kept.adapter.flat.nbytes for kept in self._resident.values() if kept.adapter is not None)
        trained = sum(model.adapter.flat.nbytes for model in self.models.values())
        limit = max(WEIGHTS_BYTES, trained)
        while held > limit and len(self._resident) > 1:
            _, oldest = self._resident.popitem(last=False)
            if oldest.adapter is None:
                continue
            try:
                self._spill(oldest)
            except OSError as error:
                logger.warning("sampler weights stay in memory: %s", error)
                self._resident[id(oldest)] = oldest
                self._resident.move_to_end(id(oldest), last=False)
                break
            held -= oldest.adapter.flat.nbytes
            oldest.adapter = None
        return weights.adapter

    def _spill(self, weights: Weights) -> None:
        """Have a set of weights on the disk. What was written once stays as long as the weights do."""
        if weights.spilled is not None or weights.adapter is None:
            return
        if self._scratch is None:
            self._scratch = scratch_folder()
        file = self._scratch / f"{next(self._counter)}.f32"
        weights.adapter.flat.cpu().numpy().tofile(file)
        weights.spilled = (weights.adapter.spec, file)

    async def create_sampler(
        self, session: Session, seq: int, path: str | None, base_model: str | None
    ) -> Sampler:
        """A sampler of the base model or of a checkpoint.

        Raises:
            RequestError: 400 for another base model, 404 for an unknown checkpoint.
        """
        sampler_id = f"{session.session_id}:sample:{seq}"
        if sampler_id in self.samplers:
            return self.samplers[sampler_id]
        if base_model is not None:
            self.check_base_model(base_model)
        if path is None:
            if base_model is None:
                raise RequestError("model_path or base_model is needed")
            return self._add_sampler(session, sampler_id, self.base_weights)
        try:
            loaded = await asyncio.to_thread(self.store.load, path)
            adapter = loaded.build(self.base.architecture, self.base.device)
        except CheckpointError as error:
            raise RequestError(f"model_path: {error}", 404) from error
        key = f"{path}:{loaded.meta.created}"
        return self._add_sampler(session, sampler_id, Weights(key, adapter, path))

    def sampler(self, sampler_id: str) -> Sampler:
        """A sampler.

        Raises:
            RequestError: 404 when unknown.
        """
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(
                f"sampling_session_id {sampler_id!r} is unknown. Sampler weights without a name are dropped "
                f"when {KEPT_SNAPSHOTS} newer ones of their model exist and nobody has sampled from them for "
                f"{SNAPSHOT_IDLE_S / 60:.0f} minutes; those that save_weights_for_sampler names stay",
                404,
            )
        sampler.session.heard = self.last_alive = time.monotonic()
        return sampler

    def _drop_superseded(self, now: float) -> None:
        """Drop sampler weights without a name that newer ones have replaced and nobody uses."""
        for model_id, samplers in self._snapshots.items():
            old = [
                sampler
                for sampler in samplers[:-KEPT_SNAPSHOTS]
                if not sampler.weights.running and now - sampler.weights.used > SNAPSHOT_IDLE_S
            ]
            if old:
                for sampler in old:
                    self._drop_sampler(sampler)
                gone = set(map(id, old))
                self._snapshots[model_id] = [each for each in samplers if id(each) not in gone]

    def _drop_sampler(self, sampler: Sampler) -> None:
        self.samplers.pop(sampler.sampler_id, None)
        sampler.session.samplers.pop(sampler.sampler_id, None)
        self._forget(sampler.weights)

    def _forget(self, weights: Weights) -> None:
        if weights is self.base_weights:
            return
        self.compute.forget(weights.key)
        self._resident.pop(id(weights), None)
        if weights.spilled is not None:
            weights.spilled[1].unlink(missing_ok=True)
        weights.adapter = weights.spilled = None

    def sample(self, sampler: Sampler, seq: int | None, options: SampleOptions) -> Future:
        """Completions of a prompt. The same request twice gives the same future.

        Raises:
            RequestError: 429 when too many requests wait.
        """
        number = f"x{next(self._counter)}" if seq is None else str(seq)
        request_id = f"{sampler.sampler_id}:{number}"
        if request_id in self.futures:
            return self.futures[request_id]
        if self._pending_samples >= MAX_PENDING_SAMPLES:
            raise RequestError("too many sampling requests are waiting; try again", 429)
        future = self._new_future(sampler.session, request_id)
        future.sequence_ids = [f"{request_id}:{index}" for index in range(options.count)]
        eos = self.base.architecture.eos_token_ids
        stop = eos if options.stop_tokens is None else options.stop_tokens
        if options.stop_tokens:
            stop = tuple(dict.fromkeys((*options.stop_tokens, *eos)))

        weights = sampler.weights

        def settle(job: SampleJob, failure: str | None) -> None:
            self._pending_samples -= 1
            weights.running -= 1
            weights.used = time.monotonic()
            if failure is not None:
                future.fail(failure, "user" if failure in ("cancelled", NOT_FINITE) else "server")
            else:
                future.settle(sample_response(job, options.sparse_targets), PROTOBUF)

        job = SampleJob(
            key=weights.key,
            adapter=self._use(weights),
            prompt=options.prompt,
            count=options.count,
            max_tokens=options.max_tokens,
            seed=secrets.randbits(63) if options.seed is None else options.seed,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_tokens=stop,
            finished=lambda job, failure: self.post(lambda: settle(job, failure)),
            stop_text=self.stop_strings.watcher(options.stop_strings) if options.stop_strings else None,
            sample_top_k=options.sample_top_k,
            prompt_logprobs=options.prompt_logprobs,
            prompt_top_k=options.prompt_top_k,
            prompt_last=options.prompt_last,
            prompt_targets=options.prompt_targets,
            prompt_alternatives=options.prompt_alternatives,
        )
        future.job = job
        self._pending_samples += 1
        weights.running += 1
        weights.used = time.monotonic()
        self.compute.sample(job)
        return future

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request if it still runs."""
        future = self.futures.get(request_id)
        if future is not None and future.job is not None:
            self.compute.cancel(future.job)


def _room_for_models(device: torch.device) -> int:
    """Bytes that training models may take: about what is free, less the room of running samples."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.5)
    return int(psutil.virtual_memory().available * 0.7)
