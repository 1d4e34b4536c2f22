"""Adam is torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from hermes_rl.engine.optimizer import LEAST_EPS, Adam, AdamSettings


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps_are_those_of_adamw(decay, clip):
    torch.manual_seed(0)
    mine = torch.randn(50)
    theirs = torch.nn.Parameter(mine.clone().double())
    adam = Adam(mine)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=decay)
    for _ in range(6):
        gradient = torch.randn(50)
        theirs.grad = gradient.double()
        if clip:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        reference.step()
        norm = adam.step(gradient.clone(), AdamSettings(0.01, 0.8, 0.9, 1e-8, decay, clip))
        assert norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    torch.testing.assert_close(mine.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_state_restores_the_course():
    torch.manual_seed(0)
    one, two = torch.zeros(10), torch.zeros(10)
    first = Adam(one)
    first.step(torch.ones(10), AdamSettings(0.1))
    second = Adam(two)
    two.copy_(one)
    second.load_state(first.state())
    gradient = torch.randn(10)
    first.step(gradient.clone(), AdamSettings(0.1))
    second.step(gradient.clone(), AdamSettings(0.1))
    assert torch.equal(one, two)


def test_a_gradient_that_is_not_finite_changes_nothing():
    parameters = torch.ones(4)
    adam = Adam(parameters)
    with pytest.raises(FloatingPointError):
        adam.step(torch.tensor([1.0, float("nan"), 0.0, 0.0]), AdamSettings())
    assert torch.equal(parameters, torch.ones(4))
    assert adam.steps == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"beta1": 1.0},
        {"learning_rate": -1.0},
        {"learning_rate": 1e39},
        {"eps": float("nan")},
        {"eps": 0.0},
        {"eps": 1e-60},
        {"weight_decay": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdamSettings(**bad)


def test_the_least_eps_moves_nothing_that_has_no_gradient():
    parameters = torch.ones(3)
    Adam(parameters).step(torch.tensor([0.0, 1e-30, 1.0]), AdamSettings(1e-3, eps=LEAST_EPS))
    assert torch.isfinite(parameters).all()
    assert parameters[0] == 1


def test_weights_that_a_step_breaks_are_no_success():
    adam = Adam(torch.full((3,), 1e20))
    with pytest.raises(FloatingPointError, match="weights are not finite"):
        adam.step(torch.ones(3), AdamSettings(learning_rate=1e14, weight_decay=1e14))
