"""The API server as an ASGI application: Atropos's routes, then ours, behind a capability path."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, TypeAdapter
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from hermes_rl.trajectories.body import Arriving, BadBody, parse, read_body
from hermes_rl.trajectories.queue import QueuedGroup
from hermes_rl.trajectories.state import TrajectoryState
from hermes_rl.trajectories.wire import (
    TRAINER_KEY_HEADER,
    EnvIdentifier,
    EnvironmentFailure,
    EnvironmentLog,
    EnvironmentRegistration,
    Evaluation,
    Finish,
    Publication,
    Registration,
    ScoredGroup,
)

DEFAULT_MAX_BODY_BYTES = 256 << 20
SMALL_BODY_BYTES = 4 << 20
_BODIES_AT_ONCE = 4
"""Bodies of the largest size that may arrive at once."""
_CLIENT_CLOSED_REQUEST = 499

_group = TypeAdapter(ScoredGroup)
_groups = TypeAdapter(list[ScoredGroup])
_registration = TypeAdapter(Registration)
_environment_registration = TypeAdapter(EnvironmentRegistration)
_env_identifier = TypeAdapter(EnvIdentifier)
_publication = TypeAdapter(Publication)
_evaluation = TypeAdapter(Evaluation)
_environment_log = TypeAdapter(EnvironmentLog)
_environment_failure = TypeAdapter(EnvironmentFailure)
_finish = TypeAdapter(Finish)

Wait = Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="seconds, at most 60")]
Counter = Annotated[int, Query(ge=0, lt=2**53)]


class Capability:
    """ASGI middleware: only paths below ``/<capability>`` exist; everything else is a bare 404.

    Args:
        app: the application inside.
        capability: the unguessable first segment of the path.
    """

    def __init__(self, app: ASGIApp, capability: str) -> None:
        self._app = app
        self._capability = capability.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            first, _, rest = scope["path"].lstrip("/").partition("/")
            if not hmac.compare_digest(first.encode("utf-8", "replace"), self._capability):
                await PlainTextResponse("Not Found", status_code=404)(scope, receive, send)
                return
            path = "/" + rest
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace")}
        await self._app(scope, receive, send)


def build_app(
    state: TrajectoryState, *, capability: str | None, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
) -> ASGIApp:
    """The API server's application.

    Args:
        state: what it serves; the caller keeps it to end long polls at shutdown.
        capability: first path segment that every URL must carry; None for a bare Atropos set-up.
        max_body_bytes: largest accepted body of scored data, decoded; other bodies may have 4 MiB.
    """
    api = FastAPI(
        title="hermes-rl trajectory API",
        description="The Atropos trajectory protocol, with long polling, evaluation and log channels.",
    )
    api.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    api.add_exception_handler(BadBody, _refuse_body)
    api.add_exception_handler(RequestValidationError, _refuse_query)
    small = min(SMALL_BODY_BYTES, max_body_bytes)
    arriving = Arriving(_BODIES_AT_ONCE * max_body_bytes)

    def only_the_trainer(request: Request) -> None:
        if not state.is_trainer(request.headers.get(TRAINER_KEY_HEADER)):
            raise HTTPException(403, "only the trainer of this run may ask for that")

    the_trainers = [Depends(only_the_trainer)]

    # Atropos

    @api.get("/")
    async def root() -> dict[str, str]:
        """Say who answers."""
        return {"message": "AtroposLib API"}

    @api.post("/register", **_takes(Registration))
    async def register(request: Request) -> dict[str, int]:
        """The trainer registers."""
        registration = parse(_registration, await read_body(request, small, arriving))
        uuid = state.register(registration, request.headers.get(TRAINER_KEY_HEADER))
        if uuid is None:
            raise HTTPException(409, "another trainer has registered already; this server is of one run only")
        return {"uuid": uuid}

    @api.post("/register-env", **_takes(EnvironmentRegistration))
    async def register_env(request: Request) -> dict[str, Any]:
        """An environment registers, once the trainer has started."""
        wanted = parse(_environment_registration, await read_body(request, small, arriving))
        if not state.started or state.trainer is None:
            return {"status": "wait for trainer to start"}
        environment = state.register_environment(wanted)
        if environment is None:
            return {"status": "failure", "error": "too many environments"}
        registration = state.trainer.registration
        return {
            "status": "success",
            "env_id": environment.env_id,
            "wandb_name": environment.real_name,
            "checkpoint_dir": registration.checkpoint_dir,
            "starting_step": state.current_step,
            "checkpoint_interval": registration.save_checkpoint_interval,
            "num_steps": registration.num_steps,
        }

    @api.post("/disconnect-env", **_takes(EnvIdentifier))
    async def disconnect_env(request: Request) -> dict[str, Any]:
        """An environment leaves."""
        who = parse(_env_identifier, await read_body(request, small, arriving))
        if state.disconnect(who.env_id):
            return {"status": "success"}
        return {"status": "failure", "error": f"no environment {who.env_id}"}

    @api.get("/wandb_info")
    async def wandb_info() -> dict[str, str | None]:
        """The W&B group and project that environments log to."""
        group, project = state.wandb_names()
        return {"group": group, "project": project}

    @api.get("/info")
    async def info() -> dict[str, int]:
        """Batch size in sequences and longest sequence in tokens; -1 before registration."""
        if state.trainer is None:
            return {"batch_size": -1, "max_token_len": -1}
        registration = state.trainer.registration
        return {"batch_size": registration.batch_size, "max_token_len": registration.max_token_len}

    @api.get("/batch", dependencies=the_trainers)
    async def batch(
        request: Request,
        wait: Wait = None,
        after: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    ) -> Response:
        """The next batch, oldest first, or null.

        With ``wait``, wait for one and form at most one. ``after`` is the number of batches the caller has
        received so far: when the last one never arrived, it is sent again.
        """
        if state.trainer is None:
            return JSONResponse(
                {
                    "status": "error",
                    "message": "Trainer not registered. Call /register first.",
                    "batch": [],
                }
            )
        state.start()
        payload = state.deliver(after)
        if payload is None and wait is None:
            state.form_batches()
            payload = state.deliver(after)
        elif payload is None and wait is not None:
            await state.wait_until(
                lambda: bool(state.queue.formed) or state.form_batches(most=1) > 0 or state.finished, wait
            )
            if not await request.is_disconnected():
                payload = state.deliver(after)
        number = str(state.batches_delivered).encode()
        return _json(b'{"batch":' + (payload or b"null") + b',"number":' + number + b"}")

    @api.get("/latest_example")
    async def latest_example() -> Response:
        """The group that was queued last."""
        if state.queue.latest is not None:
            return _json(state.queue.latest.payload)
        return JSONResponse({name: [] for name in _EXAMPLE_FIELDS})

    @api.post("/scored_data", **_takes(ScoredGroup))
    async def scored_data(request: Request) -> Response:
        """Take one group."""
        body = await read_body(request, max_body_bytes, arriving)

        def take() -> dict[str, Any]:
            return _take_group(state, parse(_group, body))

        return await _take_once(state, request, body, take)

    @api.post("/scored_data_list", **_takes(ScoredGroup, many=True))
    async def scored_data_list(request: Request) -> Response:
        """Take several groups."""
        body = await read_body(request, max_body_bytes, arriving)

        def take() -> dict[str, Any]:
            answers = [_take_group(state, group) for group in parse(_groups, body)]
            answer: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
            buffered = [one for one in answers if one["status"] == "buffered"]
            if buffered:
                answer["buffered"] = len(buffered)
                answer["last_buffer_size"] = buffered[-1]["buffer_size"]
            dropped = sum(one["status"] == "dropped" for one in answers)
            if dropped:
                answer["dropped"] = dropped
            return answer

        return await _take_once(state, request, body, take)

    @api.get("/status")
    async def status() -> dict[str, int]:
        """Current step and number of queued groups."""
        return {"current_step": state.current_step, "queue_size": len(state.queue.queued)}

    @api.get("/status-env", **_takes(EnvIdentifier))
    async def status_env(request: Request) -> Response:
        """What one environment needs to know to decide how many rollouts to start."""
        who = parse(_env_identifier, await read_body(request, small, arriving))
        environment = state.environment(who.env_id)
        if environment is None:
            return JSONResponse({"detail": f"no environment {who.env_id}"}, status_code=404)
        return JSONResponse(state.environment_status(environment))

    @api.get("/reset_data", dependencies=the_trainers)
    async def reset_data() -> Response:
        """Forget everything."""
        state.reset()
        return PlainTextResponse("Reset successful")

    # Ours

    @api.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @api.get("/state")
    async def read_state(revision: Annotated[int | None, Query(ge=0)] = None, wait: Wait = None) -> Response:
        """The state; with ``revision`` and ``wait``, once it differs from that revision."""
        if revision is not None and wait is not None:
            await state.wait_until(lambda: state.revision != revision, wait)
        return JSONResponse(state.snapshot())

    @api.post("/publish", **_takes(Publication), dependencies=the_trainers)
    async def publish(request: Request) -> dict[str, str]:
        """The trainer serves new weights."""
        state.publish(parse(_publication, await read_body(request, small, arriving)))
        return {"status": "success"}

    @api.post("/evaluator", **_takes(EnvIdentifier))
    async def evaluator(request: Request) -> Response:
        """This environment answers evaluations."""
        who = parse(_env_identifier, await read_body(request, small, arriving))
        environment = state.environment(who.env_id)
        if environment is None:
            return JSONResponse({"detail": f"no environment {who.env_id}"}, status_code=404)
        environment.evaluator = True
        state.bump()
        return JSONResponse({"status": "success"})

    @api.post("/evaluation", **_takes(Evaluation))
    async def post_evaluation(request: Request) -> dict[str, str]:
        """What an evaluation found."""
        state.record_evaluation(parse(_evaluation, await read_body(request, small, arriving)))
        return {"status": "success"}

    @api.get("/evaluation")
    async def get_evaluation(step: Counter, wait: Wait = None) -> Response:
        """The evaluation of the weights of ``step``, waiting for it if asked to."""
        await state.wait_until(lambda: step in state.evaluations or state.finished, wait or 0.0)
        found = state.evaluations.get(step)
        if found is not None:
            return JSONResponse(found.model_dump())
        if not state.has_evaluator:
            return JSONResponse({"evaluator": False})
        return JSONResponse({"pending": step in state.evaluations_wanted})

    @api.post("/environment-log", **_takes(EnvironmentLog))
    async def environment_log(request: Request) -> dict[str, str]:
        """Metrics and counts from an environment."""
        state.append_log(parse(_environment_log, await read_body(request, small, arriving)))
        return {"status": "success"}

    @api.get("/environment-log", dependencies=the_trainers)
    async def drain_environment_log(after: Counter = 0) -> Response:
        """Log records from number ``after`` on; asking for more lets go of those before."""
        records, following = state.drain_log(after)
        return _json(b'{"records":[' + b",".join(records) + b'],"next":%d}' % following)

    @api.post("/environment-failure", **_takes(EnvironmentFailure))
    async def environment_failure(request: Request) -> dict[str, str]:
        """Something went wrong in an environment."""
        state.note_failure(parse(_environment_failure, await read_body(request, small, arriving)))
        return {"status": "success"}

    @api.post("/finish", **_takes(Finish), dependencies=the_trainers)
    async def finish(request: Request) -> dict[str, str]:
        """The run is over."""
        state.finish(parse(_finish, await read_body(request, small, arriving)).reason)
        return {"status": "success"}

    return api if capability is None else Capability(api, capability)


_EXAMPLE_FIELDS = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
    "messages",
    "images",
)


def _take_group(state: TrajectoryState, group: ScoredGroup) -> dict[str, Any]:
    environment = state.environment(group.env_id)
    outcome = state.queue.accept(
        QueuedGroup(
            payload=group.model_dump_json().encode(),
            size=len(group.tokens),
            env_id=group.env_id,
            equal_scores=len(set(group.scores)) == 1,
        ),
        environment.group_size if environment is not None else None,
    )
    state.bump()
    answer: dict[str, Any] = {"status": outcome}
    if outcome == "buffered" and environment is not None:
        answer["buffer_size"] = state.queue.buffered_sequences(environment.env_id)
    return answer


async def _take_once(
    state: TrajectoryState, request: Request, body: bytes, take: Callable[[], dict[str, Any]]
) -> Response:
    """Take what a post brings, unless it is surely the retry of one already taken."""
    key = request.headers.get("idempotency-key")
    key = key[:200] if key else None
    # One turn of the loop, so that a hang-up that is already in the socket is seen.
    await asyncio.sleep(0)
    peer = None if request.client is None else (request.client.host, request.client.port)
    if await request.is_disconnected() or (peer is not None and state.retries.has_hung_up(peer)):
        # Not taken: a sender that is still alive sends it again.
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    # From here on nothing waits: of two posts with one key at the same time, one is the first.
    earlier = state.retries.earlier_answer(key, body)
    if earlier is not None:
        state.queue.note_duplicate()
        state.bump()
        return _json(earlier)
    answer = json.dumps(take()).encode()
    if key is not None:
        state.retries.remember(key, answer)
    elif peer is not None:
        state.retries.answered(peer, body, answer)
    return _json(answer)


def _takes(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    """Route arguments that describe a body which the handler parses itself."""
    schema = model.model_json_schema()
    if many:
        schema = {"type": "array", "items": schema}
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        "responses": {
            "4XX": {"description": "The request was refused; `detail` says why."},
        },
    }


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _refuse_body(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadBody)
    return JSONResponse({"detail": error.detail}, status_code=error.status)


async def _refuse_query(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    findings = [{"loc": list(item["loc"]), "msg": item["msg"]} for item in error.errors()]
    return JSONResponse({"detail": findings}, status_code=422)
