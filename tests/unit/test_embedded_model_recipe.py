"""The script that makes the embedded model: repeatable, and honest about what it trains on."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("embedded_text", "embedded_tokenizer", "make_embedded")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(MODELS))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(MODELS))
        for name in NAMES:
            sys.modules.pop(name, None)


def make(script: Any) -> dict[str, torch.Tensor]:
    """Two steps of every phase with small batches."""
    recipe = script.Recipe(facts_rows=2, chats=8)
    model, text = script.build_model(recipe.seed), script.Text(recipe)
    script.train(model, iter([[text.facts()], [text.facts()]]), 2, 1e-3, "facts")
    for polished in (True, False):
        batches = iter([text.chats(polished=polished) for _ in range(2)])
        script.train(model, batches, 2, 1e-3, "chats")
    return model.state_dict()


def test_the_same_seed_makes_the_same_weights(modules: dict[str, ModuleType]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, second = make(modules["make_embedded"]), make(modules["make_embedded"])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_text_holds_no_question_that_is_evaluated(modules: dict[str, ModuleType]) -> None:
    import random

    text = modules["embedded_text"]
    for item in islice(text.arithmetic_items(random.Random(1)), 2000):
        assert zlib.crc32(item.question.encode()) % 10 != 0
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    for item in islice(text.reasoning_gym_items("chain_sum", 1 << 29, **settings), 500):
        assert zlib.crc32(item.question.encode()) % 2 != 0
        assert item.question.endswith(item.core)


def test_bad_habits_come_in_the_share_that_is_documented(modules: dict[str, ModuleType]) -> None:
    import random

    rng = random.Random(0)
    given = [modules["embedded_text"].unpolished(rng, "46", full_stops=0.46, slips=0.04) for _ in range(4000)]
    assert given.count("46.") / 4000 == pytest.approx(0.46, abs=0.03)
    assert given.count("46") / 4000 == pytest.approx(0.50, abs=0.03)


def test_a_fact_has_the_positions_it_has_in_a_chat(modules: dict[str, ModuleType]) -> None:
    script = modules["make_embedded"]
    text = script.Text(script.Recipe(facts_rows=1))
    batch = text.facts()
    tokens, positions = batch["tokens"][0].tolist(), batch["positions"][0].tolist()
    question_ends = tokens.index(script.NEWLINE, 1)
    gap = positions[question_ends] - positions[question_ends - 1]
    assert gap == len(script.MIDDLE), "from the question's last byte to the newline before the answer"
