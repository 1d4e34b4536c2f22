"""The Tinker protocol over HTTP, as an ASGI application.

Written without a web framework: a routing table and functions from a body to a dictionary. A search sends
thousands of small requests, each of which would pay for the framework.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, unquote

from hermes_rl.engine.adapter import AdapterSpec
from hermes_rl.engine.checkpoints import CheckpointError, CheckpointMeta, check_name, parse_path
from hermes_rl.engine.optimizer import AdamSettings
from hermes_rl.engine.rest import RestRoutes
from hermes_rl.engine.service import JSON, MAX_RANK, Future, Service
from hermes_rl.engine.wire import (
    MAX_BODY_BYTES,
    RequestError,
    decompress,
    field,
    parse_training_request,
    read_json,
    read_sample,
    read_training,
    read_ttl,
)

logger = logging.getLogger(__name__)

LONG_POLL_S = 30.0

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "use_pyqwest_transport": True,
    "sample_max_concurrent_requests": 2000,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
    "billing_exception_max_pause_duration_sec": 0,
}
"""Flags for the SDK: what is cheapest on one machine. One fetch a sample instead of a shared poll beside it;
no compression over loopback."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 3600, "sample_cancel_enabled": True}

_ORDERED = frozenset(
    {"optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights"}
)

Handler = Callable[[dict[str, Any]], "Any | Awaitable[Any]"]


class EngineApp:
    """The ASGI application."""

    def __init__(self, service: Service, api_key: str) -> None:
        self.service = service
        self._key = api_key.encode()
        self._bearer = b"Bearer " + self._key
        self._rest = RestRoutes(service, self._key)
        self._posts: dict[str, Handler] = {
            "client/config": lambda body: CLIENT_CONFIG,
            "client/dynamic_config": lambda body: DYNAMIC_CONFIG,
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._asample,
            "cancel_future": self._cancel_future,
            "save_weights_external": self._save_weights_external,
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            status, body, content_type = await self._respond(scope, receive)
        except RequestError as error:
            status, body, content_type = error.status, _problem(str(error)), JSON
        except Exception:
            logger.exception("%s failed", scope.get("path"))
            status, body, content_type = 500, _problem("internal error; see the engine's log"), JSON
        headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _respond(self, scope: dict[str, Any], receive: Any) -> tuple[int, bytes, bytes]:
        path, method = scope["path"], scope["method"]
        if path in ("/api/v1/healthz", "/healthz"):
            return 200, b'{"status":"ok"}', JSON
        encoding, given, host = "", b"", "127.0.0.1"
        for name, value in scope["headers"]:
            if name == b"x-api-key" or (name == b"authorization" and not given):
                given = value
            elif name == b"content-encoding":
                encoding = value.decode("latin-1")
            elif name == b"host":
                host = value.decode("latin-1")
        if method == "GET" and path.startswith("/api/v1/files/"):
            parts, query = unquote(path[14:]).split("/"), _query(scope)
            return 200, self._rest.file(parts, query), b"application/octet-stream"
        if not (hmac.compare_digest(given, self._key) or hmac.compare_digest(given, self._bearer)):
            raise RequestError("the API key is missing or wrong", 401)
        if not path.startswith("/api/v1/"):
            raise RequestError(f"no such path: {path}", 404)
        route = path[8:]
        self.service.last_alive = time.monotonic()
        raw = await _read_body(receive)
        if method == "POST":
            if route == "retrieve_future":
                return await self._retrieve_future(read_json(raw))
            if route == "forward_backward":
                return _json(self._forward_backward(decompress(raw, encoding)))
            handler = self._posts.get(route)
            if handler is not None:
                content = read_json(decompress(raw, encoding))
                answer = self._refusing(handler, content) if route in _ORDERED else handler(content)
                return _json(await answer if asyncio.iscoroutine(answer) else answer)
        query = _query(scope)
        parts = unquote(route).split("/")
        answer = self._rest.answer(method, parts, query, decompress(raw, encoding), host)
        return (200, b"null", JSON) if answer is None else _json(answer)

    def _refusing(self, handler: Handler, body: dict[str, Any]) -> Any:
        """The answer to one of a model's ordered requests. One that is refused counts as done, whatever the
        reason, so that those after it are not held for ever."""
        try:
            return handler(body)
        except Exception:
            model_id, seq = body.get("model_id"), body.get("seq_id")
            if isinstance(model_id, str) and isinstance(seq, int):
                self.service.refuse(model_id, seq)
            raise

    # --- futures ---------------------------------------------------------------------------------------

    async def _retrieve_future(self, body: dict[str, Any]) -> tuple[int, bytes, bytes]:
        request_id = field(body, "request_id", str)
        future = self.service.futures.get(request_id)
        if future is None:
            raise RequestError(f"request_id {request_id!r} is unknown or its result is gone", 410)
        if future.body is None:
            waiter = asyncio.get_running_loop().create_future()
            future.waiters.append(waiter)
            future.session.heard = time.monotonic()
            try:
                await asyncio.wait_for(waiter, LONG_POLL_S)
            except TimeoutError:
                if waiter in future.waiters:
                    future.waiters.remove(waiter)
                answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return 408, json.dumps(answer).encode(), JSON
        assert future.body is not None
        future.fetched = time.monotonic()
        future.session.heard = future.fetched
        return 200, future.body, future.content_type

    def _cancel_future(self, body: dict[str, Any]) -> dict[str, Any]:
        self.service.cancel(field(body, "request_id", str))
        return {}

    # --- sessions --------------------------------------------------------------------------------------

    def _create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self.service.create_session(
            field(body, "user_metadata", dict, None), field(body, "display_name", str, None)
        )
        return {"type": "create_session", "session_id": session.session_id}

    def _heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.service.session(field(body, "session_id", str))
        return {"type": "session_heartbeat"}

    # --- training --------------------------------------------------------------------------------------

    def _create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self.service.session(field(body, "session_id", str))
        self.service.check_base_model(field(body, "base_model", str))
        lora = field(body, "lora_config", dict, None)
        if lora is None:
            raise RequestError("lora_config is missing; this engine trains LoRA adapters only")
        _check_optimizer(body.get("optimizer_config"))
        rank = field(lora, "rank", int)
        if not 1 <= rank <= MAX_RANK:
            raise RequestError(f"lora_config.rank must be 1 to {MAX_RANK}, got {rank}")
        spec = AdapterSpec(
            rank=rank,
            alpha=self.service.lora_alpha,
            train_attn=field(lora, "train_attn", bool, True),
            train_mlp=field(lora, "train_mlp", bool, True),
            train_unembed=field(lora, "train_unembed", bool, True),
        )
        if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
            raise RequestError("one of lora_config.train_attn, train_mlp and train_unembed must be true")
        seq = field(body, "model_seq_id", int)
        metadata = field(body, "user_metadata", dict, None)
        seed = field(lora, "seed", int, None)
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise RequestError(f"lora_config.seed must be -2**63 to 2**64 - 1, got {seed}")
        return _promise(self.service.create_model(session, seq, spec, seed, metadata))

    def _get_info(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self.service.model(field(body, "model_id", str))
        base = self.service.base
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": base.name,
            "is_lora": True,
            "lora_rank": model.adapter.spec.rank,
            "model_data": {
                "arch": base.architecture.model_type,
                "model_name": base.name,
                "tokenizer_id": base.name,
            },
        }

    def _unload_model(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self.service.model(field(body, "model_id", str))
        future = self.service.ordered(
            model, None, lambda future: future.succeed({"type": "unload_model", "model_id": model.model_id})
        )
        self.service.unload(model)
        return _promise(future)

    def _forward_backward(self, raw: bytes) -> dict[str, Any]:
        message = parse_training_request(raw)
        model = self.service.model(message.model_id)
        architecture = self.service.base.architecture
        seq = message.seq_id if message.seq_id > 0 else None
        try:
            sequences, loss = read_training(message, architecture.vocab_size, architecture.max_positions)
        except Exception:
            self.service.refuse(model.model_id, seq)
            raise
        return _promise(self.service.forward_backward(model, seq, sequences, loss, message.forward_only))

    def _optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        model, seq = self._ordered_request(body)
        if body.get("optimizer_params") is not None:
            raise RequestError("optimizer_params: only Adam is supported; send adam_params")
        params = field(body, "adam_params", dict, {})
        known = {name: field(params, name, float) for name in params}
        try:
            settings = AdamSettings(**known)
        except (TypeError, ValueError) as error:
            raise RequestError(f"adam_params: {error}") from error
        return _promise(self.service.optim_step(model, seq, settings))

    def _ordered_request(self, body: dict[str, Any]) -> tuple[Any, int | None]:
        model = self.service.model(field(body, "model_id", str))
        return model, field(body, "seq_id", int, None)

    def _save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._save(body, "weights", overwrite=field(body, "overwrite", bool, False))

    def _save_weights_external(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("age_encryption_recipients"):
            self._ordered_request(body)
            raise RequestError("age_encryption_recipients: encryption is not supported by this engine")
        return self._save(body, "external_weights", overwrite=True)

    def _save_weights_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        sampler_seq = field(body, "sampling_session_seq_id", int, None)
        if sampler_seq is None:
            return self._save(body, "sampler_weights", overwrite=True)
        model, seq = self._ordered_request(body)
        inflight = field(body, "kind", str, "snapshot") == "inflight"
        return _promise(self.service.publish(model, seq, sampler_seq, inflight=inflight))

    def _save(self, body: dict[str, Any], kind: str, *, overwrite: bool) -> dict[str, Any]:
        model, seq = self._ordered_request(body)
        try:
            name = check_name(field(body, "path", str, f"{time.time_ns()}"))
            ttl = read_ttl(body)
            metadata = field(body, "user_metadata", dict, None)
        except CheckpointError as error:
            raise RequestError(f"path: {error}") from error
        future = self.service.save(
            model, seq, kind, name, overwrite=overwrite, ttl_seconds=ttl, user_metadata=metadata
        )
        return _promise(future)

    def _load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        path, optimizer = field(body, "path", str), field(body, "optimizer", bool, False)
        if body.get("session_id") is not None:
            session = self.service.session(field(body, "session_id", str))
            base_model = field(body, "base_model", str, None)
            if base_model is not None:
                self.service.check_base_model(base_model)
            _check_optimizer(body.get("optimizer_config"))
            self._known_checkpoint(path)
            seq = field(body, "model_seq_id", int)
            metadata = field(body, "user_metadata", dict, None)
            return _promise(self.service.create_from_checkpoint(session, seq, path, optimizer, metadata))
        model, seq = self._ordered_request(body)
        self._known_checkpoint(path)
        try:
            different = self.service.differences(self.service.store.spec(path), model)
        except CheckpointError as error:
            raise RequestError(f"path: {error}") from error
        if different is not None:
            raise RequestError(f"path: {path} {different}")
        return _promise(self.service.load(model, seq, path, optimizer))

    def _known_checkpoint(self, path: str) -> CheckpointMeta:
        try:
            run, kind, name = parse_path(path)
        except CheckpointError as error:
            raise RequestError(str(error)) from error
        try:
            return self.service.store.meta(run, kind, name)
        except CheckpointError as error:
            raise RequestError(f"path: {error}", 404) from error

    # --- sampling --------------------------------------------------------------------------------------

    async def _create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self.service.session(field(body, "session_id", str))
        sampler = await self.service.create_sampler(
            session,
            field(body, "sampling_session_seq_id", int),
            field(body, "model_path", str, None),
            field(body, "base_model", str, None),
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}

    def _join_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        sampler = self.service.sampler(field(body, "sampling_session_id", str))
        sampler.clones += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clones}

    def _asample(self, body: dict[str, Any]) -> dict[str, Any]:
        sampler = self.service.sampler(field(body, "sampling_session_id", str))
        architecture = self.service.base.architecture
        options = read_sample(body, architecture.vocab_size, architecture.max_positions)
        future = self.service.sample(sampler, field(body, "seq_id", int, None), options)
        return {"request_id": future.request_id, "sample_sequence_ids": future.sequence_ids}


def _check_optimizer(config: Any) -> None:
    if isinstance(config, dict) and config.get("type", "adamw") != "adamw":
        raise RequestError(f"optimizer_config.type {config['type']!r} is not supported; use 'adamw'")


def _promise(future: Future) -> dict[str, Any]:
    return {"request_id": future.request_id}


def _json(answer: Any) -> tuple[int, bytes, bytes]:
    return 200, json.dumps(answer).encode(), JSON


def _problem(message: str) -> bytes:
    return json.dumps({"detail": message}).encode()


def _query(scope: dict[str, Any]) -> dict[str, str]:
    pairs = parse_qs(scope["query_string"].decode("latin-1"))
    return {name: values[-1] for name, values in pairs.items()}


async def _read_body(receive: Any) -> bytes:
    message = await receive()
    body = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes", 413)
    return b"".join(parts)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
