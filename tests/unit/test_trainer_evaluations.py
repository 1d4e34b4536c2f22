"""The trainer's waiting for evaluations, against a real API server in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from hermes_rl.config import build_run_config
from hermes_rl.errors import EnvironmentFailedError
from hermes_rl.trainer.evaluations import Evaluations
from hermes_rl.trainer.ledger import SamplingLedger
from hermes_rl.trainer.sampling import Sampler
from hermes_rl.trainer.tracking import Tracker
from hermes_rl.trajectories.app import build_app
from hermes_rl.trajectories.client import TrajectoriesClient
from hermes_rl.trajectories.state import TrajectoryState

ENVIRONMENT = SimpleNamespace(name="x", file_path="/none", class_name="None")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = build_app(TrajectoryState(max_sequences=64), capability="r-secret")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/r-secret"
    server.should_exit = server.force_exit = True
    await serving


@pytest.fixture
async def api(url: str) -> AsyncIterator[TrajectoriesClient]:
    async with TrajectoriesClient(url) as client:
        yield client


@pytest.fixture
async def evaluations(api: TrajectoriesClient, tmp_path: Path) -> AsyncIterator[Evaluations]:
    config = build_run_config(ENVIRONMENT, overrides={"steps_per_eval": 2, "wandb_project": None})
    await api.register(
        wandb_group="g",
        wandb_project="p",
        batch_size=4,
        max_token_len=64,
        checkpoint_dir=str(tmp_path),
        save_checkpoint_interval=2,
        starting_step=0,
        num_steps=config.env.total_steps,
        max_batches_offpolicy=1,
    )
    sampler = Sampler(0, ["<eos>"], SamplingLedger())
    weights: Any = object()
    sampler.use(0, weights)
    made = Evaluations(api, sampler, Tracker(tmp_path, config), config)
    yield made
    await made.cancel()


async def _evaluator(url: str, api: TrajectoriesClient) -> int:
    wanted = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/register-env", json=wanted)
    await api.evaluator(answer.json()["env_id"])
    return int(answer.json()["env_id"])


async def test_a_checkpoint_waits_for_the_evaluations_before_it(
    url: str, api: TrajectoriesClient, evaluations: Evaluations
) -> None:
    await evaluations.publish(0)
    env_id = await _evaluator(url, api)
    await evaluations.publish(2)
    waiting = asyncio.create_task(evaluations.wait_for_earlier(2))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    assert evaluations.is_waiting_for_earlier(2)
    await api.post_evaluation(env_id, 0, {"eval/percent_correct": 0.5}, seconds=1.0, error=None)
    assert await asyncio.wait_for(waiting, 30)


async def test_nobody_who_evaluates_is_waited_for(api: TrajectoriesClient, evaluations: Evaluations) -> None:
    await evaluations.publish(0)
    await evaluations.publish(2)
    assert await asyncio.wait_for(evaluations.wait_for_earlier(2), 30)


async def test_without_the_environment_that_evaluates_no_checkpoint_is_made(
    url: str, api: TrajectoriesClient, evaluations: Evaluations
) -> None:
    await evaluations.publish(0)
    env_id = await _evaluator(url, api)
    await evaluations.publish(2)
    await api.disconnect_env(env_id)
    assert not await asyncio.wait_for(evaluations.wait_for_earlier(2), 30)


async def test_a_failed_evaluation_is_no_recorded_one(
    url: str, api: TrajectoriesClient, evaluations: Evaluations
) -> None:
    await evaluations.publish(0)
    env_id = await _evaluator(url, api)
    await evaluations.publish(2)
    await api.post_evaluation(env_id, 0, {}, seconds=1.0, error="no memory left")
    with pytest.raises(EnvironmentFailedError, match="no memory left"):
        await asyncio.wait_for(evaluations.wait_for_earlier(2), 30)
    assert evaluations.is_waiting_for_earlier(2)


@pytest.mark.parametrize("waits", ["for the end", "for a checkpoint"])
async def test_an_environment_stuck_in_an_evaluation_is_not_waited_for_for_ever(
    url: str,
    api: TrajectoriesClient,
    evaluations: Evaluations,
    monkeypatch: pytest.MonkeyPatch,
    waits: str,
) -> None:
    monkeypatch.setattr("hermes_rl.trainer.evaluations._DELIVERY_SECONDS", 0.1)
    monkeypatch.setattr("hermes_rl.trainer.evaluations._EVALUATOR_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(evaluations, "_limit", 0.2)
    await evaluations.publish(0)
    await _evaluator(url, api)
    waiting = evaluations.wait_for_all() if waits == "for the end" else evaluations.wait_for_earlier(2)
    with pytest.raises(EnvironmentFailedError, match=r"evaluation at step 0 was not answered within 0\.2 s"):
        await asyncio.wait_for(waiting, 30)
