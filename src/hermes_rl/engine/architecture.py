"""The shape of a base model, read from its ``config.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hermes_rl.errors import EngineError

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen2", "llama", "mistral")


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read the same input and so are multiplied as one matrix.

    Attributes:
        name: the group's name within its layer.
        in_features: width of the shared input.
        parts: module path within the layer and output width, in the order they are stacked.
    """

    name: str
    in_features: int
    parts: tuple[tuple[str, int], ...]

    @property
    def out_features(self) -> int:
        return sum(width for _, width in self.parts)


@dataclass(frozen=True)
class Architecture:
    """A Qwen3- or Llama-family causal language model.

    Attributes:
        qk_norm: whether queries and keys are normalised per head (Qwen3).
        rotary: the ``rope_parameters`` of the configuration: ``rope_theta``, ``rope_type`` and its numbers.
        eos_token_ids: tokens that end a completion when the caller names no stop tokens.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    qk_norm: bool
    tied_head: bool
    max_positions: int
    rotary: dict[str, Any] = field(hash=False)
    eos_token_ids: tuple[int, ...]

    @property
    def layer_groups(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """The four groups of linear layers in every transformer layer."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            LinearGroup(
                "qkv",
                self.hidden_size,
                (
                    ("self_attn.q_proj", query),
                    ("self_attn.k_proj", key_value),
                    ("self_attn.v_proj", key_value),
                ),
            ),
            LinearGroup("o", query, (("self_attn.o_proj", self.hidden_size),)),
            LinearGroup(
                "gate_up",
                self.hidden_size,
                (("mlp.gate_proj", self.intermediate_size), ("mlp.up_proj", self.intermediate_size)),
            ),
            LinearGroup("down", self.intermediate_size, (("mlp.down_proj", self.hidden_size),)),
        )

    @property
    def linear_parameters(self) -> int:
        """Number of weights in the linear layers of all transformer layers."""
        width = sum(group.in_features * group.out_features for group in self.layer_groups)
        return self.num_layers * width

    @property
    def head_group(self) -> LinearGroup:
        """The unembedding."""
        return LinearGroup("head", self.hidden_size, (("lm_head", self.vocab_size),))

    def rotary_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions 0 … ``length`` - 1, each ``[length, head_dim]``, float32.

        The first half of the sines is negated, as rotating halves against each other needs it.
        """
        inverse, factor = _inverse_frequencies(self)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
        cosines, sines = angles.cos() * factor, angles.sin() * factor
        return torch.cat([cosines, cosines], dim=1), torch.cat([-sines, sines], dim=1)


def read_architecture(folder: Path) -> Architecture:
    """Read ``config.json`` (and ``generation_config.json`` for stop tokens) of a model folder.

    Raises:
        EngineError: no configuration, or a model this engine cannot run.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise EngineError(
            f"{folder} holds no config.json.", hint="Give a folder or hub name of a causal language model."
        ) from error
    except ValueError as error:
        raise EngineError(f"{path} is not valid JSON: {error}.") from error
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise EngineError(
            f"The engine cannot run a model of type {kind!r}.", allowed=list(SUPPORTED_MODEL_TYPES)
        )
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window")):
        raise EngineError("Sliding-window attention is not supported.")
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(f"Activation {config['hidden_act']!r} is not supported.", allowed=["silu"])
    if config.get("quantization_config"):
        raise EngineError("Quantised weights are not supported.", hint="Use the unquantised model.")
    heads = int(config["num_attention_heads"])
    rotary = dict(config.get("rope_parameters") or {})
    if not rotary:
        rotary = dict(config.get("rope_scaling") or {})
    rotary.setdefault("rope_type", rotary.get("type", "default"))
    rotary.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return Architecture(
        model_type=kind,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qk_norm=kind == "qwen3",
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        rotary=rotary,
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    generation = folder / "generation_config.json"
    sources = [config.get("eos_token_id")]
    if generation.exists():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    for value in sources:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return tuple(found)


def _inverse_frequencies(architecture: Architecture) -> tuple[torch.Tensor, float]:
    """Rotary frequencies ``[head_dim / 2]`` and the factor on cosines and sines.

    Definitions as in ``transformers.modeling_rope_utils``; ``llama3`` interpolates between scaled and
    unscaled frequencies by wavelength.
    """
    rotary = architecture.rotary
    dim = architecture.head_dim
    inverse = 1.0 / (
        float(rotary["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    )
    kind = rotary["rope_type"]
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / float(rotary["factor"]), 1.0
    if kind == "llama3":
        factor = float(rotary["factor"])
        low, high = float(rotary["low_freq_factor"]), float(rotary["high_freq_factor"])
        original = float(rotary["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inverse
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * inverse / factor + smooth * inverse
        scaled = torch.where(wavelength > original / low, inverse / factor, between)
        return torch.where(wavelength < original / high, inverse, scaled), 1.0
    raise EngineError(
        f"Rotary scaling of type {kind!r} is not supported.", allowed=["default", "linear", "llama3"]
    )
