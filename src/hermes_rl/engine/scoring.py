"""Logits where a target needs them, the loss on them, and what it asks of the hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hermes_rl.engine.adapter import HEAD_LAYER
from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.linears import Linears
from hermes_rl.engine.losses import SEQUENCE_LOG_RATIO, Loss, sequence_log_ratios
from hermes_rl.engine.pointwise import rms_norm

LOGITS_BYTES = 128 * 2**20
"""Largest block of logits held at once."""


@dataclass
class Targets:
    """What is predicted from the hidden states of one micro-batch, sequence after sequence.

    Attributes:
        rows: ``[targets]`` int64, the hidden row that predicts each.
        tokens: ``[targets]`` int64.
        inputs: the loss's inputs by name, each ``[targets]`` float32.
        lengths: how many targets each sequence has.
    """

    rows: np.ndarray
    tokens: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    lengths: Sequence[int]


@dataclass
class Scored:
    """The summed loss, ``[targets]`` float32 logprobs and, where something is taught, the loss's gradient
    ``[rows, hidden]`` in the hidden states."""

    loss: float
    logprobs: np.ndarray
    gradient: torch.Tensor | None


@dataclass
class _Block:
    """Hidden rows whose logits are computed together.

    Attributes:
        rows: ``[rows]`` of the hidden states.
        members: ``[members]``, the targets that these rows predict.
        local: ``[members]``, each one's row within the block.
    """

    rows: torch.Tensor
    members: torch.Tensor
    local: torch.Tensor


def score(
    base: BaseModel, linear: Linears, hidden: torch.Tensor, targets: Targets, loss: Loss, *, learns: bool
) -> Scored:
    """Logprobs and loss of ``targets`` and, with ``learns``, the gradients of the loss: the unembedding's are
    collected by ``linear``, those of the hidden states are returned.

    Args:
        hidden: ``[rows, hidden]``, before the final norm; nothing is propagated through it.
    """
    count, hidden = len(targets.rows), hidden.detach()
    inputs = targets.inputs
    if loss.needs_sequences:
        before = torch.empty(count, device=hidden.device)
        for block in _blocks(base, targets.rows, np.arange(count), hidden.device):
            with torch.no_grad():
                logits = _logits(base, linear, hidden[block.rows]).float()
            before[block.members] = _picked(logits, block, targets.tokens)
        inputs = {**inputs, SEQUENCE_LOG_RATIO: sequence_log_ratios(before, inputs, targets.lengths)}
    taught = np.zeros(count, dtype=bool)
    if learns:
        teaches = loss.teaches(inputs).cpu().numpy()
        taught = np.isin(targets.rows, np.unique(targets.rows[teaches]))
    logprobs = torch.empty(count, device=hidden.device)
    gradient = torch.zeros_like(hidden) if taught.any() else None
    total = 0.0
    for block in _blocks(base, targets.rows, np.flatnonzero(~taught), hidden.device):
        with torch.no_grad():
            logits = _logits(base, linear, hidden[block.rows]).float()
        picked = logprobs[block.members] = _picked(logits, block, targets.tokens)
        total += float(loss(picked, _inputs_of(block, inputs)).sum())
    for block in _blocks(base, targets.rows, np.flatnonzero(taught), hidden.device):
        assert gradient is not None
        with torch.enable_grad():
            states = hidden[block.rows].requires_grad_()
            logits = _logits(base, linear, states)
        wide = logits.detach().float()
        picked = logprobs[block.members] = _picked(wide, block, targets.tokens)
        with torch.enable_grad():
            value = loss(picked.requires_grad_(), _inputs_of(block, inputs)).sum()
        total += float(value.detach())
        (slope,) = torch.autograd.grad(value, picked)
        # d logprob[t] / d logits = onehot(target) - softmax
        weight = torch.zeros(len(block.rows), device=hidden.device).index_add_(0, block.local, slope)
        logits_gradient = torch.softmax(wide, dim=1).mul_(weight.neg().unsqueeze(1))
        at = (block.local, targets.tokens[block.members])
        logits_gradient.index_put_(at, slope, accumulate=True)
        logits.backward(logits_gradient.to(logits.dtype))
        assert states.grad is not None
        gradient[block.rows] = states.grad
    return Scored(total, logprobs.cpu().numpy(), gradient)


def _blocks(base: BaseModel, rows: np.ndarray, members: np.ndarray, device: torch.device) -> Iterator[_Block]:
    """The rows that ``members`` of the targets read, each once, in blocks of ``LOGITS_BYTES``."""
    if not len(members):
        return
    size = max(1, LOGITS_BYTES // (4 * base.architecture.vocab_size))
    unique, inverse = np.unique(rows[members], return_inverse=True)
    for start in range(0, len(unique), size):
        inside = (inverse >= start) & (inverse < start + size)
        yield _Block(
            rows=torch.from_numpy(unique[start : start + size]).to(device),
            members=torch.from_numpy(members[inside]).to(device),
            local=torch.from_numpy(inverse[inside] - start).to(device),
        )


def _logits(base: BaseModel, linear: Linears, states: torch.Tensor) -> torch.Tensor:
    return linear(HEAD_LAYER, "head", rms_norm(states, base.final_norm, base.architecture.norm_eps))


def _picked(logits: torch.Tensor, block: _Block, tokens: torch.Tensor) -> torch.Tensor:
    """Logprob of each of the block's targets, ``[members]``."""
    return logits[block.local, tokens[block.members]] - torch.logsumexp(logits, dim=1)[block.local]


def _inputs_of(block: _Block, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[block.members] for name, value in inputs.items()}
