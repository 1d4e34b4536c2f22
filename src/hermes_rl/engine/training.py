"""``forward`` and ``forward_backward`` of one adapter on a list of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hermes_rl.engine.adapter import Adapter
from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.linears import LowRankLinears, MergedLinears, adapter_linears
from hermes_rl.engine.losses import Loss
from hermes_rl.engine.packing import Packed, pack, share_prefixes, split_by_rows
from hermes_rl.engine.scoring import Targets, score
from hermes_rl.engine.transformer import hidden_states

MICRO_BATCH_OPERATIONS = 3e10
"""Multiplications and additions of one micro-batch, about: what sampling may have to wait for."""

MICRO_BATCH_ROWS = (512, 2048)
"""Fewest and most rows of a micro-batch."""


@dataclass
class TrainingSequence:
    """One datum, flattened.

    Attributes:
        tokens: ``[length]`` int64 model input.
        positions: ``[targets]`` int64, the input position that predicts each target.
        targets: ``[targets]`` int64.
        inputs: the loss's inputs by name, each ``[targets]`` float32.
        shape: shape of the datum's ``target_tokens``, which the returned logprobs have too.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]
    shape: tuple[int, ...]


@dataclass
class Outcome:
    """What a pass returns: the summed loss and, a sequence, its targets' logprobs (flat float32)."""

    loss: float = 0.0
    logprobs: list[np.ndarray] = field(default_factory=list)


def run_pass(
    base: BaseModel,
    adapter: Adapter,
    sequences: Sequence[TrainingSequence],
    loss: Loss,
    gradient: Callable[[], torch.Tensor] | None,
) -> Iterator[Outcome | None]:
    """Compute logprobs and loss and, with ``gradient``, add the loss's gradient to the vector it gives.

    Work is cut into micro-batches. The generator yields None between them, so that its caller can do
    something else in between, and the outcome last. ``gradient`` is called once, at the end.
    """
    outcome = Outcome(logprobs=[np.empty(0, np.float32)] * len(sequences))
    learns = gradient is not None
    linear = adapter_linears(base, adapter, trainable=learns)
    roots = share_prefixes([sequence.tokens for sequence in sequences])
    batches = split_by_rows(roots, _rows_per_micro_batch(base))
    for number, batch in enumerate(batches):
        if number:
            yield None
        packed = pack(batch, base.device)
        indices = [index for root in batch for index, _ in root.branches]
        with torch.set_grad_enabled(learns):
            hidden = hidden_states(base, linear, packed.tokens, packed.positions, packed.attend)
        _score(base, linear, hidden, packed, indices, sequences, loss, outcome, learns)
    if gradient is not None:
        with torch.no_grad():
            linear.accumulate(gradient())
    yield outcome


def _rows_per_micro_batch(base: BaseModel) -> int:
    low, high = MICRO_BATCH_ROWS
    if base.device.type != "cpu":
        return 8 * high
    return int(min(max(MICRO_BATCH_OPERATIONS / (6 * base.linear_parameters), low), high))


def _score(
    base: BaseModel,
    linear: MergedLinears | LowRankLinears,
    hidden: torch.Tensor,
    packed: Packed,
    indices: list[int],
    sequences: Sequence[TrainingSequence],
    loss: Loss,
    outcome: Outcome,
    learns: bool,
) -> None:
    """Add a micro-batch's loss and logprobs to ``outcome`` and, with ``learns``, run the backward pass."""
    chosen = [sequences[index] for index in indices]
    lengths = [len(item.targets) for item in chosen]
    if not sum(lengths):
        return

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(base.device)

    rows = [packed.row_of[index][item.positions] for index, item in zip(indices, chosen, strict=True)]
    targets = Targets(
        rows=np.concatenate(rows),
        tokens=joined([item.targets for item in chosen]),
        inputs={name: joined([item.inputs[name] for item in chosen]) for name in chosen[0].inputs},
        lengths=lengths,
    )
    scored = score(base, linear, hidden, targets, loss, learns=learns)
    if scored.gradient is not None and hidden.requires_grad:
        hidden.backward(scored.gradient)
    outcome.loss += scored.loss
    ends = np.cumsum(lengths)[:-1]
    for index, values in zip(indices, np.split(scored.logprobs, ends), strict=True):
        outcome.logprobs[index] = values
