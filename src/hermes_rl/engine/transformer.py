"""The forward pass of a Qwen3- or Llama-family model over rows of tokens.

Tokens of all sequences are rows of one matrix, so that no linear layer ever sees padding. What attends to
what is the caller's: ``attend(layer, q, k, v)`` receives ``q [rows, heads, dim]`` and ``k, v [rows,
kv_heads, dim]`` and returns ``[rows, heads * dim]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.linears import Linears
from hermes_rl.engine.pointwise import gated, rms_norm, split_heads

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def hidden_states(
    base: BaseModel,
    linear: Linears,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """Hidden states before the final norm.

    Args:
        tokens, positions: ``[rows]`` int64.

    Returns:
        ``[rows, hidden]``.
    """
    architecture = base.architecture
    heads = (architecture.num_heads, architecture.num_kv_heads)
    eps = architecture.norm_eps
    cosines = base.cosines[positions].unsqueeze(1)
    sines = base.sines[positions].unsqueeze(1)
    x = base.embedding[tokens]
    for index, layer in enumerate(base.layers):
        qkv = linear(index, "qkv", rms_norm(x, layer.input_norm, eps))
        q, k, v = split_heads(qkv, heads, layer.qk_norm, eps, cosines, sines)
        x = x + linear(index, "o", attend(index, q, k, v))
        gate_up = linear(index, "gate_up", rms_norm(x, layer.post_norm, eps))
        x = x + linear(index, "down", gated(gate_up))
    return x
