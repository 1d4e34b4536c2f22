"""What the built-in environments ask, hold out and accept, without a model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / "tinker-atropos" / "tinker_atropos" / "environments"
MODEL = str(ROOT / "models" / "embedded")
WORD_PROBLEMS = ROOT / "tests" / "data" / "word_problems.jsonl"
NAMES = ("single_turn", "arithmetic_tinker", "reasoning_gym_tinker", "gsm8k_tinker")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The environments' modules, found as ``python FILE`` finds them."""
    sys.path.insert(0, str(ENVIRONMENTS))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(ENVIRONMENTS))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture
def build(modules: dict[str, ModuleType]) -> Any:
    def build_one(name: str, class_name: str, evaluated: int = 64, **settings: Any) -> Any:
        cls = getattr(modules[name], class_name)
        config, (server,) = cls.config_init()
        values = {**config.model_dump(), "tokenizer_name": MODEL, "use_wandb": False, **settings}
        server = server.model_copy(update={"model_name": MODEL, "num_requests_for_eval": evaluated})
        return cls(type(config)(**values), [server])

    return build_one


@pytest.fixture
def arithmetic(build: Any) -> Any:
    return lambda **settings: build("arithmetic_tinker", "ArithmeticTinkerEnv", **settings)


@pytest.fixture
def reasoning_gym(build: Any) -> Any:
    return lambda **settings: build("reasoning_gym_tinker", "ReasoningGymTinkerEnv", **settings)


@pytest.fixture
def gsm8k(build: Any) -> Any:
    return lambda **settings: build("gsm8k_tinker", "Gsm8kTinkerEnv", **settings)


def rollout(modules: dict[str, ModuleType], text: str, finished: bool = True) -> Any:
    return modules["single_turn"].Rollout(text, finished, [], [], None)


async def ask(environment: Any, count: int) -> list[Any]:
    await environment.setup()
    return [await environment.get_next_item() for _ in range(count)]


async def test_arithmetic_never_trains_what_it_evaluates(arithmetic: Any) -> None:
    environment = arithmetic(evaluated=256)
    asked = {item.text for item in await ask(environment, 2000)}
    held_out = {item.text for item in environment.evaluated}
    assert len(held_out) == 256
    assert len(asked) > 1500, "enough different questions that none can be learnt by heart"
    assert not asked & held_out


async def test_evaluation_items_do_not_depend_on_the_training_seed(arithmetic: Any) -> None:
    first, second = arithmetic(seed=1), arithmetic(seed=2)
    assert await ask(first, 5) != await ask(second, 5)
    assert first.evaluated == second.evaluated


async def test_the_same_seed_asks_the_same_questions(arithmetic: Any, reasoning_gym: Any) -> None:
    for make in (arithmetic, reasoning_gym):
        assert await ask(make(seed=3), 20) == await ask(make(seed=3), 20)


@pytest.mark.parametrize(("operations", "digits"), [("+", 1), ("-", 1), ("+-", 3)])
async def test_arithmetic_asks_what_is_configured(arithmetic: Any, operations: str, digits: int) -> None:
    environment = arithmetic(operations=operations, digits=digits)
    for item in [*await ask(environment, 100), *environment.evaluated]:
        left, right = item.text.rstrip("=").replace("-", "+").split("+")
        assert max(len(left), len(right)) <= digits
        assert item.text[len(left)] in operations
        assert item.answer == (int(left) + int(right) if "+" in item.text else int(left) - int(right)) >= 0


def test_arithmetic_refuses_an_unknown_operation(arithmetic: Any) -> None:
    with pytest.raises(ValueError, match="operations"):
        arithmetic(operations="*")


@pytest.mark.parametrize(
    ("text", "finished", "score"),
    [
        ("46", True, 1.0),
        (" 46\n", True, 1.0),
        ("<think>12 plus 34</think>46", True, 1.0),
        ("46.", True, 0.0),
        ("47", True, 0.0),
        ("", True, 0.0),
        ("46", False, 0.0),
    ],
)
def test_arithmetic_accepts_only_the_number(
    modules: dict[str, ModuleType], text: str, finished: bool, score: float
) -> None:
    module = modules["arithmetic_tinker"]
    item = module.Question("12+34=", 46)
    assert module.ArithmeticTinkerEnv.score(rollout(modules, text, finished), item) == score


def test_every_offline_generator_yields_a_question_and_a_score(modules: dict[str, ModuleType]) -> None:
    module = modules["reasoning_gym_tinker"]
    needs_settings = {"composite": {"datasets": [{"name": "chain_sum"}]}}
    # Their first item takes seconds to make; they were tried by hand.
    slow = {"arc_agi", "knight_swap", "quantum_lock", "zebra_puzzles"}
    assert len(module.DATASETS) >= 100
    for name in sorted(set(module.DATASETS) - slow):
        config = module.ReasoningGymTinkerConfig(dataset=name, dataset_config=needs_settings.get(name))
        generator = module.create_generator(config, seed=0, size=2)
        entry = generator[0]
        assert isinstance(entry["question"], str), name
        answer = entry["answer"]
        if answer is not None:
            assert generator.score_answer(answer=answer, entry=entry) >= 0.99, name


async def test_reasoning_gym_never_trains_what_it_evaluates(reasoning_gym: Any) -> None:
    environment = reasoning_gym(dataset="spell_backward")
    asked = {item["question"] for item in await ask(environment, 300)}
    assert not asked & {item["question"] for item in environment.evaluated}


async def test_reasoning_gym_evaluates_different_questions_however_few_there_are(reasoning_gym: Any) -> None:
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = reasoning_gym(dataset="chain_sum", dataset_config=settings, evaluated=256)
    await ask(environment, 10)
    held_out = [item["question"] for item in environment.evaluated]
    assert len(held_out) == len(set(held_out)) < 256


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dataset": "chain_some"}, "no generator 'chain_some'"),
        ({"dataset": "chain_sum", "dataset_config": {"terms": 2}}, "dataset_config of chain_sum.*terms"),
        ({"dataset": "chain_sum", "dataset_config": {"min_terms": 9, "max_terms": 2}}, "dataset_config of"),
        ({"dataset": "composite"}, "dataset_config of composite"),
    ],
)
async def test_reasoning_gym_says_what_is_wrong_with_its_settings(
    reasoning_gym: Any, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        await reasoning_gym(**settings).setup()


async def test_reasoning_gym_takes_its_settings_as_json_text(reasoning_gym: Any) -> None:
    environment = reasoning_gym(dataset="gcd", dataset_config='{"max_value": 20}')
    assert environment.config.dataset_config == {"max_value": 20}
    await ask(environment, 1)


async def test_reasoning_gym_scores_with_the_generator(
    modules: dict[str, ModuleType], reasoning_gym: Any
) -> None:
    plain, tagged = reasoning_gym(), reasoning_gym(answer_format="tags")
    (item,) = await ask(plain, 1)
    await tagged.setup()
    right = item["answer"]
    assert plain.score(rollout(modules, right), item) == 1.0
    assert plain.score(rollout(modules, right, finished=False), item) == 0.0
    assert plain.score(rollout(modules, ""), item) == 0.0
    assert tagged.score(rollout(modules, f"so <answer>{right}</answer>"), item) == 1.0
    assert tagged.score(rollout(modules, right), item) == 0.0


async def test_a_verifier_that_raises_scores_zero(modules: dict[str, ModuleType], reasoning_gym: Any) -> None:
    environment = reasoning_gym(dataset="prime_factorization")
    (item,) = await ask(environment, 1)
    assert environment.score(rollout(modules, "nonsense"), item) == 0.0


async def test_gsm8k_reads_a_local_file_and_holds_a_part_out(gsm8k: Any) -> None:
    environment = gsm8k(data_path=str(WORD_PROBLEMS))
    count = len(WORD_PROBLEMS.read_text().splitlines())
    asked = await ask(environment, 3 * count)
    assert len(environment.train) + len(environment.evaluated) == count
    assert not set(asked) & set(environment.evaluated)
    size = len(environment.train)
    assert set(asked[:size]) == set(environment.train), "a pass asks every problem once"
    assert asked[:size] != asked[size : 2 * size], "and every pass has an order of its own"
    assert {item.answer for item in environment.train + environment.evaluated} >= {Decimal(1200), Decimal(-7)}


async def test_gsm8k_leaves_evaluation_problems_out_of_training(gsm8k: Any, tmp_path: Path) -> None:
    lines = WORD_PROBLEMS.read_text().splitlines()
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("\n".join(lines[:4]))
    environment = gsm8k(data_path=str(WORD_PROBLEMS), eval_data_path=str(held_out))
    await environment.setup()
    assert len(environment.evaluated) == 4
    assert len(environment.train) == len(lines) - 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1 is not JSON"),
        ('{"question": "How many?"}', "line 1: expected .* 'question' and 'answer'"),
        ("[1]", "line 1: expected"),
        ('{"question": "How many?", "answer": "#### none"}', "no number after '####'"),
    ],
)
async def test_gsm8k_names_the_line_that_is_wrong(
    gsm8k: Any, tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        await gsm8k(data_path=str(path)).setup()


async def test_gsm8k_refuses_a_file_with_nothing_to_evaluate(gsm8k: Any, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))
    with pytest.raises(ValueError, match="at least one of each"):
        await gsm8k(data_path=str(path)).setup()


async def test_gsm8k_without_the_hub_says_how_to_go_on(gsm8k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="set data_path"):
        await gsm8k(hub_dataset="hermes-rl-tests/never-published").setup()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("6*7 = 42, so the answer is \\boxed{42}. Check: 42/7 = 6.", "42"),
        ("first \\boxed{1}, then \\boxed{x = 2}", "2"),
        ("It costs $1,234.50.", "1234.5"),
        ("-7 degrees", "-7"),
        ("about .5", "0.5"),
        ("18.00", "18"),
        ("none", None),
        ("", None),
    ],
)
def test_gsm8k_reads_the_number_an_answer_ends_with(
    modules: dict[str, ModuleType], text: str, number: str | None
) -> None:
    expected = None if number is None else Decimal(number)
    assert modules["gsm8k_tinker"].read_number(text) == expected


def test_gsm8k_ignores_reasoning_and_unfinished_solutions(modules: dict[str, ModuleType]) -> None:
    module = modules["gsm8k_tinker"]
    item = module.Problem("6*7?", Decimal(42))
    score = module.Gsm8kTinkerEnv.score
    assert score(rollout(modules, "<think>40</think>\\boxed{42}"), item) == 1.0
    assert score(rollout(modules, "\\boxed{42}", finished=False), item) == 0.0
    assert score(rollout(modules, "<think>42</think>I cannot tell"), item) == 0.0
