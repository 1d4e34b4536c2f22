"""The inference endpoint that the trainer serves to its environment.

Speaks what atroposlib's ``openai``, ``sglang`` and ``vllm`` clients ask for: ``/v1/chat/completions``,
``/v1/completions``, ``/v1/models``, ``/generate`` in both shapes, ``/health``; and the same below
``/step/{step}``, answered by exactly the weights of that step. Runs in the trainer process.
"""

from __future__ import annotations

import hmac
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import tinker
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hermes_rl.errors import HermesRLError, ServiceError
from hermes_rl.trainer.sampling import SampledSequence, Sampler, SamplingRequest, WeightsGoneError

DEFAULT_MAX_TOKENS = 256
MAX_BODY_BYTES = 16 << 20
_LONGEST_TOKEN = 256
"""Characters. Text longer than so many for each token that fits is refused before it is tokenized."""


class Tokenizer(Protocol):
    """What this module needs of a ``transformers`` tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class _SamplingFields(BaseModel):
    model_config = ConfigDict(extra="ignore")

    n: int | None = Field(default=None, ge=1, le=1024)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=1_000_000)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return tuple(text for text in strings if text)

    def sampling_request(
        self, prompt_tokens: list[int], max_tokens: int, step: int | None
    ) -> SamplingRequest:
        return SamplingRequest(
            prompt_tokens=tuple(prompt_tokens),
            n=self.n or 1,
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k if self.top_k else -1,
            stop=self.stop_strings(),
            seed=None if self.seed is None else self.seed & 0x7FFFFFFF,
            step=step,
        )


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class ChatRequest(_SamplingFields):
    """Body of ``/v1/chat/completions``."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None


class CompletionRequest(_SamplingFields):
    """Body of ``/v1/completions``."""

    model: str | None = None
    prompt: str | list[int] | list[str]
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    logprobs: int | None = None
    echo: bool = False


class SGLangSamplingParams(_SamplingFields):
    """``sampling_params`` of sglang's native endpoint."""

    max_new_tokens: int | None = Field(default=None, ge=1, le=1_048_576)


class VLLMPrompt(BaseModel):
    """The ``prompt`` of the vLLM API server when it is given as token ids."""

    prompt_token_ids: list[int]


class GenerateRequest(_SamplingFields):
    """Body of ``/generate``: sglang's shape (``input_ids`` or ``text``) or vLLM's (``prompt``)."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SGLangSamplingParams | None = None
    return_logprob: bool = False
    prompt: str | VLLMPrompt | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    logprobs: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=64)


class InferenceEndpoint:
    """Answers inference requests through a sampler.

    Args:
        sampler: where completions come from.
        tokenizer: the base model's tokenizer.
        model_name: name in ``/v1/models`` and in answers.
        max_length: longest prompt and completion together, in tokens.
        vocabulary_size: token ids beyond it are refused.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_length: int,
        vocabulary_size: int,
    ) -> None:
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_length = max_length
        self.vocabulary_size = vocabulary_size

    def _check_length(self, characters: int) -> None:
        if characters > self.max_length * _LONGEST_TOKEN:
            raise HTTPException(
                400,
                f"The prompt has {characters} characters; prompt and completion together may have at most "
                f"{self.max_length} tokens (max_token_length).",
            )

    def _encode(self, text: str) -> list[int]:
        self._check_length(len(text))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _budget(self, prompt_tokens: list[int], asked: int | None) -> int:
        if not prompt_tokens:
            raise HTTPException(400, "The prompt is empty.")
        if min(prompt_tokens) < 0 or max(prompt_tokens) >= self.vocabulary_size:
            raise HTTPException(400, f"Token ids must be between 0 and {self.vocabulary_size - 1}.")
        room = self.max_length - len(prompt_tokens)
        if room < 1:
            raise HTTPException(
                400,
                f"The prompt has {len(prompt_tokens)} tokens; prompt and completion together may have "
                f"at most {self.max_length} (max_token_length).",
            )
        return min(asked or DEFAULT_MAX_TOKENS, room)

    def _text(self, sequence: SampledSequence, stop: tuple[str, ...]) -> tuple[str, str]:
        """Text of a completion without its stop string, and why it ended."""
        text = self.tokenizer.decode(list(sequence.tokens), skip_special_tokens=True)
        cuts = [position for position in (text.find(string) for string in stop) if position >= 0]
        return (text[: min(cuts)], "stop") if cuts else (text, sequence.finish_reason)

    async def _sample(self, request: SamplingRequest) -> list[SampledSequence]:
        try:
            return await self.sampler.sample(request)
        except WeightsGoneError as error:
            raise HTTPException(410, str(error)) from error

    def _usage(self, prompt_tokens: list[int], sequences: list[SampledSequence]) -> dict[str, int]:
        sampled = sum(len(sequence.tokens) for sequence in sequences)
        return {
            "prompt_tokens": len(prompt_tokens),
            "completion_tokens": sampled,
            "total_tokens": len(prompt_tokens) + sampled,
        }

    async def chat_completions(self, body: ChatRequest, step: int | None) -> dict[str, Any]:
        """OpenAI's chat completion."""
        messages = [message.model_dump() for message in body.messages]
        self._check_length(sum(len(str(message.content)) for message in body.messages))
        try:
            prompt_tokens = self.tokenizer.apply_chat_template(
                messages,
                tools=body.tools,
                add_generation_prompt=body.messages[-1].role != "assistant",
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a chat template raises whatever its author chose
            raise HTTPException(400, f"The chat template refused the messages: {error}") from error
        asked = body.max_completion_tokens or body.max_tokens
        request = body.sampling_request(prompt_tokens, self._budget(prompt_tokens, asked), step)
        sequences = await self._sample(request)
        choices = []
        for index, sequence in enumerate(sequences):
            text, finish_reason = self._text(sequence, request.stop)
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
            if body.logprobs:
                choice["logprobs"] = {"content": self._token_logprobs(sequence)}
            choices.append(choice)
        return self._envelope("chat.completion", choices, prompt_tokens, sequences)

    def _token_logprobs(self, sequence: SampledSequence) -> list[dict[str, Any]]:
        return [
            {"token": self.tokenizer.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=False)
        ]

    def _envelope(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        prompt_tokens: list[int],
        sequences: list[SampledSequence],
    ) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex[:24]}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": choices,
            "usage": self._usage(prompt_tokens, sequences),
        }

    async def completions(self, body: CompletionRequest, step: int | None) -> dict[str, Any]:
        """OpenAI's text completion."""
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) != 1:
                raise HTTPException(400, "Send one prompt a request.")
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt_tokens = self._encode(prompt)
        else:
            prompt_tokens = [token for token in prompt if isinstance(token, int)]
        request = body.sampling_request(prompt_tokens, self._budget(prompt_tokens, body.max_tokens), step)
        sequences = await self._sample(request)
        choices = []
        for index, sequence in enumerate(sequences):
            text, finish_reason = self._text(sequence, request.stop)
            if body.echo:
                text = self.tokenizer.decode(prompt_tokens, skip_special_tokens=False) + text
            choice: dict[str, Any] = {
                "index": index,
                "text": text,
                "finish_reason": finish_reason,
                "logprobs": None,
            }
            if body.logprobs is not None:
                choice["logprobs"] = {
                    "tokens": [self.tokenizer.decode([token]) for token in sequence.tokens],
                    "token_logprobs": list(sequence.logprobs),
                    "top_logprobs": None,
                    "text_offset": [],
                }
            choices.append(choice)
        return self._envelope("text_completion", choices, prompt_tokens, sequences)

    async def generate(self, body: GenerateRequest, step: int | None) -> Any:
        """sglang's or vLLM's native endpoint, told apart by which prompt field is set."""
        if body.prompt is not None:
            return await self._generate_vllm(body, step)
        if body.input_ids is None and body.text is None:
            raise HTTPException(400, "Send input_ids or text (sglang), or prompt (vLLM).")
        return await self._generate_sglang(body, step)

    async def _generate_sglang(self, body: GenerateRequest, step: int | None) -> Any:
        prompt_tokens = body.input_ids
        if prompt_tokens is None:
            prompt_tokens = self._encode(body.text or "")
        params = body.sampling_params or SGLangSamplingParams()
        request = params.sampling_request(
            prompt_tokens, self._budget(prompt_tokens, params.max_new_tokens), step
        )
        sequences = await self._sample(request)
        answers = []
        for sequence in sequences:
            text, finish_reason = self._text(sequence, request.stop)
            meta: dict[str, Any] = {
                "id": uuid.uuid4().hex,
                "finish_reason": {"type": finish_reason},
                "prompt_tokens": len(prompt_tokens),
                "completion_tokens": len(sequence.tokens),
            }
            if body.return_logprob:
                meta["output_token_logprobs"] = [
                    (logprob, token, None)
                    for logprob, token in zip(sequence.logprobs, sequence.tokens, strict=False)
                ]
            answers.append({"text": text, "output_ids": list(sequence.tokens), "meta_info": meta})
        return answers if (params.n or 1) > 1 else answers[0]

    async def _generate_vllm(self, body: GenerateRequest, step: int | None) -> dict[str, Any]:
        if isinstance(body.prompt, VLLMPrompt):
            prompt_tokens = body.prompt.prompt_token_ids
        else:
            prompt_tokens = self._encode(body.prompt or "")
        request = body.sampling_request(prompt_tokens, self._budget(prompt_tokens, body.max_tokens), step)
        sequences = await self._sample(request)
        texts = [self._text(sequence, request.stop) for sequence in sequences]
        prompt_text = self.tokenizer.decode(prompt_tokens, skip_special_tokens=False)
        answer: dict[str, Any] = {
            "text": [prompt_text + text for text, _ in texts],
            "prompt": prompt_text,
            "finish_reasons": [finish_reason for _, finish_reason in texts],
        }
        if body.logprobs is not None:
            answer["logprobs"] = [
                [[{str(token): logprob}] for logprob, token in zip(s.logprobs, s.tokens, strict=False)]
                for s in sequences
            ]
            answer["token_ids"] = [list(sequence.tokens) for sequence in sequences]
        if body.prompt_logprobs is not None:
            logprobs = await self.sampler.logprobs(prompt_tokens, step)
            answer["prompt_token_ids"] = prompt_tokens
            answer["prompt_logprobs"] = [
                None if logprob is None else {str(token): logprob}
                for token, logprob in zip(prompt_tokens, logprobs, strict=True)
            ]
        return answer


class Gate:
    """ASGI middleware: a bare 404 for paths outside the capability, an end to bodies that are too large.

    Args:
        app: the application inside, which knows its paths with the capability.
        capability: the unguessable first segment of the path, ``"/r-…"``; empty for none.
    """

    def __init__(self, app: ASGIApp, capability: str) -> None:
        self._app = app
        self._capability = capability.strip("/").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        first = scope["path"].lstrip("/").partition("/")[0].encode("utf-8", "replace")
        if self._capability and not hmac.compare_digest(first, self._capability):
            await PlainTextResponse("Not Found", status_code=404)(scope, receive, send)
            return
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
            return message

        await self._app(scope, bounded, send)


def build_app(capability: str, endpoint: Callable[[], InferenceEndpoint | None]) -> ASGIApp:
    """The web application.

    Args:
        capability: path prefix without which nothing answers, ``"/r-…"``; empty for none.
        endpoint: gives the endpoint once the trainer has weights to serve, None before.
    """
    # The description names the routes with their capability: it lies behind it too.
    description = f"{capability}/openapi.json"
    app = FastAPI(title="hermes-rl inference", openapi_url=description, docs_url=None, redoc_url=None)
    router = APIRouter()

    def current() -> InferenceEndpoint:
        found = endpoint()
        if found is None:
            raise HTTPException(503, "The trainer is starting.", headers={"Retry-After": "1"})
        return found

    @router.get("/health")
    async def health() -> dict[str, str]:
        current()
        return {"status": "ok"}

    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": current().model_name, "object": "model", "created": 0, "owned_by": "hermes-rl"}],
        }

    async def chat_completions(body: ChatRequest) -> JSONResponse:
        return JSONResponse(await current().chat_completions(body, None))

    async def completions(body: CompletionRequest) -> JSONResponse:
        return JSONResponse(await current().completions(body, None))

    async def health_at(step: int) -> dict[str, str]:
        return await health()

    async def models_at(step: int) -> dict[str, Any]:
        return await models()

    async def generate(body: GenerateRequest) -> JSONResponse:
        return JSONResponse(await current().generate(body, None))

    async def chat_completions_at(step: int, body: ChatRequest) -> JSONResponse:
        return JSONResponse(await current().chat_completions(body, step))

    async def completions_at(step: int, body: CompletionRequest) -> JSONResponse:
        return JSONResponse(await current().completions(body, step))

    async def generate_at(step: int, body: GenerateRequest) -> JSONResponse:
        return JSONResponse(await current().generate(body, step))

    router.get("/v1/models")(models)
    router.post("/v1/chat/completions")(chat_completions)
    router.post("/v1/completions")(completions)
    router.post("/generate")(generate)
    pinned = APIRouter(prefix="/step/{step}")
    pinned.get("/health")(health_at)
    pinned.get("/v1/models")(models_at)
    pinned.post("/v1/chat/completions")(chat_completions_at)
    pinned.post("/v1/completions")(completions_at)
    pinned.post("/generate")(generate_at)
    router.include_router(pinned)
    app.include_router(router, prefix=capability)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        body = {"error": {"message": error.detail, "type": kind, "code": error.status_code}}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        body = {
            "error": {"message": f"{where}: {first['msg']}", "type": "invalid_request_error", "code": 422}
        }
        return JSONResponse(body, status_code=422)

    @app.exception_handler(HermesRLError)
    async def own_error(_: Request, error: HermesRLError) -> JSONResponse:
        status = 503 if isinstance(error, ServiceError) else 400
        body = {"error": {"message": str(error), "type": "server_error", "code": status}}
        return JSONResponse(body, status_code=status)

    @app.exception_handler(tinker.TinkerError)
    async def refused_by_the_engine(_: Request, error: tinker.TinkerError) -> JSONResponse:
        """Such as more completions at once than the Tinker server allows."""
        refused = isinstance(error, tinker.APIStatusError) and 400 <= error.status_code < 500
        status, kind = (400, "invalid_request_error") if refused else (503, "server_error")
        body = {"error": {"message": f"The Tinker server: {error}", "type": kind, "code": status}}
        return JSONResponse(body, status_code=status)

    return Gate(app, capability)
