"""Sequences packed into rows, with shared prompts computed once.

A *root* attends causally to itself. A *branch* attends to the whole of its root and causally to itself. A
sequence without a shared prompt is a root. The completions of one prompt are branches of one root, whose
rows (and their gradients) are then computed once instead of once a completion; the result is the same up
to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hermes_rl.engine.attention import attend, repeat_heads

MIN_SHARED_TOKENS = 8
"""Shorter common prompts are not worth a root of their own."""


@dataclass
class Root:
    """Tokens computed once, and the branches that continue them.

    Attributes:
        tokens: ``[length]`` int64.
        branches: index of a sequence and its tokens after the root; a sequence that *is* the root has an
            empty continuation.
    """

    tokens: np.ndarray
    branches: list[tuple[int, np.ndarray]]

    @property
    def rows(self) -> int:
        return len(self.tokens) + sum(len(tail) for _, tail in self.branches)


def share_prefixes(sequences: Sequence[np.ndarray]) -> list[Root]:
    """Group neighbouring sequences by their longest common beginning.

    Args:
        sequences: int64 token arrays; the completions of one prompt are expected to stand together.
    """
    roots: list[Root] = []
    start = 0
    while start < len(sequences):
        end, common = start + 1, len(sequences[start])
        while end < len(sequences):
            shared = _common(sequences[start], sequences[end], common)
            if shared < MIN_SHARED_TOKENS or (end > start + 1 and shared * 2 < common):
                break
            common = shared
            end += 1
        group = sequences[start:end]
        roots.append(
            Root(group[0][:common], [(start + offset, item[common:]) for offset, item in enumerate(group)])
        )
        start = end
    return roots


def _common(first: np.ndarray, second: np.ndarray, limit: int) -> int:
    limit = min(limit, len(first), len(second))
    different = np.flatnonzero(first[:limit] != second[:limit])
    return int(different[0]) if len(different) else limit


def split_by_rows(roots: Sequence[Root], budget: int) -> list[list[Root]]:
    """Micro-batches of at most ``budget`` rows and about equally many, similar lengths together.

    A root with more rows is divided: its tokens are computed again for each part of its branches. Only a
    single sequence can be longer than the budget.
    """
    parts = [part for root in roots for part in _divide(root, budget)]
    ordered = sorted(parts, key=lambda root: (len(root.tokens), root.rows, root.branches[0][0]))
    batches: list[list[Root]] = []
    total = sum(root.rows for root in ordered)
    enough = total / max(1, -(-total // budget))
    rows = budget + 1
    for root in ordered:
        if rows >= enough or rows + root.rows > budget:
            batches.append([])
            rows = 0
        batches[-1].append(root)
        rows += root.rows
    return batches


def _divide(root: Root, budget: int) -> list[Root]:
    if root.rows <= budget:
        return [root]
    parts = [Root(root.tokens, [])]
    rows = len(root.tokens)
    for branch in root.branches:
        if parts[-1].branches and rows + len(branch[1]) > budget:
            parts.append(Root(root.tokens, []))
            rows = len(root.tokens)
        parts[-1].branches.append(branch)
        rows += len(branch[1])
    return parts


@dataclass
class Places:
    """Where sequences of uneven lengths lie in a padded block; what is all of one length is only viewed.

    Attributes:
        shape: sequences and the longest length.
        rows: ``[count * longest]``, the row at every place (padding repeats a row), or a slice of rows.
        back: ``[rows]``, each row's place, or None when every place is a row.
    """

    shape: tuple[int, int]
    rows: torch.Tensor | slice
    back: torch.Tensor | None

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, dim]`` as ``[count, longest, heads, dim]``."""
        return x[self.rows].unflatten(0, self.shape)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """``[count, longest, heads, dim]`` as ``[rows, heads * dim]``, without the padding."""
        flat = x.flatten(2).flatten(0, 1)
        return flat if self.back is None else flat[self.back]


@dataclass
class Packed:
    """Rows of several roots and their branches, and how they attend.

    Attributes:
        tokens, positions: ``[rows]`` int64; all roots first, then all branches.
        row_of: for every sequence index, the row of each of its tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    row_of: dict[int, np.ndarray]
    _roots: Places
    _branches: Places | None
    _parents: torch.Tensor
    _branch_mask: torch.Tensor

    def attend(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention within roots, and of branches to their root and themselves."""
        root_k, root_v = self._roots.padded(k), self._roots.padded(v)
        roots = self._roots.rows_of(attend(self._roots.padded(q), root_k, root_v, None))
        if self._branches is None:
            return roots
        keys = torch.cat([root_k.index_select(0, self._parents), self._branches.padded(k)], dim=1)
        values = torch.cat([root_v.index_select(0, self._parents), self._branches.padded(v)], dim=1)
        out = attend(self._branches.padded(q), keys, values, self._branch_mask)
        return torch.cat([roots, self._branches.rows_of(out)])


def pack(roots: Sequence[Root], device: torch.device) -> Packed:
    """Lay out roots and branches as rows."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    row_of: dict[int, np.ndarray] = {}
    root_starts: list[int] = []
    row = 0
    for root in roots:
        root_starts.append(row)
        tokens.append(root.tokens)
        positions.append(np.arange(len(root.tokens)))
        row += len(root.tokens)
    root_lengths = [len(root.tokens) for root in roots]
    branches: list[tuple[int, int, int]] = []
    for parent, root in enumerate(roots):
        start = root_starts[parent]
        shared = np.arange(start, start + root_lengths[parent])
        for index, tail in root.branches:
            if len(tail):
                branches.append((parent, row, len(tail)))
                tokens.append(tail)
                positions.append(np.arange(root_lengths[parent], root_lengths[parent] + len(tail)))
            row_of[index] = np.concatenate([shared, np.arange(row, row + len(tail))])
            row += len(tail)
    longest_root = max(root_lengths)
    parents = np.array([parent for parent, _, _ in branches], dtype=np.int64)
    lengths = [length for _, _, length in branches]
    longest = max(lengths, default=0)
    visible = np.arange(longest_root)[None, :] < np.array(root_lengths)[parents][:, None]
    mask = np.zeros((len(branches), longest, longest_root + longest), dtype=np.float32)
    mask[:, :, :longest_root] = np.where(visible, 0.0, -np.inf)[:, None, :]
    mask[:, :, longest_root:] = np.triu(np.full((longest, longest), -np.inf, np.float32), 1)
    return Packed(
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        row_of=row_of,
        _roots=_places(root_starts, root_lengths, device),
        _branches=_places([start for _, start, _ in branches], lengths, device) if branches else None,
        _parents=torch.from_numpy(parents).to(device),
        _branch_mask=torch.from_numpy(mask).to(device),
    )


def _places(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Places:
    """Places of sequences that lie behind one another. Padding repeats a sequence's last row."""
    longest = max(lengths)
    shape = (len(lengths), longest)
    if min(lengths) == longest:
        return Places(shape, slice(starts[0], starts[0] + len(lengths) * longest), None)
    begin, size = np.array(starts)[:, None], np.array(lengths)[:, None]
    steps = np.arange(longest)[None, :]
    rows = (begin + np.minimum(steps, size - 1)).reshape(-1)
    back = np.flatnonzero((steps < size).reshape(-1))
    return Places(shape, torch.from_numpy(rows).to(device), torch.from_numpy(back).to(device))


@dataclass
class Prompts:
    """Rows of several independent prompts.

    Only prompts of one length share an attention call, so that no prompt's result depends on which others
    are computed beside it.

    Attributes:
        tokens, positions: ``[rows]`` int64.
        starts, lengths: ``[prompts]``, where each prompt's rows lie.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: np.ndarray
    lengths: np.ndarray
    _groups: list[tuple[torch.Tensor, int, int]]
    _back: torch.Tensor

    @property
    def last_rows(self) -> np.ndarray:
        """Row of every prompt's last token."""
        return self.starts + self.lengths - 1

    def attend(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention within every prompt."""
        repeat = q.shape[1] // k.shape[1]
        outs = []
        for rows, count, length in self._groups:
            shape = (count, length)
            out = F.scaled_dot_product_attention(
                q[rows].unflatten(0, shape).transpose(1, 2),
                repeat_heads(k[rows].unflatten(0, shape).transpose(1, 2), repeat),
                repeat_heads(v[rows].unflatten(0, shape).transpose(1, 2), repeat),
                is_causal=True,
            )
            outs.append(out.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(outs)[self._back]


def pack_prompts(prompts: Sequence[np.ndarray], device: torch.device) -> Prompts:
    """Lay out prompts as rows."""
    lengths = np.array([len(prompt) for prompt in prompts])
    starts = np.cumsum(lengths) - lengths
    groups: list[tuple[torch.Tensor, int, int]] = []
    order: list[np.ndarray] = []
    for length in np.unique(lengths):
        members = starts[lengths == length]
        rows = (members[:, None] + np.arange(length)[None, :]).reshape(-1)
        order.append(rows)
        groups.append((torch.from_numpy(rows).to(device), len(members), int(length)))
    return Prompts(
        tokens=torch.from_numpy(np.concatenate(prompts)).to(device),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
        starts=starts,
        lengths=lengths,
        _groups=groups,
        _back=torch.from_numpy(np.argsort(np.concatenate(order))).to(device),
    )
