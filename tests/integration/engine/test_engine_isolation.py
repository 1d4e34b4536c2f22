"""Adapters trained side by side end as they do alone, and a killed engine loses only what was not saved."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tinker
from safetensors.torch import load_file
from tinker import types
from training_data import cross_entropy_data, policy_data, sample

ADAM = types.AdamParams(learning_rate=5e-3)
RANKS = (4, 8, 16, 32, 8, 4, 16, 8)


def train(engine, number: int, checkpoint: str, steps: int = 4) -> None:
    """A small GRPO run: sample, score, train."""
    service = engine.service()
    training = service.create_lora_training_client(engine.model, rank=RANKS[number], seed=number).result()
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        group = sample(sampler, 4, seed=100 * number + step)
        scores = np.array([float(np.mean(sequence.tokens)) for sequence in group.sequences])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        training.forward_backward(policy_data(group, advantages.tolist()), "importance_sampling")
        training.optim_step(ADAM).result()
    training.save_state(checkpoint).result()
    service.close("success").result()


def weights(folder, name: str) -> dict:
    (found,) = folder.glob(f"*/weights/{name}/adapter_model.safetensors")
    return load_file(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_adapters_at_once_end_as_alone(start_engine, tmp_path, dtype):
    engine = start_engine(tmp_path, "--dtype", dtype)
    for number in range(len(RANKS)):
        train(engine, number, f"alone-{number}")
    threads = [
        threading.Thread(target=train, args=(engine, number, f"together-{number}"))
        for number in range(len(RANKS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(RANKS)):
        alone, together = weights(tmp_path, f"alone-{number}"), weights(tmp_path, f"together-{number}")
        for key, value in alone.items():
            np.testing.assert_allclose(together[key].numpy(), value.numpy(), atol=1e-6)


def test_a_killed_engine_goes_on_from_its_last_checkpoint(start_engine, tmp_path):
    engine = start_engine(tmp_path)
    service = engine.service()
    training = service.create_lora_training_client(engine.model, rank=8, seed=1).result()
    data = cross_entropy_data(count=64)
    training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result()
    path = training.save_state("kept").result().path
    expected = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    for _ in range(5):
        training.forward_backward(data, "cross_entropy")
    training.save_state("lost")
    engine.kill()
    service.holder.close()

    # what a write cut short leaves behind
    partial = next(tmp_path.glob("*/weights")) / ".partial-0123"
    partial.mkdir()
    (partial / "adapter_model.safetensors").write_bytes(b"half")

    engine = start_engine(tmp_path)
    rest = tinker.RestClient(base_url=engine.base_url, api_key=engine.api_key)
    offered = [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
    assert path in offered
    assert not partial.exists()
    with engine_service(engine) as again:
        continued = again.create_training_client_from_state_with_optimizer(path).result()
        found = continued.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert found == pytest.approx(expected, rel=1e-6)
        continued.forward_backward(data, "cross_entropy")
        assert continued.optim_step(ADAM).result().metrics["step"] == 2


class engine_service:
    """A service client that is closed at the end."""

    def __init__(self, engine) -> None:
        self.client = engine.service()

    def __enter__(self) -> tinker.ServiceClient:
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close("success").result()


def test_sampling_goes_on_beside_training(engine, service):
    """Neither starves the other: samples come back while a long training request runs, and it ends."""
    training = service.create_lora_training_client(engine.model, rank=8, seed=1).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    long = training.forward_backward(cross_entropy_data(count=4000), "cross_entropy")
    done_first = 0
    while not long.future().done() and done_first < 3:
        sample(sampler, 2, max_tokens=2)
        done_first += 1
    assert done_first == 3
    assert long.result().metrics["loss:sum"] > 0
