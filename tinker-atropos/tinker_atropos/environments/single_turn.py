"""One question, one answer, one score: what the environments of this folder share.

Runs inside an environment's process; asks the inference server that Atropos's ``ServerManager`` wraps.
Nothing here is an environment, and nothing here knows a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.server_handling.openai_server import OpenAIServer

Item = TypeVar("Item")
Message = dict[str, str]

IGNORED = -100
"""Mask value of a token that is not trained."""

FULL_MARKS = 0.999
"""Scores from here up count as correct; verifiers with partial credit give 1.0 for a right answer."""


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    Attributes:
        text: The answer, without special tokens.
        finished: False when the answer was cut at the length limit.
        tokens: Prompt and answer as token ids.
        masks: As long as ``tokens``: the id where the token was sampled, -100 where it was given.
        logprobs: As long as ``tokens``: the sampler's logprob (nats) where sampled, 1.0 where given.
            None when the server does not tell.
    """

    text: str
    finished: bool
    tokens: list[int]
    masks: list[int]
    logprobs: list[float] | None


async def sample(
    server: Any,
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    n: int,
    max_tokens: int,
    temperature: float = 1.0,
    split: str = "train",
) -> list[Rollout]:
    """Sample ``n`` answers to one prompt with a single request.

    Server types ``sglang`` and ``vllm`` return the very tokens that were sampled and their logprobs. Type
    ``openai`` returns text only: it is tokenized again, and the logprobs are unknown.

    Args:
        server: The environment's ``ServerManager``.
        tokenizer: The environment's tokenizer.
        messages: The conversation up to the user's turn.
        n: Number of answers.
        max_tokens: Longest answer, in tokens.
        temperature: Sampling temperature.
        split: ``train`` or ``eval``: which of the server's request budgets is used.
    """
    arguments = {"messages": list(messages), "n": n, "max_tokens": max_tokens, "temperature": temperature}
    if isinstance(server.servers[0], OpenAIServer):
        completion = await server.chat_completion(**arguments, split=split)
        return [_retokenized(tokenizer, messages, choice) for choice in completion.choices]
    async with server.managed_server(tokenizer=tokenizer) as managed:
        completion = await managed.chat_completion(**arguments, split=split)
        nodes = managed.get_state()["nodes"]
    return [
        Rollout(
            text=choice.message.content or "",
            finished=choice.finish_reason != "length",
            tokens=node.tokens,
            masks=node.masked_tokens,
            logprobs=node.logprobs,
        )
        for choice, node in zip(completion.choices, nodes, strict=True)
    ]


def _retokenized(tokenizer: Any, messages: Sequence[Message], choice: Any) -> Rollout:
    text = choice.message.content or ""
    finished = choice.finish_reason != "length"
    prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(text, add_special_tokens=False)
    if finished and tokenizer.eos_token_id is not None:
        answer_ids = [*answer_ids, tokenizer.eos_token_id]
    return Rollout(
        text=text,
        finished=finished,
        tokens=[*prompt_ids, *answer_ids],
        masks=[*[IGNORED] * len(prompt_ids), *answer_ids],
        logprobs=None,
    )


def scored_group(rollouts: Sequence[Rollout], scores: Sequence[float]) -> ScoredDataGroup:
    """Put rollouts and their scores into the shape Atropos sends to its API server."""
    group = ScoredDataGroup()  # pyright: ignore[reportCallIssue]
    group["tokens"] = [rollout.tokens for rollout in rollouts]
    group["masks"] = [rollout.masks for rollout in rollouts]
    group["scores"] = list(scores)
    logprobs = [rollout.logprobs for rollout in rollouts if rollout.logprobs is not None]
    if len(logprobs) == len(rollouts):
        group["inference_logprobs"] = logprobs
    return group


async def evaluation(items: Sequence[Item], attempt: Callable[[Item], Awaitable[float]]) -> dict[str, float]:
    """Attempt every item at once and summarize the scores.

    How many requests are in flight is the server's business: Atropos bounds them by
    ``num_requests_for_eval``.

    Returns:
        ``eval/percent_correct`` (0 to 1), ``eval/mean_score``, and ``eval/count``, the number of items.
    """
    scores = await asyncio.gather(*[attempt(item) for item in items])
    return {
        "eval/percent_correct": share_correct(scores),
        "eval/mean_score": sum(scores) / len(scores),
        "eval/count": float(len(scores)),
    }


def training_metrics(scores: Sequence[float]) -> dict[str, float]:
    """Summarize the scores of training rollouts: ``train/percent_correct`` and ``train/count``."""
    if not scores:
        return {}
    return {"train/percent_correct": share_correct(scores), "train/count": float(len(scores))}


def share_correct(scores: Sequence[float]) -> float:
    """Share of scores that are full marks, from 0 to 1."""
    return sum(score >= FULL_MARKS for score in scores) / len(scores)


def evaluation_size(server: Any, available: int) -> int:
    """Number of items to evaluate: the server's ``num_requests_for_eval``, at most ``available``."""
    config = getattr(server.servers[0], "config", None)
    wanted = getattr(config, "num_requests_for_eval", available)
    return max(1, min(int(wanted), available))


def conversation(system_prompt: str, question: str) -> list[Message]:
    """The messages that ask a question; no system turn when ``system_prompt`` is empty."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def final_text(rollout: Rollout) -> str:
    """The answer without the reasoning before ``</think>`` and without surrounding blanks."""
    return rollout.text.split("</think>")[-1].strip()
