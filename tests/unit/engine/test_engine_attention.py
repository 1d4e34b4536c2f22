"""The closed-form gradient of attention, against the fused kernel."""

from __future__ import annotations

import pytest
import torch

from hermes_rl.engine import attention


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "masked"])
@pytest.mark.parametrize("heads", [2, 4], ids=["own keys", "shared keys"])
def test_both_ways_give_the_same_values_and_gradients(monkeypatch, heads, causal):
    torch.manual_seed(0)
    queries = 9 if causal else 5
    q, k, v = torch.randn(3, queries, heads, 8), torch.randn(3, 9, 2, 8), torch.randn(3, 9, 2, 8)
    mask = torch.zeros(3, queries, 9).masked_fill_(torch.rand(3, queries, 9) < 0.3, -torch.inf)
    mask[:, :, 0] = 0.0
    weight = torch.randn(3, queries, heads, 8)
    found = []
    for window in (9, 8):
        monkeypatch.setattr(attention, "CLOSED_FORM_WINDOW", window)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention.attend(*leaves, None if causal else mask)
        (out * weight).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(found[0], found[1])
