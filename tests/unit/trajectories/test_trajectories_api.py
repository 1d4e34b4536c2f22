"""The API server's own promises: waiting, once only, bounded, honest about what it refuses."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hermes_rl.trajectories.app import build_app
from hermes_rl.trajectories.queue import GroupQueue, QueuedGroup
from hermes_rl.trajectories.retries import Retries
from hermes_rl.trajectories.state import TrajectoryState

REGISTRATION = {
    "wandb_group": None,
    "wandb_project": None,
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 10,
}
GROUP: dict[str, Any] = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [0, 1]}


@pytest.fixture
def state() -> TrajectoryState:
    return TrajectoryState(max_sequences=64)


@pytest.fixture
async def http(state: TrajectoryState) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(state, capability="r-secret", max_body_bytes=100_000)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/r-secret") as client:
        yield client


async def _ready(http: httpx.AsyncClient, group_size: int = 2) -> None:
    await http.post("/register", json=REGISTRATION)
    await http.post("/publish", json={"weights_step": 0})
    wanted = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": group_size}
    assert (await http.post("/register-env", json=wanted)).json()["status"] == "success"


async def test_nothing_answers_without_the_capability(state: TrajectoryState) -> None:
    transport = httpx.ASGITransport(build_app(state, capability="r-secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in (
            "/",
            "/health",
            "/r-secreT/health",
            "/r-secre/health",
            "/r-secret2/health",
            "/openapi.json",
        ):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/r-secret/health")).json() == {"status": "ok"}


async def test_batch_waits_and_forms_one_batch_a_call(http: httpx.AsyncClient) -> None:
    await _ready(http)
    waiting = asyncio.create_task(http.get("/batch", params={"wait": 30}))
    for _ in range(6):
        await http.post("/scored_data", json={**GROUP, "env_id": 0})
    assert len((await waiting).json()["batch"]) == 2
    assert (await http.get("/status")).json() == {"current_step": 1, "queue_size": 4}
    assert len((await http.get("/batch", params={"wait": 0})).json()["batch"]) == 2
    assert (await http.get("/status")).json() == {"current_step": 2, "queue_size": 2}


async def test_a_batch_whose_answer_was_lost_is_sent_again(http: httpx.AsyncClient) -> None:
    await _ready(http)
    for number in range(4):
        await http.post("/scored_data", json={**GROUP, "env_id": 0, "scores": [number, 9]})
    first = (await http.get("/batch", params={"wait": 0, "after": 0})).json()
    again = (await http.get("/batch", params={"wait": 0, "after": 0})).json()
    assert first == again
    assert first["number"] == 1
    second = (await http.get("/batch", params={"wait": 0, "after": 1})).json()
    assert second["number"] == 2
    assert second["batch"] != first["batch"]


async def test_everything_a_group_carries_reaches_the_trainer(http: httpx.AsyncClient) -> None:
    await _ready(http)
    full = {
        **GROUP,
        "env_id": 0,
        "advantages": [[0.5, 0.5], [1.0]],
        "ref_logprobs": [[-1.0, -2.0], [-3.0]],
        "inference_logprobs": [[1.0, -0.25], [-0.1]],
        "messages": [[{"role": "user", "content": "é👋", "extra": [1, {"a": None}]}], []],
        "generation_params": {"temperature": 0.7},
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"sft": True},
        "images": ["data"],
        "distill_token_ids": [[[1], [2]], [[3]]],
        "distill_logprobs": [[[-1.0], [-2.0]], [[float("-inf")]]],
    }
    for _ in range(2):
        await http.post("/scored_data", content=json.dumps(full))
    batch = json.loads((await http.get("/batch")).content)["batch"]
    assert batch == [full, full]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 422, "Invalid JSON"),
        (b"[]", 422, "object"),
        (b"\xff\xfe", 422, "Invalid JSON"),
        (json.dumps({**GROUP, "scores": [0]}).encode(), 422, "one row a sequence"),
        (json.dumps({**GROUP, "scores": [0, float("nan")]}).encode(), 422, "finite"),
        (json.dumps({**GROUP, "masks": [[1], [3]]}).encode(), 422, "sequence 0 has 2 tokens but 1 mask"),
        (json.dumps({**GROUP, "tokens": [[-1, 2], [3]]}).encode(), 422, "greater than or equal to 0"),
        (json.dumps({"tokens": [], "masks": [], "scores": []}).encode(), 422, "at least one sequence"),
        (b'{"tokens": ' + b"[" * 5000, 422, ""),
        (json.dumps({**GROUP, "images": "x" * 200_000}).encode(), 413, "larger than"),
    ],
)
async def test_a_bad_group_is_refused_with_what_was_wrong(
    http: httpx.AsyncClient, state: TrajectoryState, body: bytes, status: int, says: str
) -> None:
    await _ready(http)
    answer = await http.post("/scored_data", content=body)
    assert answer.status_code == status
    assert says in answer.text
    assert state.queue.received == 0


async def test_gzip_is_read_and_a_bomb_is_not(http: httpx.AsyncClient) -> None:
    await _ready(http)
    headers = {"content-encoding": "gzip"}
    good = gzip.compress(json.dumps({**GROUP, "env_id": 0}).encode())
    assert (await http.post("/scored_data", content=good, headers=headers)).json() == {"status": "received"}
    for body, status in (
        (gzip.compress(b" " * 50_000_000), 413),
        (good[:-6], 400),
        (b"not gzip", 400),
        (gzip.compress(b"") * 1000 + good, 400),
    ):
        assert (await http.post("/scored_data", content=body, headers=headers)).status_code == status
    odd = await http.post("/scored_data", content=good, headers={"content-encoding": "br"})
    assert odd.status_code == 415


async def test_bodies_that_arrive_at_once_are_bounded_together(
    http: httpx.AsyncClient, state: TrajectoryState
) -> None:
    await _ready(http)
    everyone_has_begun = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 90_000
        await everyone_has_begun.wait()
        yield json.dumps(GROUP).encode()

    posts = [asyncio.create_task(http.post("/scored_data", content=slow())) for _ in range(6)]
    done, waiting = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
    while len(waiting) > 4:
        more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    assert [answer.result().status_code for answer in done] == [429, 429]
    everyone_has_begun.set()
    assert [(await answer).status_code for answer in waiting] == [200] * 4
    assert (await http.post("/scored_data", json=GROUP)).status_code == 200
    assert state.queue.received == 5


TRAINERS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/finish", {"reason": "enough"}),
    ("GET", "/reset_data", None),
    ("GET", "/batch", None),
    ("POST", "/publish", {"weights_step": 99, "evaluate": True}),
    ("GET", "/environment-log?after=99", None),
]


async def test_what_is_the_trainers_is_refused_to_an_environment(
    http: httpx.AsyncClient, state: TrajectoryState
) -> None:
    trainer = {"x-trainer-key": "k" * 32}
    assert (await http.post("/register", json=REGISTRATION, headers=trainer)).status_code == 200
    for _ in range(4):
        await http.post("/scored_data", json=GROUP)
    await http.post("/environment-log", json={"env_id": 0, "step": 0, "counts": {"groups": 1}})
    before = (await http.get("/state")).json()
    for key in (None, "k" * 31, "é"):
        headers = {} if key is None else {"x-trainer-key": key.encode()}
        for method, path, body in TRAINERS:
            answer = await http.request(method, path, json=body, headers=headers)
            assert (answer.status_code, "only the trainer" in answer.text) == (403, True), path
        assert (await http.post("/register", json=REGISTRATION, headers=headers)).status_code == 409
    assert (await http.get("/state")).json() == before
    assert len((await http.get("/environment-log", headers=trainer)).json()["records"]) == 1
    assert (await http.get("/batch", headers=trainer)).json()["batch"]
    assert (await http.post("/finish", json={}, headers=trainer)).status_code == 200
    assert state.finished


async def test_a_trainer_does_not_work_with_what_another_registered(http: httpx.AsyncClient) -> None:
    await http.post("/register", json={**REGISTRATION, "batch_size": 1})
    answer = await http.post("/register", json=REGISTRATION, headers={"x-trainer-key": "mine"})
    assert answer.status_code == 409
    assert "another trainer" in answer.text


async def test_a_run_is_not_over_because_someone_said_so_before_it_began(http: httpx.AsyncClient) -> None:
    await http.post("/finish", json={"reason": "never"})
    await http.post("/register", json=REGISTRATION, headers={"x-trainer-key": "mine"})
    assert not (await http.get("/state")).json()["finished"]


async def test_a_retried_post_counts_once_and_equal_groups_count_twice(
    http: httpx.AsyncClient, state: TrajectoryState
) -> None:
    await _ready(http)
    body = {**GROUP, "env_id": 0}
    for _ in range(3):
        answer = await http.post("/scored_data", json=body, headers={"idempotency-key": "one"})
        assert answer.json() == {"status": "received"}
    assert len(state.queue.queued) == 1
    assert state.queue.dropped == {"duplicate_of_a_retried_post": 2}
    await http.post("/scored_data", json=body)
    await http.post("/scored_data", json=body)
    assert len(state.queue.queued) == 3


async def test_posts_with_one_key_at_the_same_time_count_once(
    http: httpx.AsyncClient, state: TrajectoryState
) -> None:
    await _ready(http)
    posts = [
        http.post("/scored_data", json={**GROUP, "env_id": 0}, headers={"idempotency-key": "one"})
        for _ in range(8)
    ]
    assert [answer.json() for answer in await asyncio.gather(*posts)] == [{"status": "received"}] * 8
    assert len(state.queue.queued) == 1


def test_a_post_is_a_retry_only_if_the_answer_to_its_twin_was_never_read() -> None:
    now = 0.0
    retries = Retries(window_s=10, capacity=2, clock=lambda: now)

    def answered_and(*, unread: bool) -> None:
        retries.answered(("host", 1), b"a", b"yes")
        retries.connection_lost(("host", 1), unread=unread)

    assert retries.earlier_answer(None, b"a") is None
    answered_and(unread=False)
    assert retries.earlier_answer(None, b"a") is None
    answered_and(unread=True)
    assert retries.earlier_answer(None, b"b") is None
    assert retries.earlier_answer(None, b"a") == b"yes"
    assert retries.earlier_answer(None, b"a") is None
    answered_and(unread=True)
    now = 11.0
    assert retries.earlier_answer(None, b"a") is None


def test_the_books_balance_and_the_queue_is_bounded() -> None:
    queue = GroupQueue(max_sequences=20)
    for number in range(40):
        queue.accept(QueuedGroup(b"{}", 1 + number % 5, 0), expected_size=4)
    while queue.form_batch(8, {}):
        pass
    queue.pop_formed()
    counts = queue.counts()
    dropped = counts["dropped"]
    assert isinstance(dropped, dict)
    assert set(dropped) == {"queue_full", "larger_than_group_size"}
    held = sum(int(str(counts[name])) for name in ("delivered", "formed", "queued", "buffered"))
    assert counts["received"] == 40 == held + sum(dropped.values())
    assert 0 <= queue.sequences <= 20


async def test_evaluations_are_wanted_answered_and_read(http: httpx.AsyncClient) -> None:
    await _ready(http)
    await http.post("/publish", json={"weights_step": 0, "evaluate": True})
    assert (await http.get("/evaluation", params={"step": 0})).json() == {"evaluator": False}
    assert (await http.post("/evaluator", json={"env_id": 0})).status_code == 200
    assert (await http.post("/evaluator", json={"env_id": 7})).status_code == 404
    assert (await http.get("/evaluation", params={"step": 0})).json() == {"pending": True}
    assert (await http.get("/state")).json()["evaluations_wanted"] == [0]
    waiting = asyncio.create_task(http.get("/evaluation", params={"step": 0, "wait": 30}))
    record = {"env_id": 0, "step": 0, "metrics": {"eval/percent_correct": 0.5}, "seconds": 1.5, "error": None}
    await http.post("/evaluation", json=record)
    assert (await waiting).json() == record
    assert (await http.get("/state")).json()["evaluations_wanted"] == []


async def test_state_waits_for_a_change(http: httpx.AsyncClient) -> None:
    revision = (await http.get("/state")).json()["revision"]
    waiting = asyncio.create_task(http.get("/state", params={"revision": revision, "wait": 30}))
    await asyncio.sleep(0)
    await http.post("/finish", json={"reason": "done"})
    state = (await waiting).json()
    assert state["finished"]
    assert state["finish_reason"] == "done"
    assert state["revision"] != revision


async def test_the_log_is_drained_once(http: httpx.AsyncClient) -> None:
    for step in range(3):
        await http.post("/environment-log", json={"env_id": 0, "step": step, "counts": {"groups": 1}})
    first = (await http.get("/environment-log")).json()
    assert [record["step"] for record in first["records"]] == [0, 1, 2]
    assert (await http.get("/environment-log", params={"after": first["next"]})).json()["records"] == []


async def test_logs_and_evaluations_that_nobody_reads_are_bounded_in_bytes(
    http: httpx.AsyncClient, state: TrajectoryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_rl.trajectories.state._LOG_BYTES", 10_000)
    monkeypatch.setattr("hermes_rl.trajectories.state._EVALUATION_BYTES", 10_000)
    for step in range(50):
        metrics = {f"{number}-{'x' * 90}": 0.5 for number in range(10)}
        await http.post("/environment-log", json={"env_id": 0, "step": step, "metrics": metrics})
        await http.post("/evaluation", json={"env_id": 0, "step": step, "metrics": metrics})
    read = (await http.get("/environment-log")).json()
    assert [record["step"] for record in read["records"]] == list(range(50 - len(read["records"]), 50))
    assert 5 <= len(read["records"]) <= 10
    assert sum(map(len, state.log)) == state.log_bytes <= 10_000
    assert (await http.get("/state")).json()["log_records_dropped"] == 50 - len(read["records"])
    assert (await http.get("/environment-log", params={"after": read["next"]})).json()["records"] == []
    assert state.log_bytes == 0
    assert 49 in state.evaluations
    assert 5 <= len(state.evaluations) <= 10
    assert state.evaluation_bytes.keys() == state.evaluations.keys()


async def test_wandb_names_are_given_once_the_trainer_is_there(http: httpx.AsyncClient) -> None:
    assert (await http.get("/wandb_info")).json() == {"group": None, "project": None}
    await http.post("/register", json=REGISTRATION)
    assert None not in (await http.get("/wandb_info")).json().values()


async def test_unknown_environments_and_odd_queries_are_4xx(http: httpx.AsyncClient) -> None:
    await _ready(http)
    assert (await http.request("GET", "/status-env", json={"env_id": 99})).status_code == 404
    assert (await http.post("/disconnect-env", json={"env_id": 99})).json()["status"] == "failure"
    for path in (
        "/batch?wait=nan",
        "/batch?wait=-1",
        "/state?revision=x",
        "/evaluation",
        "/environment-log?after=-1",
    ):
        assert (await http.get(path)).status_code == 422
