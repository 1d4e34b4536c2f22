"""The inference endpoint's door: who may in, and with how much."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hermes_rl.trainer.inference import MAX_BODY_BYTES, InferenceEndpoint, build_app


class Characters:
    """A tokenizer of one token a character, which notes what it was given."""

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [1] * len(text)

    def apply_chat_template(self, conversation: Any, **_: Any) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in conversation))


@pytest.fixture
def tokenizer() -> Characters:
    return Characters()


@pytest.fixture
async def http(tokenizer: Characters) -> AsyncIterator[httpx.AsyncClient]:
    sampler: Any = None  # nothing here gets so far
    stand_in: Any = tokenizer
    endpoint = InferenceEndpoint(sampler, stand_in, model_name="m", max_length=10, vocabulary_size=100)
    transport = httpx.ASGITransport(build_app("/r-secret", lambda: endpoint))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/health", "/r-secreT/health", "/r-secret2/health", "/openapi.json"])
async def test_nothing_answers_without_the_capability(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert (answer.status_code, answer.text) == (404, "Not Found")


async def test_everything_answers_below_the_capability(http: httpx.AsyncClient) -> None:
    assert (await http.get("/r-secret/health")).json() == {"status": "ok"}
    assert (await http.get("/r-secret/v1/models")).json()["data"][0]["id"] == "m"
    assert "/r-secret/generate" in (await http.get("/r-secret/openapi.json")).json()["paths"]


ROUTES: list[tuple[str, Any]] = [
    ("v1/completions", lambda text: {"prompt": text}),
    ("v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ("generate", lambda text: {"text": text}),
    ("generate", lambda text: {"prompt": text}),
    ("step/0/v1/completions", lambda text: {"prompt": text}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_prompt_that_cannot_fit_is_refused_untokenized(
    http: httpx.AsyncClient, tokenizer: Characters, path: str, body: Any
) -> None:
    short = await http.post(f"/r-secret/{path}", json=body("x" * 11))
    assert (short.status_code, tokenizer.longest) == (400, 11)
    assert "11 tokens" in short.text
    long = await http.post(f"/r-secret/{path}", json=body("x" * 1_000_000))
    assert (long.status_code, tokenizer.longest) == (400, 11)
    assert "at most 10 tokens (max_token_length)" in long.text


async def test_a_body_that_never_ends_is_not_kept(http: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10 * MAX_BODY_BYTES:
            sent += 1 << 20
            yield b" " * (1 << 20)

    answer = await http.post("/r-secret/v1/completions", content=endless())
    assert answer.status_code == 413
    assert f"larger than {MAX_BODY_BYTES} bytes" in answer.json()["error"]["message"]
