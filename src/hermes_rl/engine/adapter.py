"""A LoRA adapter: its parameters, its gradients and PEFT's file format.

LoRA (Hu et al. 2021, arXiv:2106.09685): each linear layer ``y = x W^T`` becomes
``y = x W^T + (alpha / rank) (x A^T) B^T`` with ``A [rank, in]`` and ``B [out, rank]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hermes_rl.engine.architecture import Architecture, LinearGroup

HEAD_LAYER = -1
"""Layer number under which the unembedding's matrices are kept."""

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter adapts.

    Attributes:
        rank: width of the low-rank product.
        alpha: numerator of the scaling ``alpha / rank``.
        train_attn, train_mlp, train_unembed: which linear layers carry an adapter.
    """

    rank: int
    alpha: float
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def covers(self, group: str) -> bool:
        if group in ("qkv", "o"):
            return self.train_attn
        return self.train_unembed if group == "head" else self.train_mlp


@dataclass
class Matrices:
    """The adapter of one linear group.

    Attributes:
        a: ``[parts * rank, in]``, the parts' A matrices stacked.
        b: one ``[out, rank]`` a part.
    """

    a: torch.Tensor
    b: list[torch.Tensor]


class Adapter:
    """Parameters of one adapter as views of one flat float32 vector.

    The flat vector is what the optimizer, the gradient and snapshots work on; the views are what the
    forward pass reads.
    """

    def __init__(self, architecture: Architecture, spec: AdapterSpec, flat: torch.Tensor) -> None:
        self.architecture = architecture
        self.spec = spec
        self.flat = flat
        self.matrices = _views(architecture, spec, flat)

    @classmethod
    def create(
        cls, architecture: Architecture, spec: AdapterSpec, seed: int, device: torch.device
    ) -> Adapter:
        """A new adapter: A uniform in ±1/sqrt(in) (Kaiming, as PEFT does), B zero."""
        flat = torch.zeros(parameter_count(architecture, spec), dtype=torch.float32)
        adapter = cls(architecture, spec, flat)
        generator = torch.Generator().manual_seed(seed)
        for matrices in adapter.matrices.values():
            bound = 1.0 / math.sqrt(matrices.a.shape[1])
            matrices.a.uniform_(-bound, bound, generator=generator)
        return cls(architecture, spec, flat.to(device))

    def snapshot(self) -> Adapter:
        """A copy that later steps do not touch."""
        return Adapter(self.architecture, self.spec, self.flat.clone())

    def views(self, flat: torch.Tensor) -> dict[tuple[int, str], Matrices]:
        """Another vector of the same length (a gradient, a moment) seen as this adapter's matrices."""
        return _views(self.architecture, self.spec, flat)

    def peft_state(self) -> dict[str, torch.Tensor]:
        """Tensors under PEFT's names, on the CPU."""
        state = {}
        for (layer, group), matrices in self.matrices.items():
            rank = self.spec.rank
            for index, path in enumerate(_part_paths(self.architecture, layer, group)):
                prefix = f"{_PEFT_PREFIX}{path}"
                state[f"{prefix}.lora_A.weight"] = matrices.a[index * rank : (index + 1) * rank]
                state[f"{prefix}.lora_B.weight"] = matrices.b[index]
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}

    def load_peft_state(self, state: dict[str, torch.Tensor]) -> None:
        """Overwrite the parameters with tensors under PEFT's names.

        Raises:
            ValueError: a tensor is missing, unknown, or has another shape.
        """
        remaining = dict(state)
        for (layer, group), matrices in self.matrices.items():
            rank = self.spec.rank
            for index, path in enumerate(_part_paths(self.architecture, layer, group)):
                prefix = f"{_PEFT_PREFIX}{path}"
                for kind, target in (
                    ("A", matrices.a[index * rank : (index + 1) * rank]),
                    ("B", matrices.b[index]),
                ):
                    name = f"{prefix}.lora_{kind}.weight"
                    tensor = remaining.pop(name, None)
                    if tensor is None:
                        raise ValueError(f"the adapter lacks {name}")
                    if tensor.shape != target.shape:
                        raise ValueError(
                            f"{name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
                        )
                    target.copy_(tensor)
        if remaining:
            raise ValueError(f"the adapter holds unknown tensors: {sorted(remaining)[:3]}")

    def peft_config(self, base_model: str) -> dict[str, object]:
        """The content of ``adapter_config.json``."""
        targets = [
            path.rsplit(".", 1)[-1]
            for group in (*self.architecture.layer_groups, self.architecture.head_group)
            if self.spec.covers(group.name)
            for path, _ in group.parts
        ]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.spec.rank,
            "lora_alpha": self.spec.alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }


def spec_from_peft_config(folder: Path) -> AdapterSpec:
    """What the adapter saved in ``folder`` adapts.

    Raises:
        OSError, ValueError, KeyError: no readable LoRA configuration there.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    targets = set(config["target_modules"])
    return AdapterSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        train_attn="q_proj" in targets,
        train_mlp="gate_proj" in targets,
        train_unembed="lm_head" in targets,
    )


def adapted_groups(architecture: Architecture, spec: AdapterSpec) -> Iterator[tuple[int, LinearGroup]]:
    """Every (layer, linear group) that carries an adapter; the unembedding is layer ``HEAD_LAYER``."""
    for layer in range(architecture.num_layers):
        for group in architecture.layer_groups:
            if spec.covers(group.name):
                yield layer, group
    if spec.covers("head"):
        yield HEAD_LAYER, architecture.head_group


def parameter_count(architecture: Architecture, spec: AdapterSpec) -> int:
    """Number of trained parameters."""
    return sum(
        spec.rank * (len(group.parts) * group.in_features + group.out_features)
        for _, group in adapted_groups(architecture, spec)
    )


def _views(
    architecture: Architecture, spec: AdapterSpec, flat: torch.Tensor
) -> dict[tuple[int, str], Matrices]:
    views: dict[tuple[int, str], Matrices] = {}
    offset = 0

    def take(rows: int, columns: int) -> torch.Tensor:
        nonlocal offset
        view = flat[offset : offset + rows * columns].view(rows, columns)
        offset += rows * columns
        return view

    for layer, group in adapted_groups(architecture, spec):
        a = take(len(group.parts) * spec.rank, group.in_features)
        views[layer, group.name] = Matrices(a, [take(width, spec.rank) for _, width in group.parts])
    return views


def _part_paths(architecture: Architecture, layer: int, group: str) -> list[str]:
    if layer == HEAD_LAYER:
        return ["lm_head"]
    parts = next(found.parts for found in architecture.layer_groups if found.name == group)
    return [f"model.layers.{layer}.{path}" for path, _ in parts]
