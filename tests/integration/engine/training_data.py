"""Datums for the engine's tests."""

from __future__ import annotations

import numpy as np
from tinker import types

PROMPT = list(range(20, 50))


def cross_entropy_data(seed: int = 0, count: int = 4) -> list[types.Datum]:
    """Random completions of one prompt."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        tokens = PROMPT + rng.integers(3, 250, 12).tolist()
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(PROMPT) - 1 :] = 1.0
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
            )
        )
    return data


def policy_data(
    response: types.SampleResponse, advantages: list[float], *, sequence_ratios: bool = False
) -> list[types.Datum]:
    """A group of samples of ``PROMPT`` with one advantage each.

    With ``sequence_ratios``, tokens with an advantage are marked as ``gspo`` needs them.
    """
    data = []
    for sequence, advantage in zip(response.sequences, advantages, strict=True):
        tokens = PROMPT + list(sequence.tokens)
        logprobs = np.zeros(len(tokens) - 1, np.float32)
        logprobs[len(PROMPT) - 1 :] = sequence.logprobs
        weight = np.zeros_like(logprobs)
        weight[len(PROMPT) - 1 :] = advantage
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": np.array(tokens[1:]),
                    "logprobs": logprobs,
                    "advantages": weight,
                    **({"sequence_ratio_mask": (weight != 0).astype(np.float32)} if sequence_ratios else {}),
                },
            )
        )
    return data


def sample(client, count: int = 4, *, seed: int = 1, max_tokens: int = 10, **params) -> types.SampleResponse:
    """Samples of ``PROMPT`` that run to their limit unless told to stop."""
    params = {"stop": []} | params
    return client.sample(
        types.ModelInput.from_ints(PROMPT),
        count,
        types.SamplingParams(max_tokens=max_tokens, seed=seed, **params),
    ).result()
