"""What environments are told about the queue equals what atroposlib's own server tells them."""

import random
from typing import Any

import httpx
import pytest
from atroposlib.api.server import app as atropos

from hermes_rl.trajectories.app import build_app
from hermes_rl.trajectories.state import TrajectoryState

REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 16,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 5,
    "starting_step": 3,
    "num_steps": 10,
}


def _client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def _group(size: int, env_id: int, number: int) -> dict[str, Any]:
    return {
        "tokens": [[number, 1]] * size,
        "masks": [[-100, 1]] * size,
        "scores": [float(i % 2) for i in range(size)],
        "env_id": env_id,
    }


@pytest.mark.parametrize("seed", range(6))
async def test_both_servers_answer_alike(seed: int) -> None:
    choose = random.Random(seed)
    shares = [None, None, None] if seed % 2 else [0.25, None, 0.5]
    async with _client(atropos) as theirs, _client(build_app(TrajectoryState(), capability=None)) as ours:

        async def both(method: str, path: str, body: Any = None) -> Any:
            answers = [await one.request(method, path, json=body) for one in (theirs, ours)]
            assert [answer.status_code for answer in answers] == [200, 200]
            return [answer.json() for answer in answers]

        await theirs.get("/reset_data")
        if hasattr(atropos.state, "latest"):
            del atropos.state.latest  # their reset leaves it
        await both("POST", "/register", REGISTRATION)
        for answers in (await both("GET", "/info"), await both("GET", "/wandb_info")):
            assert answers[0] == answers[1]
        wanted = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4}
        before = await both("POST", "/register-env", wanted)
        assert before[0] == before[1] == {"status": "wait for trainer to start"}
        await both("GET", "/batch")
        for number, share in enumerate(shares):
            env = {**wanted, "weight": 1.0 + number, "min_batch_allocation": share, "group_size": 2**number}
            answers = await both("POST", "/register-env", env)
            assert answers[0] == answers[1]
        their_batches: list[Any] = []
        our_batches: list[Any] = []
        for step in range(120):
            match choose.randrange(8):
                case 0:
                    a, b = await both("GET", "/batch")
                    their_batches.append(a["batch"])
                    our_batches.append(b["batch"])
                case 1 | 2:
                    answers = await both("GET", "/status-env", {"env_id": choose.randrange(3)})
                    assert answers[0] == answers[1]
                case 3:
                    groups = [_group(choose.choice([1, 2]), 1, step) for _ in range(choose.randrange(3))]
                    answers = await both("POST", "/scored_data_list", groups)
                    assert answers[0] == answers[1]
                case _:
                    env_id = choose.randrange(3)
                    size = choose.choice([s for s in (1, 2, 4) if s <= 2**env_id])
                    answers = await both("POST", "/scored_data", _group(size, env_id, step))
                    assert answers[0] == answers[1]
            answers = await both("GET", "/status")
            assert answers[0] == answers[1]
            assert (await both("GET", "/latest_example"))[0].get("env_id") == (
                await ours.get("/latest_example")
            ).json().get("env_id")
        # Drain: several batches formed at once come newest first from theirs, oldest first from ours.
        for _ in range(20):
            a, b = await both("GET", "/batch")
            their_batches.append(a["batch"])
            our_batches.append(b["batch"])
        key = repr
        assert sorted(their_batches, key=key) == sorted(our_batches, key=key)
        assert sum(batch is not None for batch in our_batches) >= 2
        await theirs.get("/reset_data")
