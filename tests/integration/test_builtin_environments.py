"""The built-in environments against the real embedded model, over real HTTP, as Atropos drives them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded_server import MODEL, EmbeddedServer

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "tinker-atropos" / "tinker_atropos" / "environments"
WORD_PROBLEMS = ROOT / "tests" / "data" / "word_problems.jsonl"

CLASSES = {
    "arithmetic_tinker": "ArithmeticTinkerEnv",
    "reasoning_gym_tinker": "ReasoningGymTinkerEnv",
    "gsm8k_tinker": "Gsm8kTinkerEnv",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    running = EmbeddedServer()
    yield running
    running.close()


@pytest.fixture
def build(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds an environment on the embedded model, with settings of its own."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))

    def build_one(name: str, server_type: str = "sglang", evaluated: int = 24, **settings: Any) -> Any:
        if name == "gsm8k_tinker":
            settings = {"data_path": str(WORD_PROBLEMS), "system_prompt": "", **settings}
        cls = getattr(importlib.import_module(name), CLASSES[name])
        config, (service,) = cls.config_init()
        config = type(config)(
            **{
                **config.model_dump(),
                "tokenizer_name": str(MODEL),
                "use_wandb": False,
                "group_size": 8,
                "max_token_length": 12,
                **settings,
            }
        )
        service = service.model_copy(
            update={
                "base_url": server.url,
                "model_name": str(MODEL),
                "server_type": server_type,
                "num_requests_for_eval": evaluated,
            }
        )
        return cls(config, [service])

    yield build_one
    for name in (*CLASSES, "single_turn"):
        sys.modules.pop(name, None)


@pytest.fixture(params=sorted(CLASSES))
async def environment(request: pytest.FixtureRequest, build: Any) -> Any:
    built = build(request.param)
    await built.setup()
    return built


async def logged(environment: Any) -> dict[str, Any]:
    """What the environment hands to Atropos's own ``wandb_log``."""
    metrics: dict[str, Any] = {}
    await environment.wandb_log(metrics)
    return metrics


async def test_a_group_holds_the_sampled_tokens_and_their_logprobs(
    environment: Any, server: EmbeddedServer
) -> None:
    item = await environment.get_next_item()
    before = server.asked["/generate"]
    group, backlog = await environment.collect_trajectories(item)
    assert server.asked["/generate"] == before + 1, "a group is one request"
    assert backlog == []
    assert len(group["tokens"]) == len(group["scores"]) == 8
    for tokens, masks, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert len(tokens) == len(masks) == len(logprobs)
        sampled = [place for place, mask in enumerate(masks) if mask != -100]
        assert sampled == list(range(sampled[0], len(tokens))), "prompt first, then the answer"
        assert [tokens[place] for place in sampled] == [masks[place] for place in sampled]
        assert all(logprobs[place] <= 0 for place in sampled)
        assert tokens[sampled[0] - 1] == ord("\n"), "the answer begins after the generation prompt"


async def test_the_text_only_protocol_gives_the_same_layout(build: Any) -> None:
    environment = build("arithmetic_tinker", server_type="openai")
    await environment.setup()
    group, _ = await environment.collect_trajectories(await environment.get_next_item())
    assert "inference_logprobs" not in group
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        trained = [mask for mask in masks if mask != -100]
        assert tokens[-len(trained) :] == trained


async def test_evaluation_reports_its_share_and_its_count(environment: Any, server: EmbeddedServer) -> None:
    before = server.rollouts
    await environment.evaluate()
    assert environment.evaluation["eval/count"] == server.rollouts - before == len(environment.evaluated)
    assert 0.0 <= environment.evaluation["eval/percent_correct"] <= 1.0


async def test_metrics_are_logged_once_and_then_forgotten(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "log", lambda metrics, step=None: seen.append(dict(metrics)))
    environment.config.use_wandb = True
    await environment.collect_trajectories(await environment.get_next_item())
    await environment.evaluate()
    await environment.wandb_log({})
    await environment.wandb_log({})
    assert {"train/percent_correct", "eval/percent_correct", "eval/count"} <= seen[0].keys()
    assert not {"train/percent_correct", "eval/percent_correct", "eval/count"} & seen[1].keys()


async def test_a_resumed_run_goes_on_with_the_next_item(environment: Any, tmp_path: Path) -> None:
    environment.checkpoint_dir = str(tmp_path)
    environment.wandb_prepend = "run"
    for _ in range(3):
        await environment.get_next_item()
    environment.save_checkpoint(5)
    expected = await environment.get_next_item()
    environment.position = 0
    environment.curr_step = 5
    environment.load_checkpoint()
    assert await environment.get_next_item() == expected


async def test_the_embedded_model_is_partly_right_on_the_default_environment(build: Any) -> None:
    environment = build("arithmetic_tinker", evaluated=128)
    await environment.setup()
    await environment.evaluate()
    assert 0.20 <= environment.evaluation["eval/percent_correct"] <= 0.65


async def test_the_environment_shown_in_the_docs_works(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    (tmp_path / "parity_from_the_docs.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    cls = importlib.import_module("parity_from_the_docs").ParityEnv
    config, (service,) = cls.config_init()
    config = config.model_copy(update={"tokenizer_name": str(MODEL), "use_wandb": False})
    service = service.model_copy(update={"base_url": server.url, "api_key": "x", "model_name": str(MODEL)})
    environment = cls(config, [service])
    await environment.setup()
    group, _ = await environment.collect_trajectories(await environment.get_next_item())
    assert len(group["tokens"]) == len(group["scores"]) == config.group_size
    await environment.evaluate()
    assert 0.0 <= environment.evaluation <= 1.0
    await environment.wandb_log({})
