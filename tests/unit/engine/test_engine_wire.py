"""Requests that ask for too much, or give some data more than others, are read as they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb

from hermes_rl.engine import wire
from hermes_rl.engine.losses import make_loss
from hermes_rl.engine.training import run_pass
from hermes_rl.engine.wire import RequestError, read_sample, read_training

LENGTH = 5
VOCAB, CONTEXT = 300, 512
DTYPES = {np.dtype(np.int64): pb.DTYPE_INT64, np.dtype(np.float32): pb.DTYPE_FLOAT32}


def put(tensor: pb.Tensor, value: np.ndarray) -> None:
    tensor.dtype, tensor.dense = DTYPES[value.dtype], value.tobytes()
    tensor.shape.extend(value.shape)


def put_sparse(tensor: pb.Tensor, rows: int, columns: int) -> None:
    """A sparse tensor of integers in which nothing is listed."""
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([rows, columns])
    tensor.sparse_csr.crow_indices = np.zeros(rows + 1, np.int64).tobytes()


def request(loss: str, *data: dict[str, np.ndarray], config: dict[str, float] | None = None):
    made = pb.ForwardBackwardRequest(model_id="m", loss_fn=loss)
    for name, value in (config or {}).items():
        made.loss_fn_config[name] = value
    for number, inputs in enumerate(data):
        datum = made.data.add()
        tokens = np.arange(10 * number, 10 * number + LENGTH, dtype=np.int32)
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, value in inputs.items():
            put(datum.loss_fn_inputs[name], value)
    return made


@pytest.mark.parametrize(("rows", "columns"), [(LENGTH, 13_000_000), (LENGTH, VOCAB + 1), (LENGTH + 1, 2)])
def test_a_sparse_tensor_is_no_larger_than_its_datum_allows(monkeypatch, rows, columns):
    monkeypatch.setattr(wire, "_dense", lambda *_, **__: pytest.fail("made dense"))
    made = request("cross_entropy", {})
    put_sparse(made.data[0].loss_fn_inputs["target_tokens"], rows, columns)
    with pytest.raises(
        RequestError, match=rf"data\[0\].target_tokens.*expected \[{LENGTH}, K\] with K up to"
    ):
        read_training(made, VOCAB, CONTEXT)
    made = request("cross_entropy", {"target_tokens": np.zeros((LENGTH, 2), np.int64)})
    put_sparse(made.data[0].loss_fn_inputs["weights"], rows, max(3, columns))
    with pytest.raises(RequestError, match=r"data\[0\].weights.*K up to 2"):
        read_training(made, VOCAB, CONTEXT)


def test_all_data_together_have_a_limit(monkeypatch):
    monkeypatch.setattr(wire, "MAX_TARGETS", 4 * LENGTH)
    wide = {"target_tokens": np.zeros((LENGTH, 2), np.int64)}
    sequences, _ = read_training(request("cross_entropy", wide, wide), VOCAB, CONTEXT)
    assert [len(each.targets) for each in sequences] == [2 * LENGTH] * 2
    with pytest.raises(RequestError, match=r"data\[2\].target_tokens: a request holds at most 20 targets"):
        read_training(request("cross_entropy", wide, wide, wide), VOCAB, CONTEXT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"topk_sample_logprobs": 300, "num_samples": 512}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 301}, "prompt_alt_tokens_k"),
        (
            {
                "target_prompt_logprobs": {
                    "dtype": "int64",
                    "shape": [2, 2**22],
                    "data": [],
                    "sparse_crow_indices": [0, 0, 0],
                }
            },
            "target_prompt_logprobs",
        ),
    ],
)
def test_samples_that_would_return_too_much_are_refused(changes, named):
    body = {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {}}
    assert read_sample(body | {"topk_sample_logprobs": 20}, VOCAB, CONTEXT).sample_top_k == 20
    with pytest.raises(RequestError, match=named):
        read_sample(body | changes, VOCAB, CONTEXT)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("given", [("low",), ("high",), ("low", "high")])
@pytest.mark.parametrize("where", [0, 1])
def test_thresholds_of_some_tokens_are_heeded_and_the_others_have_the_default(
    base, make_adapter, loss, given, where
):
    """Whichever datum gives them, and whichever it gives."""
    rng = np.random.default_rng(0)
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
    data = [
        {
            "target_tokens": rng.integers(0, VOCAB, LENGTH),
            "logprobs": rng.normal(-5.7, 0.5, LENGTH).astype(np.float32),
            "advantages": rng.normal(size=LENGTH).astype(np.float32),
        }
        for _ in range(2)
    ]
    own = {f"clip_{name}_threshold": rng.uniform(0.5, 1.5, LENGTH).astype(np.float32) for name in given}
    data[where] |= own
    adapter = make_adapter(1)
    gradient = torch.zeros_like(adapter.flat)
    sequences, made = read_training(request(loss, *data, config=config), VOCAB, CONTEXT)
    outcome = list(run_pass(base, adapter, sequences, made, lambda: gradient))[-1]
    expected = 0.0
    for number, (inputs, logprobs) in enumerate(zip(data, outcome.logprobs, strict=True)):
        low, high = (own.get(name, value) if number == where else value for name, value in config.items())
        p, q, advantages = logprobs, inputs["logprobs"], inputs["advantages"]
        ratio = np.exp(p - q)
        clipped = np.minimum(np.maximum(ratio, low), high)
        if loss == "cispo":
            expected -= float((clipped * p * advantages).sum())
        else:
            expected -= float(np.minimum(ratio * advantages, clipped * advantages).sum())
    assert outcome.loss == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_thresholds_are_those_of_the_loss_without_a_configuration():
    loss = make_loss("ppo", {"clip_high_threshold": 1.1})
    assert [loss.threshold(name) for name in wire.TOKEN_THRESHOLDS] == [0.8, 1.1]


def test_numbers_that_no_float_holds_are_refused():
    with pytest.raises(RequestError, match="learning_rate"):
        wire.field({"learning_rate": 10**400}, "learning_rate", float)
