"""Weights of the base model, shared by every adapter and never changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from hermes_rl.engine.architecture import Architecture, LinearGroup, read_architecture
from hermes_rl.errors import EngineError


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer. Linear groups are stacked ``[out, in]`` matrices (see LinearGroup)."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qk_norm: torch.Tensor | None
    linear: dict[str, torch.Tensor]
    bias: dict[str, torch.Tensor]


@dataclass(frozen=True)
class BaseModel:
    """A causal language model's weights on one device.

    Attributes:
        name: the name clients ask for: the hub name, or the absolute path of a local folder.
        folder: where the files lie.
        qk_norm of a layer: ``[num_heads + num_kv_heads, head_dim]``, the query weights then the key weights.
        embedding: ``[vocab, hidden]``; head: ``[vocab, hidden]``, the same tensor when tied.
    """

    name: str
    folder: Path
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor

    @property
    def linear_parameters(self) -> int:
        """Number of weights in the linear layers of all transformer layers."""
        return self.architecture.linear_parameters


def resolve_model(model: str) -> tuple[str, Path]:
    """The served name and the folder of a local path or hub name.

    Raises:
        EngineError: neither a folder with a model nor a hub name that can be fetched.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return str(local.resolve()), local.resolve()
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        )
    except Exception as error:
        raise EngineError(
            f"No model {model!r}: it is not a folder, and the hub did not give it ({error}).",
            hint="Give a local folder, or a hub name that is cached or reachable.",
        ) from error
    return model, Path(folder)


def load_base_model(model: str, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Load a base model for inference and adapter training.

    Weights are read straight from safetensors files; folders without any go through ``transformers``.

    Args:
        model: a local folder or a hub name.
        device: where the weights go.
        dtype: floating type of the weights.
    """
    name, folder = resolve_model(model)
    architecture = read_architecture(folder)
    state = _read_state(folder)

    def take(key: str) -> torch.Tensor:
        if key not in state:
            raise EngineError(f"The weights in {folder} lack {key!r}.")
        return state.pop(key).to(device=device, dtype=dtype)

    def stack(prefix: str, group: LinearGroup) -> torch.Tensor:
        matrices = [take(f"{prefix}.{part}.weight") for part, _ in group.parts]
        for (part, width), matrix in zip(group.parts, matrices, strict=True):
            if tuple(matrix.shape) != (width, group.in_features):
                raise EngineError(
                    f"{prefix}.{part}.weight has shape {list(matrix.shape)}.",
                    allowed=[width, group.in_features],
                )
        return torch.cat(matrices) if len(matrices) > 1 else matrices[0].contiguous()

    layers = []
    for index in range(architecture.num_layers):
        prefix = f"model.layers.{index}"
        linear, bias = {}, {}
        for group in architecture.layer_groups:
            linear[group.name] = stack(prefix, group)
            if f"{prefix}.{group.parts[0][0]}.bias" in state:
                bias[group.name] = torch.cat([take(f"{prefix}.{part}.bias") for part, _ in group.parts])
        qk_norm = None
        if architecture.qk_norm:
            query = take(f"{prefix}.self_attn.q_norm.weight").expand(architecture.num_heads, -1)
            key = take(f"{prefix}.self_attn.k_norm.weight").expand(architecture.num_kv_heads, -1)
            qk_norm = torch.cat([query, key]).contiguous()
        layers.append(
            LayerWeights(
                input_norm=take(f"{prefix}.input_layernorm.weight"),
                post_norm=take(f"{prefix}.post_attention_layernorm.weight"),
                qk_norm=qk_norm,
                linear=linear,
                bias=bias,
            )
        )
    embedding = take("model.embed_tokens.weight").contiguous()
    tied = architecture.tied_head or "lm_head.weight" not in state
    head = embedding if tied else take("lm_head.weight").contiguous()
    cosines, sines = architecture.rotary_tables(architecture.max_positions)
    return BaseModel(
        name=name,
        folder=folder,
        architecture=architecture,
        device=device,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=take("model.norm.weight"),
        head=head,
        cosines=cosines.to(device=device, dtype=dtype),
        sines=sines.to(device=device, dtype=dtype),
    )


def _read_state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if files:
        state: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                state.update(load_file(file))
            except Exception as error:
                raise EngineError(f"{file} cannot be read: {error}.") from error
        return state
    from transformers import AutoModelForCausalLM

    try:
        return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    except Exception as error:
        raise EngineError(f"transformers cannot load {folder}: {error}.") from error
