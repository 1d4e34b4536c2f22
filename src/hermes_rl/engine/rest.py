"""The protocol's REST side: what runs, checkpoints and sessions there are, and what becomes of them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from hermes_rl.engine.checkpoints import KINDS, CheckpointError, CheckpointMeta, CheckpointStore
from hermes_rl.engine.service import Service, Session
from hermes_rl.engine.session_search import OWNER, PROJECT, search_sessions, session_status
from hermes_rl.engine.wire import RequestError, field, read_json, read_ttl

URL_LIFETIME_S = 3600
FINISH_REASONS = ("success", "errored", "interrupted")


class RestRoutes:
    """Answers ``METHOD /api/v1/…`` requests that are not ``POST`` calls of the training protocol."""

    def __init__(self, service: Service, secret: bytes) -> None:
        self._service = service
        self._store: CheckpointStore = service.store
        self._secret = secret

    def answer(
        self, method: str, parts: list[str], query: dict[str, str], raw: bytes, host: str
    ) -> dict[str, Any] | None:
        """The JSON answer, or None for an empty one.

        Raises:
            RequestError: 404 for what is not there, 400 for what makes no sense.
        """
        match (method, parts):
            case ("GET", ["get_server_capabilities"]):
                return self._capabilities()
            case ("GET", ["samplers", sampler_id]):
                sampler = self._service.sampler(sampler_id)
                base_model, path = self._service.base.name, sampler.weights.path
                return {"sampler_id": sampler_id, "base_model": base_model, "model_path": path}
            case ("GET", ["sessions"]):
                offset, limit = _page(query, 20)
                sessions = list(reversed(self._service.sessions))
                return {"sessions": sessions[offset : offset + limit]}
            case ("GET", ["sessions", session_id]):
                return _session(self._session(session_id))
            case ("POST", ["sessions", session_id, "finish"]):
                reason = field(field(read_json(raw), "reason", dict, {}), "type", str, None)
                known = reason if reason in FINISH_REASONS else None
                self._service.finish_session(self._session(session_id), known)
                return None
            case ("POST", ["sessions", "search"]):
                page, cursor = search_sessions(self._service.sessions.values(), read_json(raw))
                return {"sessions": [self._summary(session) for session in page], "next_cursor": cursor}
            case ("POST", ["copy_weights"]):
                return {"tinker_path": self._copy(read_json(raw)).path}
            case ("GET", ["training_runs"]):
                return self._training_runs(query)
            case ("GET", ["training_runs", run]):
                return self._training_run(run)
            case ("GET", ["training_runs", run, "checkpoints"]):
                return {"checkpoints": [self._checkpoint(meta) for meta in self._all(run)]}
            case ("GET", ["checkpoints"]):
                return self._checkpoints(query)
            case ("DELETE", ["training_runs", run, "checkpoints", kind, name]):
                meta = self._meta(run, kind, name)
                self._store.delete(meta.run, meta.kind, meta.name)
                return None
            case ("PUT", ["training_runs", run, "checkpoints", kind, name, "ttl"]):
                meta, ttl = self._meta(run, kind, name), read_ttl(read_json(raw))
                meta.expires = None if ttl is None else time.time() + ttl
                self._store.update(meta)
                return None
            case ("POST" | "DELETE", ["training_runs", run, "checkpoints", kind, name, "publish"]):
                meta = self._meta(run, kind, name)
                meta.public = method == "POST"
                self._store.update(meta)
                return None
            case ("GET", ["training_runs", run, "checkpoints", kind, name, "external_weights_urls"]):
                return self._urls(self._meta(run, kind, name), host)
            case ("POST", ["weights_info"]):
                return self._weights_info(field(read_json(raw), "tinker_path", str))
        raise RequestError(f"{method} /api/v1/{'/'.join(parts)} is not offered by this engine", 404)

    def file(self, parts: list[str], query: dict[str, str]) -> bytes:
        """A checkpoint's file behind a signed URL.

        Raises:
            RequestError: 403 for a wrong or expired signature, 404 for an unknown file.
        """
        if len(parts) != 4:
            raise RequestError("no such file", 404)
        run, kind, name, file = parts
        expires, signature = query.get("expires", ""), query.get("signature", "")
        expected = self._sign("/".join(parts), expires)
        if not hmac.compare_digest(signature.encode(errors="replace"), expected.encode()):
            raise RequestError("the URL's signature is wrong", 403)
        if not (expires.isascii() and expires.isdigit()) or int(expires[:20]) < time.time():
            raise RequestError("the URL has expired", 403)
        meta = self._meta(run, kind, name)
        folder = self._store.folder(meta.run, meta.kind, meta.name)
        path = folder / file
        if path.parent != folder or not path.is_file():
            raise RequestError("no such file", 404)
        return path.read_bytes()

    def _sign(self, path: str, expires: str) -> str:
        signed = f"{path}?{expires}".encode(errors="replace")
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()

    def _urls(self, meta: CheckpointMeta, host: str) -> dict[str, Any]:
        expires = int(time.time()) + URL_LIFETIME_S
        urls = {}
        for file in sorted(self._store.folder(meta.run, meta.kind, meta.name).iterdir()):
            path = f"{meta.run}/{meta.kind}/{meta.name}/{file.name}"
            signature = self._sign(path, str(expires))
            urls[file.name] = (
                f"http://{host}/api/v1/files/{quote(path)}?expires={expires}&signature={signature}"
            )
        return {"urls": urls, "expires": _time(expires)}

    def _capabilities(self) -> dict[str, Any]:
        base = self._service.base
        model = {
            "model_name": base.name,
            "max_context_length": base.architecture.max_positions,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def _session(self, session_id: str) -> Session:
        session = self._service.sessions.get(session_id)
        if session is None:
            raise RequestError(f"session {session_id!r} is unknown", 404)
        return session

    def _meta(self, run: str, kind: str, name: str) -> CheckpointMeta:
        if kind not in KINDS:
            raise RequestError(f"checkpoint kind {kind!r} must be one of {', '.join(KINDS)}")
        try:
            return self._store.meta(run, kind, name)
        except CheckpointError as error:
            raise RequestError(str(error), 404) from error

    def _summary(self, session: Session) -> dict[str, Any]:
        """A session as a search shows it. Training runs are called after their session."""
        mine = [meta for meta in self._store.all() if meta.run.split(":")[0] == session.session_id]
        return {
            "session_id": session.session_id,
            "created_at": _time(session.created),
            "owner": OWNER,
            "project_id": PROJECT,
            "status": session_status(session),
            "checkpoints_count": len(mine),
            "checkpoint_storage_bytes": sum(self._store.size(meta) for meta in mine),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }

    def _copy(self, body: dict[str, Any]) -> CheckpointMeta:
        """A checkpoint under a training run of its own. There is one project here, whatever it is called."""
        path, ttl = field(body, "source_path", str), read_ttl(body)
        if body.get("session_id") is not None:
            session = self._service.session(field(body, "session_id", str))
            run = f"{session.session_id}:train:{field(body, 'model_seq_id', int)}"
        else:
            field(body, "destination_project_id", str)
            run = f"copy:{secrets.token_hex(8)}"
        try:
            return self._store.copy(path, run, None if ttl is None else time.time() + ttl)
        except CheckpointError as error:
            raise RequestError(f"source_path: {error}", 404) from error

    def _all(self, run: str) -> list[CheckpointMeta]:
        try:
            found = self._store.all(run)
        except CheckpointError as error:
            raise RequestError(str(error)) from error
        if not found and run not in self._service.models:
            raise RequestError(f"training run {run!r} is unknown", 404)
        return found

    def _checkpoint(self, meta: CheckpointMeta) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{meta.kind}/{meta.name}",
            "checkpoint_type": KINDS[meta.kind],
            "time": _time(meta.created),
            "tinker_path": meta.path,
            "size_bytes": self._store.size(meta),
            "public": meta.public,
            "user_metadata": meta.user_metadata,
            "expires_at": None if meta.expires is None else _time(meta.expires),
        }

    def _checkpoints(self, query: dict[str, str]) -> dict[str, Any]:
        offset, limit = _page(query, 100)
        found = self._store.all()
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        page = [self._checkpoint(meta) for meta in found[offset : offset + limit]]
        return {"checkpoints": page, "cursor": cursor}

    def _training_run(self, run: str) -> dict[str, Any]:
        model, metas = self._service.models.get(run), self._all(run)
        last = {kind: next((meta for meta in metas if meta.kind == kind), None) for kind in KINDS}
        training, sampler = last["weights"], last["sampler_weights"]
        return {
            "training_run_id": run,
            "base_model": metas[0].base_model if metas else self._service.base.name,
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": model.adapter.spec.rank if model is not None else metas[0].rank,
            "last_request_time": _time(model.last_request if model is not None else metas[0].created),
            "last_checkpoint": self._checkpoint(training) if training else None,
            "last_sampler_checkpoint": self._checkpoint(sampler) if sampler else None,
            "user_metadata": model.user_metadata if model is not None else None,
        }

    def _training_runs(self, query: dict[str, str]) -> dict[str, Any]:
        offset, limit = _page(query, 20)
        runs = list(reversed(self._service.models))
        runs += [run for run in dict.fromkeys(meta.run for meta in self._store.all()) if run not in runs]
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        page = [self._training_run(run) for run in runs[offset : offset + limit]]
        return {"training_runs": page, "cursor": cursor}

    def _weights_info(self, path: str) -> dict[str, Any]:
        try:
            loaded = self._store.load(path)
        except CheckpointError as error:
            raise RequestError(f"tinker_path: {error}", 404) from error
        spec = loaded.spec
        return {
            "base_model": loaded.meta.base_model,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_attn": spec.train_attn,
            "train_mlp": spec.train_mlp,
            "train_unembed": spec.train_unembed,
        }


def _session(session: Session) -> dict[str, Any]:
    return {
        "training_run_ids": list(session.models),
        "sampler_ids": list(session.samplers),
        "user_metadata": session.user_metadata,
        "display_name": session.display_name,
    }


def _page(query: dict[str, str], default: int) -> tuple[int, int]:
    try:
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", default))
    except ValueError as error:
        raise RequestError("offset and limit must be integers") from error
    if offset < 0 or not 1 <= limit <= 1000:
        raise RequestError("offset must be 0 or more, limit 1 to 1000")
    return offset, limit


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
