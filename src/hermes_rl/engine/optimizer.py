"""AdamW on one flat vector (Kingma and Ba 2015; Loshchilov and Hutter 2019), as ``torch.optim.AdamW``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LEAST_EPS = 1e-37
"""Smaller ones are 0 beside float32 moments, and 0 / 0 where a gradient has been 0 throughout is NaN."""

LARGEST = 1e15
"""Above it, a learning rate or weight decay leaves the range of float32."""


@dataclass(frozen=True)
class AdamSettings:
    """One step's hyperparameters; ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, LARGEST),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("eps", LEAST_EPS, math.inf),
            ("weight_decay", 0.0, LARGEST),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value and (value < high or high == math.inf)):
                raise ValueError(f"adam_params.{name} must be in [{low}, {high}), got {value}")
        if not math.isfinite(self.grad_clip_norm):
            raise ValueError(f"adam_params.grad_clip_norm must be finite, got {self.grad_clip_norm}")


class Adam:
    """First and second moments of one flat parameter vector."""

    def __init__(self, parameters: torch.Tensor) -> None:
        self.parameters = parameters
        self.first = torch.zeros_like(parameters)
        self.second = torch.zeros_like(parameters)
        self.steps = 0

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, settings: AdamSettings) -> float:
        """Move the parameters along ``gradient`` (overwritten). Returns the norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite, and nothing was changed; or the weights no longer
                are after the step.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise FloatingPointError("the gradient is not finite")
        if 0 < settings.grad_clip_norm < norm:
            gradient.mul_(settings.grad_clip_norm / (norm + 1e-6))
        self.steps += 1
        self.first.lerp_(gradient, 1 - settings.beta1)
        self.second.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
        if settings.weight_decay:
            self.parameters.mul_(1 - settings.learning_rate * settings.weight_decay)
        correction = math.sqrt(1 - settings.beta2**self.steps)
        denominator = torch.sqrt(self.second, out=gradient).div_(correction).add_(settings.eps)
        self.parameters.addcdiv_(
            self.first, denominator, value=-settings.learning_rate / (1 - settings.beta1**self.steps)
        )
        if not torch.isfinite(self.parameters).all():
            raise FloatingPointError(
                "the weights are not finite after this step; load an earlier checkpoint, and go on with a "
                "smaller learning rate or a larger eps"
            )
        return norm

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors to save."""
        return {
            "first": self.first.cpu().clone(),
            "second": self.second.cpu().clone(),
            "steps": torch.tensor([self.steps]),
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` gave.

        Raises:
            ValueError: the tensors are missing or of another size.
        """
        if set(state) != {"first", "second", "steps"} or state["first"].shape != self.first.shape:
            raise ValueError("the optimizer state does not fit this adapter")
        self.first.copy_(state["first"])
        self.second.copy_(state["second"])
        self.steps = int(state["steps"][0])
