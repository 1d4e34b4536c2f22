"""Closed-form gradients of norms, rotary embedding and gating, against automatic differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hermes_rl.engine.pointwise import gated, rms_norm, split_heads

EPS = 1e-6


def reference_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def reference_split(qkv, heads, norm, cosines, sines):
    queries, pairs = heads
    parts = qkv.unflatten(1, (queries + 2 * pairs, -1))
    joint, values = parts[:, : queries + pairs], parts[:, queries + pairs :]
    if norm is not None:
        joint = reference_norm(joint, norm)
    joint = joint * cosines + joint.roll(joint.shape[-1] // 2, -1) * sines
    return joint[:, :queries], joint[:, queries:], values


def values_and_gradient(function, x, weights):
    """The function's outputs, and the gradient of their weighted sum."""
    x = x.clone().requires_grad_()
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)])
    return [out.detach() for out in outputs], x.grad


def check(function, reference, x):
    with torch.no_grad():
        outputs = reference(x)
    weights = [torch.randn_like(out) for out in (outputs if isinstance(outputs, tuple) else (outputs,))]
    values, gradient = values_and_gradient(function, x, weights)
    expected, expected_gradient = values_and_gradient(reference, x, weights)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    with torch.no_grad():
        plain = function(x)
    torch.testing.assert_close(list(plain) if isinstance(plain, tuple) else [plain], expected)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_norm():
    weight = torch.randn(48)
    check(lambda x: rms_norm(x, weight, EPS), lambda x: reference_norm(x, weight), torch.randn(9, 48))


@pytest.mark.parametrize("normed", [True, False])
def test_heads(normed):
    norm = torch.randn(6, 8) if normed else None
    cosines, sines = torch.randn(9, 1, 8), torch.randn(9, 1, 8)
    check(
        lambda x: split_heads(x, (4, 2), norm, EPS, cosines, sines),
        lambda x: reference_split(x, (4, 2), norm, cosines, sines),
        torch.randn(9, 64),
    )


def test_gate():
    def reference(x):
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    check(gated, reference, torch.randn(9, 32))


def test_bfloat16_is_normed_in_float32():
    x, weight = torch.randn(9, 48).bfloat16(), torch.ones(48).bfloat16()
    expected = reference_norm(x.float(), weight.float()).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected)
