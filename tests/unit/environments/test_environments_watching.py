"""What the runner makes of what an environment does: pinned requests, captured metrics, counted groups."""

import asyncio
from pathlib import Path

import pytest

from hermes_rl.environments.group_counts import check_group, count_group
from hermes_rl.environments.light_import import needs_tokenizers_only
from hermes_rl.environments.metric_capture import CapturedRun, MetricCapture, numeric
from hermes_rl.environments.pinning import evaluated_step, pinned
from hermes_rl.environments.redaction import redact, secrets_in_environment

ROOT = "http://127.0.0.1:1/r-abc"


async def test_requests_of_an_evaluation_go_to_its_weights() -> None:
    async def ask() -> str:
        return pinned(f"{ROOT}/v1/chat/completions", ROOT)

    async def evaluate(step: int) -> list[str]:
        evaluated_step.set(step)
        thread = await asyncio.to_thread(pinned, f"{ROOT}/generate", ROOT)
        return [*await asyncio.gather(ask(), asyncio.create_task(ask())), thread]

    assert await asyncio.create_task(evaluate(7)) == [f"{ROOT}/step/7/v1/chat/completions"] * 2 + [
        f"{ROOT}/step/7/generate"
    ]
    assert await ask() == f"{ROOT}/v1/chat/completions"


async def test_only_the_inference_endpoint_is_pinned_and_only_once() -> None:
    evaluated_step.set(3)
    for url in ("http://judge.example/v1", f"{ROOT}x/v1", f"{ROOT}/step/2/v1", ROOT):
        assert pinned(url, ROOT) == url


async def test_what_an_evaluation_logs_is_kept_apart_from_training() -> None:
    training: list[dict[str, float]] = []
    capture = MetricCapture(training.append)
    capture.prefix = "env_0_"
    run = CapturedRun(capture)
    run.log({"env_0_train/percent_correct": 0.5, "note": "text", "table": object()}, step=1)
    with capture.evaluation() as found:

        async def evaluate() -> None:
            evaluated_step.set(0)
            run.log({"env_0_eval/percent_correct": 0.25, "env_0_score": 1, "env_0_train/loss": 2.0})

        await asyncio.create_task(evaluate())
        run.log({"env_0_eval/late": True, "env_0_other": 3})
    run.log({"env_0_eval/percent_correct": 0.75})
    assert found == {"eval/percent_correct": 0.25, "score": 1.0, "eval/late": 1.0}
    assert training == [
        {"train/percent_correct": 0.5},
        {"train/loss": 2.0},
        {"other": 3.0},
        {"eval/percent_correct": 0.75},
    ]


def test_only_finite_numbers_are_metrics() -> None:
    import numpy

    logged = {
        "a": numpy.float32(0.5),
        "b": numpy.array(2),
        "c": float("nan"),
        "d": {"e": 1, "f": {"g": True}},
        "h": [1, 2],
        "i": numpy.ones(3),
    }
    assert numeric(logged) == {"a": 0.5, "b": 2.0, "d.e": 1.0, "d.f.g": 1.0}


@pytest.mark.parametrize(
    ("scores", "kind"),
    [([0, 1], "groups_mixed"), ([1, 1], "groups_all_right"), ([-1, -1], "groups_all_wrong")],
)
def test_groups_are_counted_by_what_they_teach(scores: list[float], kind: str) -> None:
    group = {"tokens": [[1, 2], [1, 2, 3]], "masks": [[-100, 2], [-100, 2, 3]], "scores": scores}
    assert check_group(group, 2) is None
    counts = count_group(group, max_token_len=3)
    kinds = ("groups_mixed", "groups_all_right", "groups_all_wrong")
    assert {name: counts[name] for name in kinds} == {name: float(name == kind) for name in kinds}
    assert counts["rollouts"] == 2
    assert counts["score_sum"] == sum(scores)
    assert counts["trained_tokens"] == 3
    assert counts["groups_too_long"] == 1


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ("text", "must be a dict"),
        ({"tokens": [[1]], "scores": [1]}, "'masks'"),
        ({"tokens": [[1]], "masks": [[1]], "scores": [1]}, "1 sequences where 2"),
        ({"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [1]}, "1 scores"),
    ],
)
def test_a_malformed_group_is_named(group: object, problem: str) -> None:
    assert problem in str(check_group(group, 2))
    override = {"tokens": [[1]], "masks": [[1]], "scores": [1], "group_overrides": {"group_size": 1}}
    assert check_group(override, 2) is None


def test_secrets_never_reach_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_URL", "http://127.0.0.1:5/r-0123456789/v1")
    monkeypatch.setenv("A_KEY", "key-0123456789")
    secrets = secrets_in_environment(["A_URL", "A_KEY", "MISSING"])
    text = redact("GET http://127.0.0.1:5/r-0123456789/v1 with key-0123456789", secrets)
    assert text == "GET http://127.0.0.1:5/<secret>/v1 with <secret>"


@pytest.mark.parametrize(
    ("text", "light"),
    [
        ("from atroposlib.envs.base import BaseEnv\nimport datasets", True),
        ("from transformers import AutoTokenizer", True),
        ("from transformers import AutoModel", False),
        ("import torch", False),
        ("def setup():\n    import sentence_transformers", False),
        ("from neighbour import x", False),
        ("from .harmless import x", True),
        ("from atroposlib.envs.reward_fns import registry", False),
        ("def broken(:", False),
    ],
)
def test_torch_is_left_out_only_where_nothing_needs_it(tmp_path: Path, text: str, light: bool) -> None:
    (tmp_path / "neighbour.py").write_text("import torch")
    (tmp_path / "harmless.py").write_text("import math")
    (tmp_path / "env.py").write_text(text)
    assert needs_tokenizers_only(tmp_path / "env.py") is light
