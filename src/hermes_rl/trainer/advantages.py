"""From the scores of a group to the advantage of each token.

GRPO without a critic (Shao et al. 2024, https://arxiv.org/abs/2402.03300): the baseline of a rollout is
the mean score of its group. Dividing by the group's standard deviation is an option and off by default,
because it weights easy and hard prompts up (Liu et al. 2025, https://arxiv.org/abs/2503.20783).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST_DEVIATION = 1e-6


def group_advantages(scores_G: Sequence[float], *, normalize: bool) -> npt.NDArray[np.float64]:
    """Advantage of each rollout of a group: its score less the group's mean.

    Args:
        scores_G: scores of the G rollouts of one prompt.
        normalize: divide by the group's (population) standard deviation.

    Returns:
        Advantages, shape [G]; all zero when the scores are all equal.
    """
    scores = np.asarray(scores_G, dtype=np.float64)
    if scores.size == 0 or np.ptp(scores) == 0.0:
        return np.zeros_like(scores)
    advantages_G = scores - scores.mean()
    if normalize:
        advantages_G /= scores.std() + _SMALLEST_DEVIATION
    return advantages_G


def token_advantages(group: Mapping[str, Any], *, normalize: bool) -> list[npt.NDArray[np.float32]]:
    """Advantage of each token of each sequence of an Atropos scored group.

    What the environment sends itself is honoured: ``advantages`` (one list a sequence, a value a
    token) replaces the computed ones; ``overrides[i]["set_advantage_to_zero"]`` silences a sequence.

    Args:
        group: a scored group as the trajectory API delivers it.
        normalize: see :func:`group_advantages`.

    Returns:
        One array a sequence, shape [T_i], aligned with ``group["tokens"][i]``.
    """
    tokens_G_T: list[list[int]] = group["tokens"]
    own_G_T = group.get("advantages") or None
    overrides_G = group.get("overrides") or []
    computed_G = group_advantages(group["scores"], normalize=normalize)
    advantages: list[npt.NDArray[np.float32]] = []
    for index, tokens_T in enumerate(tokens_G_T):
        if own_G_T is not None and index < len(own_G_T) and own_G_T[index]:
            advantages_T = np.zeros(len(tokens_T), dtype=np.float32)
            own_T = np.asarray(own_G_T[index], dtype=np.float32)[: len(tokens_T)]
            advantages_T[: own_T.size] = own_T
        else:
            advantages_T = np.full(len(tokens_T), computed_G[index], dtype=np.float32)
        override = overrides_G[index] if index < len(overrides_G) else None
        if override and override.get("set_advantage_to_zero"):
            advantages_T[:] = 0.0
        advantages.append(advantages_T)
    return advantages
