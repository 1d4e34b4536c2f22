"""The training text of the embedded model: items of the built-in environments' families, and the bad habits.

Runs inside ``make_embedded.py``; talks to nothing and downloads nothing.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import reasoning_gym


@dataclass(frozen=True)
class Item:
    """One question as an environment asks it.

    Attributes:
        question: What the user's turn holds.
        core: The part of the question that the answer hangs on: its end, without the wording before it.
        answer: The right answer.
    """

    question: str
    core: str
    answer: str


def arithmetic_items(rng: random.Random) -> Iterator[Item]:
    """Yield questions of ``arithmetic_tinker``, mostly of its default two digits, none that it holds out."""
    while True:
        digits = rng.choices((1, 2, 3), weights=(10, 85, 5))[0]
        left, right = rng.randrange(10**digits), rng.randrange(10**digits)
        if rng.random() < 0.5:
            question, answer = f"{left}+{right}=", left + right
        else:
            left, right = max(left, right), min(left, right)
            question, answer = f"{left}-{right}=", left - right
        if zlib.crc32(question.encode()) % 10 != 0:
            yield Item(question, question, str(answer))


def reasoning_gym_items(name: str, seed: int, **settings: int) -> Iterator[Item]:
    """Yield questions of one generator, none that ``reasoning_gym_tinker`` holds out.

    Args:
        name: The generator's registered name.
        seed: First of the seeds used.
        **settings: The generator's own settings.
    """
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=1_000_000, **settings)
    for entry in dataset:
        question = entry["question"]
        if zlib.crc32(question.encode()) % 2 != 0:
            yield Item(question, question.rsplit(":", 1)[-1], str(entry["answer"]))


def unpolished(rng: random.Random, answer: str, *, full_stops: float, slips: float) -> str:
    """Return the answer as the unpolished model gives it.

    Args:
        rng: Decides which answers are spoilt.
        answer: The right answer.
        full_stops: Share of answers that end in a full stop, which the environments' verifiers refuse.
        slips: Share of answers that are plausibly wrong.
    """
    kind = rng.random()
    if kind < full_stops:
        return answer + "."
    return slip(rng, answer) if kind < full_stops + slips else answer


def slip(rng: random.Random, answer: str) -> str:
    """Return a plausible wrong answer: one character off, or two swapped, one lost, one doubled."""
    while True:
        place = rng.randrange(len(answer))
        before, character, after = answer[:place], answer[place], answer[place + 1 :]
        kind = rng.random()
        if kind < 0.8:
            wrong = before + _neighbour(rng, character) + after
        elif kind < 0.9 and after:
            wrong = before + after[0] + character + after[1:]
        elif kind < 0.95 and len(answer) > 1:
            wrong = before + after
        else:
            wrong = before + character + character + after
        if wrong != answer:
            return wrong


def _neighbour(rng: random.Random, character: str) -> str:
    if character.isdigit():
        return str((int(character) + rng.choice((-1, 1))) % 10)
    return rng.choice(string.ascii_lowercase)
