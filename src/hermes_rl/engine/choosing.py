"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Choice:
    """How the tokens of several rows are chosen; every array is ``[rows]``.

    Attributes:
        temperature: 0 chooses the most likely token.
        top_k: -1 or 0 for no limit.
        top_p: 1 for no limit.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray


def choose(logits: torch.Tensor, choice: Choice, uniform: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token a row by inverting its cumulative distribution at ``uniform``.

    Args:
        logits: ``[rows, vocab]`` float32.
        uniform: ``[rows]`` in [0, 1).

    Returns:
        Tokens ``[rows]`` int64 and their logprobs ``[rows]`` under the model's own distribution, that is at
        temperature 1 and without limits.
    """
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    at = torch.from_numpy(uniform).to(device=logits.device, dtype=torch.float32).unsqueeze(1)
    greedy = choice.temperature == 0
    limited = ((choice.top_k > 0) | (choice.top_p < 1)) & ~greedy
    if not greedy.any() and not limited.any() and (choice.temperature == 1).all():
        tokens = _invert(torch.exp(logits - normaliser), at)
    else:
        # below the least temperature, dividing by it would overflow
        warm = np.where(greedy, 1.0, np.maximum(choice.temperature, 1e-30)).astype(np.float32)
        scaled = logits / torch.from_numpy(warm).to(logits.device).unsqueeze(1)
        tokens = _invert(torch.softmax(scaled, dim=1), at)
        if limited.any():
            rows = torch.from_numpy(np.flatnonzero(limited)).to(logits.device)
            tokens[rows] = _choose_limited(
                scaled[rows], choice.top_k[limited], choice.top_p[limited], at[rows]
            )
        if greedy.any():
            rows = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
            tokens[rows] = logits[rows].argmax(dim=1)
    logprobs = logits.gather(1, tokens.unsqueeze(1)) - normaliser
    return tokens, logprobs.squeeze(1)


def _invert(probabilities: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cumulative = probabilities.cumsum(dim=1)
    total = cumulative[:, -1:]
    # rounded to float32 the last part of [0, 1) is 1: below the total lies a token that can be chosen
    wanted = torch.minimum(at * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    return found.clamp_(max=probabilities.shape[1] - 1)


def _choose_limited(
    scaled: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, at: torch.Tensor
) -> torch.Tensor:
    """Top-k (Fan et al. 2018), then nucleus (Holtzman et al. 2020): keep the fewest tokens reaching top_p."""
    ordered, tokens = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device).unsqueeze(0)
    limit = np.where(top_k > 0, top_k, scaled.shape[1])
    ordered = ordered.masked_fill(ranks >= torch.from_numpy(limit).to(scaled.device).unsqueeze(1), -torch.inf)
    probabilities = torch.softmax(ordered, dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    nucleus = torch.from_numpy(top_p.astype(np.float32)).to(scaled.device).unsqueeze(1)
    probabilities = probabilities.masked_fill((before >= nucleus) & (ranks > 0), 0.0)
    return tokens.gather(1, _invert(probabilities, at).unsqueeze(1)).squeeze(1)
