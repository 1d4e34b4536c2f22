"""Tinker's losses, token by token.

Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses. Every loss is a sum over tokens; with
``p`` the trained policy's logprob of the target token and ``q`` the logprob it was sampled with:

- ``cross_entropy``: ``-p * weight``
- ``importance_sampling``: ``-exp(p - q) * advantage``
- ``ppo`` (Schulman et al. 2017): ``-min(r * advantage, clip(r, low, high) * advantage)``, ``r = exp(p - q)``
- ``cispo`` (MiniMax-M1, arXiv:2506.13585): ``-stop_gradient(clip(r, low, high)) * p * advantage``
- ``dro`` (Richemond et al. 2024): ``-(p * advantage - beta / 2 * (p - q)^2)``
- ``gspo`` (Zheng et al. 2025, arXiv:2507.18071, the token-level variant): ``ppo`` with a ratio whose value is
  the sequence's, ``exp(mean of p - q over the tokens that sequence_ratio_mask marks)``, and whose gradient is
  the token's own, that of ``p``
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_CLIP_DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}
"""``gspo``: the paper's (section 5.1)."""

_CLIP = ("clip_low_threshold", "clip_high_threshold")
_DRO_BETA = 0.05

RATIO_MASK = "sequence_ratio_mask"
"""Input of ``gspo``: not zero at the tokens whose ratios make the sequence's."""

SEQUENCE_LOG_RATIO = "sequence_log_ratio"
"""Computed before the loss of ``gspo``: each token's sequence's mean of ``p - q``."""

LOSSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("weights",), ()),
    "importance_sampling": (("logprobs", "advantages"), ()),
    "ppo": (("logprobs", "advantages"), _CLIP),
    "cispo": (("logprobs", "advantages"), _CLIP),
    "dro": (("logprobs", "advantages"), ("beta",)),
    "gspo": (("logprobs", "advantages", RATIO_MASK), _CLIP),
}
"""For every loss, the ``loss_fn_inputs`` it needs beside ``target_tokens`` and the configuration it takes."""

TOKEN_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Configuration of ``ppo`` and ``cispo`` that a datum may also give token by token."""


@dataclass(frozen=True)
class Loss:
    """A loss with its configuration."""

    name: str
    config: Mapping[str, float]

    @property
    def inputs(self) -> tuple[str, ...]:
        return LOSSES[self.name][0]

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence: ``inputs`` then needs its log ratio."""
        return self.name == "gspo"

    def threshold(self, name: str) -> float:
        """A clip threshold where a datum gives none of its own."""
        return self.config.get(name, _CLIP_DEFAULTS[self.name][_CLIP.index(name)])

    def teaches(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Which tokens can have a gradient: ``[tokens]`` bool."""
        if self.name == "cross_entropy":
            return inputs["weights"] != 0
        if self.name == "dro":
            return torch.ones_like(inputs["advantages"], dtype=torch.bool)
        return inputs["advantages"] != 0

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each token, ``[tokens]``."""
        if self.name == "cross_entropy":
            return -logprobs * inputs["weights"]
        sampled, advantages = inputs["logprobs"], inputs["advantages"]
        if self.name == "dro":
            beta = self.config.get("beta", _DRO_BETA)
            return -(logprobs * advantages - 0.5 * beta * (logprobs - sampled).square())
        if self.name == "gspo":
            ratio = torch.exp(inputs[SEQUENCE_LOG_RATIO] + logprobs - logprobs.detach())
        else:
            ratio = torch.exp(logprobs - sampled)
        if self.name == "importance_sampling":
            return -ratio * advantages
        # of one kind both: token by token if a datum gives one of them, see wire.read_training
        low, high = (inputs.get(name, self.threshold(name)) for name in _CLIP)
        clipped = torch.clamp(ratio, low, high)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if self.name == "cispo":
            return -clipped.detach() * logprobs * advantages
        return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_log_ratios(
    logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> torch.Tensor:
    """``SEQUENCE_LOG_RATIO`` of every token of sequences of these ``lengths``, ``[tokens]``."""
    means = [
        (ratios * marked).sum() / marked.sum()
        for ratios, marked in zip(
            (logprobs - inputs["logprobs"]).split(list(lengths)),
            (inputs[RATIO_MASK] != 0).split(list(lengths)),
            strict=True,
        )
    ]
    repeats = torch.tensor(lengths, device=logprobs.device)
    return torch.stack(means).repeat_interleave(repeats)


def make_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """A loss by Tinker's name.

    Raises:
        ValueError: unknown loss, unknown configuration key or a value that is not a finite number.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn {name!r} is not supported; supported: {', '.join(LOSSES)}")
    allowed = LOSSES[name][1]
    numbers: dict[str, float] = {}
    for key, value in config.items():
        if key not in allowed:
            raise ValueError(
                f"loss_fn_config key {key!r} is not known to {name}; allowed: {', '.join(allowed) or 'none'}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config {key!r} must be a finite number, got {value!r}")
        numbers[key] = float(value)
    return Loss(name, numbers)
