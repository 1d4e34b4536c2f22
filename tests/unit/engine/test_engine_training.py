"""Logprobs, losses and gradients are those of transformers, PEFT and plain autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_reference import adapter_gradient, logprobs, peft_model

from hermes_rl.engine import linears, scoring, training
from hermes_rl.engine.base_model import load_base_model
from hermes_rl.engine.losses import make_loss
from hermes_rl.engine.training import TrainingSequence, run_pass

CPU = torch.device("cpu")


def sequences(
    loss: str, *, seed: int = 0, count: int = 6, width: int | None = None
) -> list[TrainingSequence]:
    """Two groups that share a prompt each, of uneven completions, and a single one."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, 20), rng.integers(0, 300, 13), rng.integers(0, 300, 5)]
    made = []
    for number in range(count):
        prompt = prompts[number * len(prompts) // count]
        tokens = np.concatenate([prompt, rng.integers(0, 300, int(rng.integers(3, 14)))])
        length = len(tokens) - 1
        shape = (length,) if width is None else (length, width)
        taught = (np.arange(length) >= len(prompt) - 1).astype(np.float32)
        taught = np.broadcast_to(taught if width is None else taught[:, None], shape)
        if loss == "cross_entropy":
            inputs = {"weights": (rng.random(shape) * taught).astype(np.float32)}
        else:
            inputs = {
                "logprobs": rng.normal(-5.6, 0.4, shape).astype(np.float32),
                "advantages": (rng.normal(size=shape) * taught).astype(np.float32),
            }
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = taught.astype(np.float32)
        targets = tokens[1:] if width is None else rng.integers(0, 300, shape)
        made.append(
            TrainingSequence(
                tokens[:-1].copy(),
                np.repeat(np.arange(length), width or 1),
                targets.reshape(-1).astype(np.int64),
                {name: value.reshape(-1) for name, value in inputs.items()},
                shape,
            )
        )
    return made


def plain_loss(name: str, config: dict, p: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tinker's definitions, written down once more."""
    if name == "cross_entropy":
        return -(p * inputs["weights"]).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = (p - q).exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if name == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        return -(ratio.clamp(low, high).detach() * p * advantages).sum()
    if name == "dro":
        return -(p * advantages - 0.5 * config.get("beta", 0.05) * (p - q) ** 2).sum()
    low, high = config.get("clip_low_threshold", 1 - 3e-4), config.get("clip_high_threshold", 1 + 4e-4)
    marked = inputs["sequence_ratio_mask"] != 0
    ratio = (p.detach() - q)[marked].mean().exp() * (p - p.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


CASES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
    ("dro", {"beta": 0.2}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
]


@pytest.mark.parametrize(
    ("merged", "dense"),
    [(True, True), (True, False), (False, False)],
    ids=["merged", "merged, thin gradients", "low-rank"],
)
@pytest.mark.parametrize(("name", "config"), CASES)
def test_loss_and_gradient_are_right(base, make_adapter, tmp_path, monkeypatch, merged, dense, name, config):
    monkeypatch.setattr(linears, "can_merge", lambda *_: merged)
    monkeypatch.setattr(linears, "dense_gradients_are_cheaper", lambda *_: dense)
    adapter = make_adapter(3, train_unembed=True)
    check_against_reference(base, adapter, tmp_path, name, config, sequences(name))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families_train_right(model_folders, make_adapter, tmp_path, family):
    model = load_base_model(str(model_folders[family]), CPU, torch.float32)
    adapter = make_adapter(5, model=model, train_unembed=True)
    check_against_reference(model, adapter, tmp_path, "importance_sampling", {}, sequences("is"))


@pytest.mark.parametrize(
    "targets",
    [
        {"train_attn": False},
        {"train_mlp": False},
        {"train_attn": False, "train_mlp": False, "train_unembed": True},
    ],
    ids=["mlp", "attention", "unembedding"],
)
def test_partial_adapters_train_right(base, make_adapter, tmp_path, targets):
    adapter = make_adapter(5, **targets)
    check_against_reference(base, adapter, tmp_path, "cross_entropy", {}, sequences("cross_entropy"))


def test_several_targets_a_position(base, make_adapter, tmp_path):
    wide = sequences("cross_entropy", width=3)
    check_against_reference(base, make_adapter(5), tmp_path, "cross_entropy", {}, wide)


def test_micro_batches_and_blocks_of_logits_change_nothing(base, make_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "MICRO_BATCH_ROWS", (40, 40))
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 300 * 4 * 7)
    for name in ("ppo", "gspo"):
        check_against_reference(base, make_adapter(5), tmp_path, name, {}, sequences(name, count=9))


def test_same_input_gives_the_same_bits(base, make_adapter):
    adapter, items, loss = make_adapter(1), sequences("ppo"), make_loss("ppo", {})
    gradients = [torch.zeros_like(adapter.flat) for _ in range(2)]
    losses = [
        list(run_pass(base, adapter, items, loss, lambda into=into: into))[-1].loss for into in gradients
    ]
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)


def test_gradients_add_up(base, make_adapter):
    adapter, loss = make_adapter(1), make_loss("cross_entropy", {})
    first, second = sequences("cross_entropy", seed=1), sequences("cross_entropy", seed=2)
    apart, together = torch.zeros_like(adapter.flat), torch.zeros_like(adapter.flat)
    list(run_pass(base, adapter, first, loss, lambda: apart))
    list(run_pass(base, adapter, second, loss, lambda: apart))
    list(run_pass(base, adapter, first + second, loss, lambda: together))
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)


def test_bfloat16_weights_teach_nearly_the_same(base, base_bfloat16, make_adapter):
    """Adapters and their gradients are float32 either way; the tolerance is what rounded weights change."""
    adapter, items, loss = make_adapter(1), sequences("ppo"), make_loss("ppo", {})
    gradients, logprobs = [], []
    for model in (base, base_bfloat16):
        gradient = torch.zeros_like(adapter.flat)
        outcome = list(run_pass(model, adapter, items, loss, lambda into=gradient: into))[-1]
        gradients.append(gradient)
        logprobs.append(np.concatenate(outcome.logprobs))
    assert gradients[1].dtype == torch.float32
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=0.1)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.05


def check_against_reference(base, adapter, tmp_path, name, config, items) -> None:
    gradient = torch.zeros_like(adapter.flat)
    outcome = list(run_pass(base, adapter, items, make_loss(name, config), lambda: gradient))[-1]
    model = peft_model(base, adapter, tmp_path / "adapter")
    total = torch.zeros((), dtype=torch.float64)
    for item, found in zip(items, outcome.logprobs, strict=True):
        expected = logprobs(
            model, torch.from_numpy(item.tokens), torch.from_numpy(item.targets.reshape(item.shape))
        )
        np.testing.assert_allclose(found, expected.detach().numpy().reshape(-1), atol=1e-4)
        inputs = {key: torch.from_numpy(value).double() for key, value in item.inputs.items()}
        total = total + plain_loss(name, config, expected.reshape(-1), inputs)
    total.backward()
    expected_gradient = adapter_gradient(model, adapter)
    assert outcome.loss == pytest.approx(float(total.detach()), abs=1e-4, rel=1e-4)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 1e-4
