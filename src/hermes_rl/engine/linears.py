"""Linear layers with adapters on them, in the forms that training and sampling need.

A form is a callable ``linear(layer, group, x)``. An adapter is applied in one of two exact ways: *merged*
adds ``scaling * B A`` to a copy of the base matrix first (fewest operations, but a copy of the model),
*low-rank* multiplies by A and B beside the base matrix (little memory, more operations). Gradients come from
thin products or, where the rank is not small beside the width, from the gradient of the merged matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hermes_rl.engine.adapter import HEAD_LAYER, Adapter, Matrices
from hermes_rl.engine.base_model import BaseModel

MERGED_LIMIT_BYTES = 64 * 2**20
"""Largest set of linear weights that is copied to merge an adapter into it."""


class Linears(Protocol):
    """Applies one group of linear layers. ``layer`` is ``HEAD_LAYER`` for the unembedding."""

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor: ...


def can_merge(base: BaseModel) -> bool:
    """Whether copies of the base matrices can hold an adapter: exactly, and without much memory."""
    return base.dtype == torch.float32 and base.linear_parameters * 4 <= MERGED_LIMIT_BYTES


def dense_gradients_are_cheaper(base: BaseModel, rank: int) -> bool:
    """Whether an adapter's gradients are cheaper by way of the merged matrix's gradient.

    Over T tokens that one costs ``T * in * out``, thin products cost ``2 * T * rank * (in + out)``.
    """
    dense = thin = 0
    for group in base.architecture.layer_groups:
        dense += group.in_features * group.out_features
        thin += 2 * rank * (len(group.parts) * group.in_features + group.out_features)
    return dense < thin


def base_matrix(base: BaseModel, layer: int, group: str) -> torch.Tensor:
    """The base model's ``[out, in]`` matrix of a group."""
    return base.head if layer == HEAD_LAYER else base.layers[layer].linear[group]


def base_bias(base: BaseModel, layer: int, group: str) -> torch.Tensor | None:
    """The base model's ``[out]`` bias of a group, if it has one."""
    return None if layer == HEAD_LAYER else base.layers[layer].bias.get(group)


def merge_into(target: torch.Tensor, weight: torch.Tensor, matrices: Matrices, scaling: float) -> None:
    """``target = weight + scaling * B A``, part by part."""
    start = 0
    rank = matrices.b[0].shape[1]
    for index, b in enumerate(matrices.b):
        rows = slice(start, start + b.shape[0])
        a = matrices.a[index * rank : (index + 1) * rank]
        torch.addmm(weight[rows], b, a, alpha=scaling, out=target[rows])
        start += b.shape[0]


def merged_matrices(base: BaseModel, adapter: Adapter) -> dict[tuple[int, str], torch.Tensor]:
    """Copies of the matrices that ``adapter`` adapts, with the adapter in them."""
    merged = {}
    for key, matrices in adapter.matrices.items():
        weight = base_matrix(base, *key)
        merged[key] = torch.empty_like(weight)
        merge_into(merged[key], weight, matrices, adapter.spec.scaling)
    return merged


class BaseLinears:
    """The base model alone."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, base_matrix(self._base, layer, group), base_bias(self._base, layer, group))


class MergedLinears:
    """One adapter, merged into copies of the matrices it adapts, for ranks not small beside the width.

    With ``trainable`` the merged matrices collect gradients, which :meth:`accumulate` turns into the
    adapter's: for ``W' = W + s B A``, ``dB = s dW' A^T`` and ``dA = s B^T dW'``.
    """

    def __init__(self, base: BaseModel, adapter: Adapter, *, trainable: bool) -> None:
        self._base = base
        self._adapter = adapter
        self.merged = merged_matrices(base, adapter)
        for weight in self.merged.values():
            weight.requires_grad_(trainable)

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.merged.get((layer, group))
        if weight is None:
            weight = base_matrix(self._base, layer, group)
        return F.linear(x, weight, base_bias(self._base, layer, group))

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the collected gradients to the flat ``gradient`` of the adapter, and forget them."""
        scaling, rank = self._adapter.spec.scaling, self._adapter.spec.rank
        views = self._adapter.views(gradient)
        for key, weight in self.merged.items():
            if weight.grad is None:
                continue
            matrices, into = self._adapter.matrices[key], views[key]
            start = 0
            for index, b in enumerate(matrices.b):
                rows = weight.grad[start : start + b.shape[0]]
                part = slice(index * rank, (index + 1) * rank)
                into.a[part].addmm_(b.t(), rows, alpha=scaling)
                into.b[index].addmm_(rows, matrices.a[part].t(), alpha=scaling)
                start += b.shape[0]
            weight.grad = None


class LowRankLinears:
    """One adapter whose A and B get their gradients from thin products. ``x`` is ``[tokens, in]``.

    With ``merged`` the adapter is added to copies of the base matrices first, so that forward products and
    the inputs' gradients need one multiplication each; without, A and B are multiplied beside the base.
    """

    def __init__(self, base: BaseModel, adapter: Adapter, *, trainable: bool, merged: bool) -> None:
        self._base = base
        self._adapter = adapter
        self._merged = merged_matrices(base, adapter) if merged else {}
        self._gradient = torch.zeros_like(adapter.flat) if trainable else None
        self._into = adapter.views(self._gradient) if self._gradient is not None else {}
        # what makes autograd call backward of layers whose input needs no gradient
        self._anchor = torch.zeros((), requires_grad=trainable)

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        key = (layer, group)
        weight = self._merged.get(key)
        merged = weight is not None
        if weight is None:
            weight = base_matrix(self._base, layer, group)
        bias = base_bias(self._base, layer, group)
        matrices = self._adapter.matrices.get(key)
        if matrices is None or (merged and not self._into):
            return F.linear(x, weight, bias)
        terms = _Terms(weight, bias, matrices, self._into.get(key), self._adapter.spec.scaling, merged)
        return _LowRankLinear.apply(x, self._anchor, terms)  # pyright: ignore[reportReturnType]

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the collected gradients to the flat ``gradient`` of the adapter, and forget them."""
        assert self._gradient is not None
        gradient.add_(self._gradient)
        self._gradient.zero_()


@dataclass(frozen=True)
class _Terms:
    """What one group's products read: the matrix, the adapter, where its gradients go, and whether the matrix
    holds the adapter already."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    matrices: Matrices
    into: Matrices | None
    scaling: float
    merged: bool


class _LowRankLinear(torch.autograd.Function):
    """``x W^T + scaling * (x A^T) B^T`` for stacked parts; gradients for x, A and the B's only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor, terms: _Terms) -> torch.Tensor:
        y = F.linear(x, terms.weight, terms.bias)
        low = None
        if not terms.merged:
            low = F.linear(x, terms.matrices.a.to(x.dtype))
            for columns, part, b in zip(*_parts(y, low, terms.matrices), terms.matrices.b, strict=True):
                columns.addmm_(part, b.to(x.dtype).t(), alpha=terms.scaling)
        ctx.save_for_backward(x, low)
        ctx.terms = terms
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (dy,) = grad_outputs
        x, low = ctx.saved_tensors
        terms: _Terms = ctx.terms
        assert terms.into is not None
        a = terms.matrices.a.to(x.dtype)
        if low is None:
            low = F.linear(x, a)
        dlow = torch.empty_like(low)
        parts = zip(*_parts(dy, low, terms.matrices), terms.matrices.b, terms.into.b, strict=True)
        rank = terms.matrices.b[0].shape[1]
        for index, (columns, part, b, into) in enumerate(parts):
            _add_product(into, columns.t(), part, terms.scaling)
            torch.mm(columns, b.to(dy.dtype), out=dlow[:, index * rank : (index + 1) * rank])
        _add_product(terms.into.a, dlow.t(), x, terms.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ terms.weight
            if not terms.merged:
                dx.addmm_(dlow, a, alpha=terms.scaling)
        return dx, None, None


def _parts(
    wide: torch.Tensor, low: torch.Tensor, matrices: Matrices
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The columns of each part in a group's output and in its low-rank product."""
    rank = matrices.b[0].shape[1]
    return wide.split([b.shape[0] for b in matrices.b], dim=1), low.split(rank, dim=1)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
    """``into += scaling * left right``; ``into`` is float32 whatever the factors are."""
    if left.dtype == into.dtype:
        into.addmm_(left, right, alpha=scaling)
    else:
        into.add_(left @ right, alpha=scaling)


def adapter_linears(base: BaseModel, adapter: Adapter, *, trainable: bool) -> MergedLinears | LowRankLinears:
    """The cheapest form for one adapter."""
    merged = can_merge(base)
    if merged and dense_gradients_are_cheaper(base, adapter.spec.rank):
        return MergedLinears(base, adapter, trainable=trainable)
    return LowRankLinears(base, adapter, trainable=trainable, merged=merged)
