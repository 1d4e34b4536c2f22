"""What lies between the matrix products (norms, rotary embedding, gating), with gradients in closed form.

Each of these reads and writes every activation once or more without much arithmetic; on a CPU they cost as
much as the products of a small model. Written out, their gradients need half the passes that automatic
differentiation makes, and none for slicing and joining. Base weights get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]
    return _normed(x, weight, eps)[0]


def split_heads(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    norm: torch.Tensor | None,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values from their joint product, queries and keys normed and rotated.

    Rotary position embedding: Su et al. 2021.

    Args:
        qkv: ``[rows, (q + 2 kv) * dim]``.
        heads: numbers of query heads q and of key-value heads kv.
        norm: ``[q + kv, dim]`` weights, or None where heads are not normed.
        cosines, sines: ``[rows, 1, dim]``; the first half of the sines is negated.

    Returns:
        ``[rows, q, dim]``, ``[rows, kv, dim]``, ``[rows, kv, dim]``.
    """
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _SplitHeads.apply(qkv, heads, norm, eps, cosines, sines)  # pyright: ignore[reportReturnType]
    return _split(qkv, heads, norm, eps, cosines, sines)[0]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[rows, 2 * width]`` (Shazeer 2020)."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _Gated.apply(gate_up)  # pyright: ignore[reportReturnType]
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed input and, ``[…, 1]`` float32, the reciprocal of its root mean square."""
    wide = x.float()
    mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    scale = mean.add_(eps).rsqrt_()
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight), scale
    return (wide * scale).to(x.dtype).mul_(weight), scale


def _normed_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """With ``g = dy * weight``: ``scale * g - x * scale^3 * mean(g * x)``, in float32."""
    gradient = (dy * weight).float()
    wide = x.float()
    inner = torch.linalg.vecdot(gradient, wide).unsqueeze(-1).div_(x.shape[-1])
    inner.mul_(scale).mul_(scale).mul_(scale)
    return gradient.mul_(scale).addcmul_(wide, inner, value=-1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        return _normed_backward(grad_outputs[0], x, weight, scale).to(x.dtype), None, None


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cosines, swapped, sines)


def _split(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    norm: torch.Tensor | None,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]:
    queries, pairs = heads
    parts = qkv.unflatten(1, (queries + 2 * pairs, -1))
    joint, values = parts[:, : queries + pairs], parts[:, queries + pairs :]
    scale = None
    if norm is not None:
        joint, scale = _normed(joint, norm, eps)
    joint = _rotate(joint, cosines, sines)
    return (joint[:, :queries], joint[:, queries:], values), scale


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, heads: tuple[int, int], norm: torch.Tensor | None, eps: float,
                cosines: torch.Tensor, sines: torch.Tensor) -> Any:  # fmt: skip
        (q, k, v), scale = _split(qkv, heads, norm, eps, cosines, sines)
        ctx.save_for_backward(None if norm is None else qkv, norm, scale, cosines, sines)
        ctx.heads = heads
        return q, k, v.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        dq, dk, dv = grad_outputs
        qkv, norm, scale, cosines, sines = ctx.saved_tensors
        queries, pairs = ctx.heads
        half = dq.shape[-1] // 2
        whole = dq.new_empty(len(dq), queries + 2 * pairs, dq.shape[-1])
        joint = whole[:, : queries + pairs]
        for part, into in ((dq, joint[:, :queries]), (dk, joint[:, queries:])):
            # the rotation's transpose: what was swapped forwards is swapped back after the sines
            torch.mul(part, cosines, out=into)
            swapped = part * sines
            into[..., half:] += swapped[..., :half]
            into[..., :half] += swapped[..., half:]
        if norm is not None:
            x = qkv.unflatten(1, (queries + 2 * pairs, -1))[:, : queries + pairs]
            joint.copy_(_normed_backward(joint, x, norm, scale))
        whole[:, queries + pairs :] = dv
        return whole.flatten(1), None, None, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (dy,) = grad_outputs
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=1)
        whole = torch.empty_like(gate_up)
        d_gate, d_up = whole.chunk(2, dim=1)
        torch.mul(activated, dy, out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return whole
