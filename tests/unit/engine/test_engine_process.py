"""What the engine chooses by itself: the type of the base weights."""

from __future__ import annotations

import pytest
import torch

from hermes_rl.engine import process
from hermes_rl.engine.process import SMALL_MODEL_PARAMETERS, choose_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("native", "parameters", "chosen"),
    [
        (True, SMALL_MODEL_PARAMETERS, torch.float32),
        (True, SMALL_MODEL_PARAMETERS + 1, torch.bfloat16),
        (False, SMALL_MODEL_PARAMETERS + 1, torch.float32),
    ],
    ids=["small", "large", "large without bfloat16"],
)
def test_a_processor_gets_bfloat16_only_where_it_gains(monkeypatch, native, parameters, chosen):
    monkeypatch.setattr(process, "multiplies_bfloat16", lambda: native)
    assert choose_dtype("auto", CPU, parameters) is chosen


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_type_that_is_asked_for_is_taken(name):
    assert choose_dtype(name, CPU, 1) is getattr(torch, name)


def test_a_gpu_gets_bfloat16():
    assert choose_dtype("auto", torch.device("cuda"), 1) is torch.bfloat16
