"""Whatever is sent, the API server answers 2xx or 4xx: never 5xx, never a hang."""

import asyncio
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl.trajectories.app import build_app
from hermes_rl.trajectories.state import TrajectoryState

POSTS = [
    "register", "register-env", "disconnect-env", "scored_data", "scored_data_list", "publish",
    "evaluator", "evaluation", "environment-log", "environment-failure", "finish",
]  # fmt: skip
GETS = [
    "info", "wandb_info", "batch", "latest_example", "status", "status-env", "health", "state",
    "evaluation", "environment-log",
]  # fmt: skip
FIELDS = [
    "wandb_group", "wandb_project", "batch_size", "max_token_len", "checkpoint_dir",
    "save_checkpoint_interval", "starting_step", "num_steps", "max_token_length", "desired_name",
    "weight", "group_size", "min_batch_allocation", "env_id", "tokens", "masks", "scores", "advantages",
    "messages", "group_overrides", "overrides", "weights_step", "evaluate", "step", "metrics", "seconds",
    "error", "counts", "where", "count", "reason",
]  # fmt: skip
GOOD: dict[str, Any] = {
    "wandb_group": "g", "wandb_project": None, "batch_size": 4, "max_token_len": 8, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 3, "max_token_length": 8,
    "desired_name": "e", "weight": 0.0, "group_size": 2, "env_id": 0, "tokens": [[1], [2]],
    "masks": [[1], [-100]], "scores": [0, 1], "weights_step": 0, "evaluate": True, "step": 0,
    "metrics": {"a": 1}, "where": "here", "error": "none",
}  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "x" * 30_000, "1e999"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)
bodies = st.one_of(
    changes.map(lambda change: json.dumps({**GOOD, **change}).encode()),
    changes.map(lambda change: json.dumps([{**GOOD, **change}, GOOD]).encode()),
    st.binary(max_size=40),
)
queries = st.dictionaries(
    st.sampled_from(["wait", "after", "revision", "step"]),
    st.one_of(
        st.sampled_from(["0", "0.0", "-1", "nan", "inf", "1e400", "", "x", "9" * 50]), st.text(max_size=5)
    ),
    max_size=3,
)
requests = st.one_of(
    st.tuples(st.just("POST"), st.sampled_from(POSTS), st.just({}), bodies),
    st.tuples(st.just("GET"), st.sampled_from(GETS), queries, st.one_of(st.just(b""), bodies)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(requests, min_size=1, max_size=25))
def test_no_request_breaks_the_server(asked: list[tuple[str, str, dict[str, str], bytes]]) -> None:
    async def play() -> None:
        state = TrajectoryState(max_sequences=8)
        transport = httpx.ASGITransport(build_app(state, capability=None))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            for method, path, query, body in asked:
                query.pop("revision", None) if query.get("wait") not in (None, "0", "0.0") else None
                if query.get("wait") not in (None, "0", "0.0", "-1", "nan", "x", ""):
                    query["wait"] = "0"
                headers = {"content-encoding": "gzip"} if body[:1] == b"\x1f" else {}
                answer = await asyncio.wait_for(
                    http.request(method, f"/{path}", params=query, content=body, headers=headers), 60
                )
                assert answer.status_code < 500, (method, path, query, body, answer.text)
                answer.json()
                counts = (await http.get("/state")).json()["groups"]
                held = sum(counts[name] for name in ("delivered", "formed", "queued", "buffered"))
                assert counts["received"] == held + sum(counts["dropped"].values())

    asyncio.run(play())
