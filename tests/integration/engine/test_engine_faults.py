"""Nonsense is answered with 4xx, and the engine goes on serving."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb
from training_data import cross_entropy_data

POSTS = [
    "client/config", "create_session", "session_heartbeat", "create_model", "get_info", "unload_model",
    "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights",
    "create_sampling_session", "join_sampling_session", "asample", "retrieve_future", "cancel_future",
    "weights_info", "forward_backward",
]  # fmt: skip


@pytest.fixture
def training(engine, service):
    return service.create_lora_training_client(engine.model, rank=4, seed=1).result()


def serves(training) -> None:
    assert training.forward(cross_entropy_data(), "cross_entropy").result().metrics["loss:sum"] > 0


def message(training, **changes) -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest(model_id=training.model_id, seq_id=0, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, dtype=np.int32).tobytes()
    for name, dtype, code in (
        ("target_tokens", np.int64, pb.DTYPE_INT64),
        ("weights", np.float32, pb.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = code, np.ones(5, dtype).tobytes()
        tensor.shape.append(5)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def post(engine, made: pb.ForwardBackwardRequest | bytes, **headers: str):
    body = made if isinstance(made, bytes) else made.SerializeToString()
    headers = {"content-type": "application/x-protobuf", **headers}
    return engine.request("POST", "/api/v1/forward_backward", content=body, headers=headers)


def test_random_and_truncated_bodies(engine, training):
    rng = random.Random(0)
    whole = message(training).SerializeToString()
    for path in POSTS:
        for body in (b"\xff\xfe", b"[]", b"null", b'{"a":', rng.randbytes(200), b'{"session_id": 3}'):
            answer = engine.request("POST", f"/api/v1/{path}", content=body)
            assert answer.status_code < 500, (path, body, answer.text)
    for _ in range(200):
        body = bytearray(whole[: rng.randrange(len(whole))])
        for _ in range(rng.randrange(4)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        assert post(engine, bytes(body)).status_code < 500
    serves(training)


def test_json_of_the_wrong_shape(engine, training, service):
    sampler = training.save_weights_and_get_sampling_client().result()
    good = {
        "sampling_session_id": sampler._sampling_session_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 2},
        "num_samples": 1,
    }
    assert engine.request("POST", "/api/v1/asample", json=good).status_code == 200
    strange = [
        None,
        -1,
        0,
        2**70,
        1.5,
        "x",
        [],
        {},
        [None],
        [["x"]],
        True,
        {"chunks": [{"tokens": [10**12]}]},
    ]
    for name in good:
        for value in strange:
            body = json.dumps(good | {name: value})
            assert engine.request("POST", "/api/v1/asample", content=body).status_code < 500, (name, value)
    for name in ("max_tokens", "temperature", "top_k", "top_p", "stop", "seed"):
        for value in [*strange, float("nan"), float("inf"), -float("inf")]:
            body = json.dumps(good | {"sampling_params": {"max_tokens": 2, name: value}})
            assert engine.request("POST", "/api/v1/asample", content=body).status_code < 500, (name, value)
    serves(training)


def test_refused_requests_of_a_model_do_not_hold_those_after_them(engine, training):
    """Whatever is wrong with a request, the next one of its model is answered."""
    strange = [None, -1, 2**70, 10**400, 1.5, "x", "a/b", [], {}, True]
    bodies: list[tuple[str, dict]] = [
        ("optim_step", {"adam_params": {name: value}})
        for name in ("learning_rate", "beta1", "eps", "grad_clip_norm", "other")
        for value in strange
    ]
    for route, names in (
        ("save_weights", ("path", "overwrite", "ttl_seconds", "user_metadata")),
        ("save_weights_for_sampler", ("path", "sampling_session_seq_id", "kind")),
        ("load_weights", ("path", "optimizer")),
    ):
        bodies += [(route, {name: value}) for name in names for value in strange]
    seq, promised = 1, []
    for route, body in bodies:
        content = json.dumps({"model_id": training.model_id, "seq_id": seq, **body})
        answer = engine.request("POST", f"/api/v1/{route}", content=content)
        assert answer.status_code < 500, (route, body, answer.text)
        if answer.status_code == 200:
            promised.append(answer.json()["request_id"])
        seq += 1
    assert len(promised) < len(bodies) / 2
    for request_id in promised:
        answer = engine.request("POST", "/api/v1/retrieve_future", json={"request_id": request_id})
        assert answer.status_code == 200, request_id
        assert answer.json().get("category") != "server", answer.text


@pytest.mark.parametrize("seed", [2**70, -(2**70), 1.5, "x"])
def test_seeds_that_are_none(engine, service, training, seed):
    body = {
        "session_id": service.holder.get_session_id(),
        "base_model": engine.model,
        "model_seq_id": 77,
        "lora_config": {"rank": 4, "seed": seed},
    }
    answer = engine.request("POST", "/api/v1/create_model", content=json.dumps(body))
    assert answer.status_code == 400
    assert "seed" in answer.json()["detail"]


def test_numbers_that_are_none(engine, training):
    for name, dtype, value in (
        ("weights", np.float32, np.nan),
        ("weights", np.float32, np.inf),
        ("target_tokens", np.int64, -5),
        ("target_tokens", np.int64, 10**9),
    ):
        made = message(training)
        made.data[0].loss_fn_inputs[name].dense = np.full(5, value, dtype).tobytes()
        answer = post(engine, made)
        assert answer.status_code == 400
        assert name in answer.json()["detail"]
    serves(training)


def test_shapes_that_do_not_fit(engine, training):
    def changed(change) -> pb.ForwardBackwardRequest:
        made = message(training)
        change(made.data[0])
        return made

    def shape(*sizes: int):
        def change(datum: pb.Datum) -> None:
            tensor = datum.loss_fn_inputs["target_tokens"]
            del tensor.shape[:]
            tensor.shape.extend(sizes)

        return change

    def sparse(datum: pb.Datum) -> None:
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.sparse_csr.values = np.ones(2, np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 9], np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array([5, 7], np.int64).tobytes()

    changes = [
        shape(4),
        shape(-5),
        shape(2**62),
        shape(5, 2**40),
        sparse,
        lambda datum: datum.loss_fn_inputs["weights"].dense.__class__ and datum.ClearField("model_input"),
        lambda datum: datum.model_input.add().image.__setattr__("data", b"x"),
        lambda datum: datum.model_input[0].encoded_text.__setattr__("tokens", b"abc"),
        lambda datum: datum.loss_fn_inputs["weights"].__setattr__("dtype", pb.DTYPE_UNSPECIFIED),
        lambda datum: datum.loss_fn_inputs.pop("target_tokens"),
    ]
    for number, change in enumerate(changes):
        answer = post(engine, changed(change))
        assert answer.status_code == 400, number
        assert "data[0]" in answer.json()["detail"], number
    serves(training)


def test_absurd_lengths_and_ids(engine, training):
    too_long = message(training)
    too_long.data[0].model_input[0].encoded_text.tokens = np.zeros(10_000, np.int32).tobytes()
    assert post(engine, too_long).status_code == 400
    assert post(engine, message(training, seq_id=2**31 - 1)).status_code == 400
    assert post(engine, message(training, seq_id=-5)).status_code < 500
    assert post(engine, message(training, model_id="x" * 100_000)).status_code == 404
    assert post(engine, message(training, loss_fn="x" * 100_000)).status_code == 400


def test_compressed_bodies(engine, training):
    body = zstandard.ZstdCompressor().compress(message(training).SerializeToString())
    assert post(engine, body, **{"content-encoding": "zstd"}).status_code == 200
    assert post(engine, body[:-3], **{"content-encoding": "zstd"}).status_code == 400
    assert post(engine, b"junk", **{"content-encoding": "zstd"}).status_code == 400
    assert post(engine, body, **{"content-encoding": "br"}).status_code == 415
    bomb = zstandard.ZstdCompressor().compress(bytes(300 * 2**20))
    assert post(engine, bomb, **{"content-encoding": "zstd"}).status_code == 413
    serves(training)


def test_unknown_paths_and_methods(engine):
    for method, path in (
        ("GET", "/"),
        ("GET", "/api/v1/nothing"),
        ("DELETE", "/api/v1/asample"),
        ("GET", "/api/v1/training_runs/..%2f..%2fetc/checkpoints"),
        ("DELETE", "/api/v1/training_runs/a/checkpoints/weights/..%2f..%2fx"),
        ("GET", "/api/v1/files/a/b/c/d"),
        ("GET", "/api/v1/files/a/b/c/d?signature=%C3%A9"),
        ("GET", "/api/v1/files/a/b/c/d?expires=%C2%B2&signature=x"),
        ("GET", "/api/v1/files/a/b/c/%ED%A0%80?expires=1&signature=%ED%A0%80"),
        ("GET", "/api/v1/training_runs/a/checkpoints/weights/.partial-1/external_weights_urls"),
        ("GET", "/api/v1/training_runs/a/checkpoints/weights/%00/external_weights_urls"),
        ("GET", "/api/v1/training_runs?limit=x"),
    ):
        assert 400 <= engine.request(method, path).status_code < 500


def test_cancelled_samples_leave_the_batch(engine, training):
    sampler = training.save_weights_and_get_sampling_client().result()
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 500, "stop": []},
        "num_samples": 64,
    }
    request_id = engine.request("POST", "/api/v1/asample", json=body).json()["request_id"]
    engine.request("POST", "/api/v1/cancel_future", json={"request_id": request_id})
    answer = engine.request("POST", "/api/v1/retrieve_future", json={"request_id": request_id})
    assert answer.json() == {"error": "cancelled", "category": "user"}
