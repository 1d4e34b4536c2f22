"""Attention over padded blocks of sequences, with the gradient in closed form where that is faster.

On a CPU, two batched products over short windows take half the time of the fused kernel, because the heads
that share keys become rows of one product and nothing is repeated for them. Long windows, other types and
other devices go through the fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CLOSED_FORM_WINDOW = 256
"""Longest window of keys whose weights are kept for the backward pass instead of computed again."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017) with grouped heads (Ainslie et al. 2023).

    Args:
        q: ``[count, queries, heads, dim]``.
        k, v: ``[count, keys, kv_heads, dim]``.
        mask: ``[count, queries, keys]`` float32, added to the scores; None is causal attention.

    Returns:
        ``[count, queries, heads, dim]``.
    """
    if q.device.type == "cpu" and q.dtype == torch.float32 and k.shape[1] <= CLOSED_FORM_WINDOW:
        if mask is None:
            mask = q.new_full((1, q.shape[1], k.shape[1]), -torch.inf).triu_(1)
        return _Attention.apply(q, k, v, mask)  # pyright: ignore[reportReturnType]
    repeat = q.shape[2] // k.shape[2]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        repeat_heads(k.transpose(1, 2), repeat),
        repeat_heads(v.transpose(1, 2), repeat),
        attn_mask=None if mask is None else mask.unsqueeze(1).to(q.dtype),
        is_causal=mask is None,
    )
    return out.transpose(1, 2)


def repeat_heads(x: torch.Tensor, repeat: int) -> torch.Tensor:
    """``[count, kv_heads, …]`` with every head ``repeat`` times."""
    return x if repeat == 1 else x.repeat_interleave(repeat, dim=1)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[count, length, heads, dim]`` as ``[count * kv_heads, heads / kv_heads * length, dim]``."""
    count, length, heads, dim = x.shape
    parts = x.view(count, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return parts.reshape(count * kv_heads, -1, dim)


def _ungrouped(x: torch.Tensor, count: int, kv_heads: int, heads: int) -> torch.Tensor:
    """The inverse of :func:`_grouped`."""
    parts = x.view(count, kv_heads, heads // kv_heads, -1, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return parts.reshape(count, -1, heads, x.shape[-1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        count, queries, heads, dim = q.shape
        keys, kv_heads = k.shape[1:3]
        rows, columns, values = (_grouped(x, kv_heads) for x in (q, k, v))
        scores = torch.bmm(rows, columns.transpose(1, 2)).mul_(dim**-0.5)
        # queries of several heads lie below each other; all of them see what their position sees
        scores.view(count, -1, queries, keys).add_(mask.unsqueeze(1))
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(rows, columns, values, weights)
        ctx.shape = (count, kv_heads, heads)
        return _ungrouped(torch.bmm(weights, values), count, kv_heads, heads)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        rows, columns, values, weights = ctx.saved_tensors
        count, kv_heads, heads = ctx.shape
        dout = _grouped(grad_outputs[0], kv_heads)
        dv = torch.bmm(weights.transpose(1, 2), dout)
        dweights = torch.bmm(dout, values.transpose(1, 2))
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dscores.mul_(rows.shape[-1] ** -0.5)
        dq = torch.bmm(dscores, columns)
        dk = torch.bmm(dscores.transpose(1, 2), rows)
        return (
            _ungrouped(dq, count, kv_heads, heads),
            _ungrouped(dk, count, kv_heads, kv_heads),
            _ungrouped(dv, count, kv_heads, kv_heads),
            None,
        )
