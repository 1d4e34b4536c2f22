"""The adapters that sampling has at hand, stacked so that rows of several share one multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hermes_rl.engine.adapter import Adapter
from hermes_rl.engine.architecture import LinearGroup
from hermes_rl.engine.base_model import BaseModel
from hermes_rl.engine.linears import BaseLinears, Linears, base_bias, base_matrix, merge_into

STACK_LIMIT_BYTES = 16 * 2**20
"""Largest base model (its linear weights) of which merged copies are stacked, one an adapter."""

MIN_GROUP_ROWS = 8
"""Groups of rows are filled up to this size: below it, matrix multiplication takes another path whose
rounding differs, and a result would depend on how many rows are served together."""

RANK_STEP = 32
"""Stacked low-rank matrices are as wide as the widest rank, in these steps: equal widths round equally."""


@dataclass
class Layout:
    """Rows of a batch ordered by adapter, small groups filled up.

    Attributes:
        rows: batch row at every place, or None when places and rows are the same.
        places: place of every batch row, or None likewise.
        counts: places of each adapter slot from ``first`` on.
    """

    rows: torch.Tensor | None
    places: torch.Tensor | None
    first: int
    counts: list[int]


def lay_out(slots: np.ndarray, device: torch.device) -> Layout:
    """Order batch rows by their adapter slot (``[rows]`` integers)."""
    first = int(slots.min())
    counts = np.bincount(slots - first)
    if len(counts) == 1 and counts[0] >= MIN_GROUP_ROWS:
        return Layout(None, None, first, [int(counts[0])])
    rows: list[np.ndarray] = []
    sizes: list[int] = []
    places = np.empty(len(slots), dtype=np.int64)
    start = 0
    for offset, count in enumerate(counts):
        if not count:
            sizes.append(0)
            continue
        members = np.flatnonzero(slots == first + offset)
        places[members] = start + np.arange(count)
        if count < MIN_GROUP_ROWS:
            members = np.concatenate([members, np.repeat(members[-1], MIN_GROUP_ROWS - count)])
        rows.append(members)
        sizes.append(len(members))
        start += len(members)
    order = np.concatenate(rows)
    if np.array_equal(order, np.arange(len(slots))):
        return Layout(None, None, first, sizes)
    return Layout(torch.from_numpy(order).to(device), torch.from_numpy(places).to(device), first, sizes)


class AdapterTable:
    """Slots for adapters. Slots in use are pinned; unused ones keep their adapter until needed."""

    def __init__(self, base: BaseModel, *, max_slots: int = 32) -> None:
        self.base = base
        self.max_slots = max_slots
        self._merged = base.dtype == torch.float32 and base.linear_parameters * 4 <= STACK_LIMIT_BYTES
        self._rank = 0
        self._capacity = 0
        self._keys: list[object | None] = []
        self._ranks: list[int | None] = []
        self._dropped: set[object] = set()
        self._pins: list[int] = []
        self._clock = 0
        self._used: list[int] = []
        self._weights: dict[tuple[int, str], torch.Tensor] = {}
        self._a: dict[tuple[int, str], torch.Tensor] = {}
        self._b: dict[tuple[int, str], list[torch.Tensor]] = {}

    def acquire(self, key: object, adapter: Adapter | None) -> int | None:
        """Pin an adapter (None for the base model alone) in a slot; None when all slots are pinned."""
        self._clock += 1
        if key in self._keys:
            slot = self._keys.index(key)
        else:
            free = [slot for slot, pins in enumerate(self._pins) if not pins]
            if free:
                slot = min(free, key=lambda slot: self._used[slot])
            elif self._capacity < self.max_slots:
                slot = self._capacity
                self._grow(max(2, self._capacity * 2))
            else:
                return None
            self._write(slot, adapter)
            self._keys[slot] = key
            self._ranks[slot] = None if adapter is None else adapter.spec.rank
        self._dropped.discard(key)
        self._pins[slot] += 1
        self._used[slot] = self._clock
        return slot

    def release(self, slot: int) -> None:
        """Undo one :meth:`acquire`."""
        self._pins[slot] -= 1
        if self._dropped and not self._pins[slot] and self._keys[slot] in self._dropped:
            self.drop(self._keys[slot])

    def drop(self, key: object) -> None:
        """Forget an adapter, once no request uses it any more.

        Memory is given back, and stacked matrices become as narrow as the ranks that are left allow, when no
        request is running.
        """
        if key not in self._keys:
            return
        slot = self._keys.index(key)
        if self._pins[slot]:
            self._dropped.add(key)
            return
        self._dropped.discard(key)
        self._keys[slot] = self._ranks[slot] = None
        ranks = [rank for rank in self._ranks if rank is not None]
        if not any(self._pins) and (not ranks or _stack_width(max(ranks)) < self._rank):
            self._clear()

    def _clear(self) -> None:
        self._rank = self._capacity = 0
        for kept in (self._keys, self._ranks, self._pins, self._used):
            kept.clear()
        for stacks in (self._weights, self._a, self._b):
            stacks.clear()

    def linears(self, layout: Layout) -> Linears:
        """Linear layers for rows in the given layout."""
        occupied = [layout.first + offset for offset, count in enumerate(layout.counts) if count]
        if all(self._ranks[slot] is None for slot in occupied):
            return BaseLinears(self.base)
        if len(occupied) == 1:
            return _SlotLinears(self, occupied[0])
        ends = torch.tensor(layout.counts, dtype=torch.int32, device=self.base.device).cumsum(
            0, dtype=torch.int32
        )
        return _GroupedLinears(self, layout.first, ends)

    def _groups(self, adapter: Adapter) -> list[tuple[tuple[int, str], LinearGroup]]:
        architecture = self.base.architecture
        by_name = {group.name: group for group in (*architecture.layer_groups, architecture.head_group)}
        return [(key, by_name[key[1]]) for key in adapter.matrices]

    def _grow(self, capacity: int) -> None:
        capacity = min(capacity, self.max_slots)
        extra = capacity - self._capacity
        self._keys += [None] * extra
        self._ranks += [None] * extra
        self._pins += [0] * extra
        self._used += [0] * extra
        for key, stack in self._weights.items():
            weight = base_matrix(self.base, *key)
            self._weights[key] = torch.cat([stack, weight.expand(extra, *weight.shape)])
        for key, stack in self._a.items():
            self._a[key] = torch.cat([stack, stack.new_zeros(extra, *stack.shape[1:])])
            self._b[key] = [torch.cat([b, b.new_zeros(extra, *b.shape[1:])]) for b in self._b[key]]
        self._capacity = capacity

    def _write(self, slot: int, adapter: Adapter | None) -> None:
        if self._merged:
            self._write_merged(slot, adapter)
        else:
            self._write_low_rank(slot, adapter)

    @torch.no_grad()
    def _write_merged(self, slot: int, adapter: Adapter | None) -> None:
        if adapter is not None:
            for key, _ in self._groups(adapter):
                if key not in self._weights:
                    weight = base_matrix(self.base, *key)
                    self._weights[key] = weight.expand(self._capacity, *weight.shape).clone()
        for key, stack in self._weights.items():
            weight = base_matrix(self.base, *key)
            matrices = adapter.matrices.get(key) if adapter is not None else None
            if matrices is None or adapter is None:
                stack[slot].copy_(weight)
            else:
                merge_into(stack[slot], weight, matrices, adapter.spec.scaling)

    @torch.no_grad()
    def _write_low_rank(self, slot: int, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._widen(_stack_width(adapter.spec.rank))
            for key, group in self._groups(adapter):
                if key not in self._a:
                    shape = (self._capacity, len(group.parts), self._rank, group.in_features)
                    options = {"dtype": self.base.dtype, "device": self.base.device}
                    self._a[key] = torch.zeros(shape, **options)
                    self._b[key] = [
                        torch.zeros(self._capacity, width, self._rank, **options) for _, width in group.parts
                    ]
        for key, stack in self._a.items():
            stack[slot].zero_()
            for b in self._b[key]:
                b[slot].zero_()
            matrices = adapter.matrices.get(key) if adapter is not None else None
            if matrices is None or adapter is None:
                continue
            rank = adapter.spec.rank
            stack[slot, :, :rank].copy_(matrices.a.unflatten(0, (-1, rank)))
            for target, b in zip(self._b[key], matrices.b, strict=True):
                target[slot, :, :rank].copy_(b * adapter.spec.scaling)

    def _widen(self, rank: int) -> None:
        if rank <= self._rank:
            return
        extra = rank - self._rank
        self._rank = rank
        for key, stack in self._a.items():
            self._a[key] = F.pad(stack, (0, 0, 0, extra))
            self._b[key] = [F.pad(b, (0, extra)) for b in self._b[key]]


def _stack_width(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


class _SlotLinears:
    """All rows use one slot."""

    def __init__(self, table: AdapterTable, slot: int) -> None:
        self._table = table
        self._slot = slot

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        table, key = self._table, (layer, group)
        bias = base_bias(table.base, layer, group)
        merged = table._weights.get(key)
        if merged is not None:
            return F.linear(x, merged[self._slot], bias)
        y = F.linear(x, base_matrix(table.base, layer, group), bias)
        stack = table._a.get(key)
        if stack is None:
            return y
        low = F.linear(x, stack[self._slot].flatten(0, 1))
        start = 0
        for index, b in enumerate(table._b[key]):
            rank = b.shape[2]
            part = low[:, index * rank : (index + 1) * rank]
            y[:, start : start + b.shape[1]] += F.linear(part, b[self._slot])
            start += b.shape[1]
        return y


class _GroupedLinears:
    """Rows are ordered by slot; every slot's rows meet its own matrices in one grouped multiplication."""

    def __init__(self, table: AdapterTable, first: int, ends: torch.Tensor) -> None:
        self._table = table
        self._slots = slice(first, first + len(ends))
        self._ends = ends

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        table, key = self._table, (layer, group)
        bias = base_bias(table.base, layer, group)
        merged = table._weights.get(key)
        if merged is not None:
            y = F.grouped_mm(x, merged[self._slots].transpose(1, 2), offs=self._ends)
            return y if bias is None else y.add_(bias)
        y = F.linear(x, base_matrix(table.base, layer, group), bias)
        stack = table._a.get(key)
        if stack is None:
            return y
        a = stack[self._slots].flatten(1, 2).transpose(1, 2)
        low = F.grouped_mm(x, a, offs=self._ends)
        start = 0
        for index, b in enumerate(table._b[key]):
            rank = b.shape[2]
            part = low[:, index * rank : (index + 1) * rank].contiguous()
            y[:, start : start + b.shape[1]] += F.grouped_mm(
                part, b[self._slots].transpose(1, 2), offs=self._ends
            )
            start += b.shape[1]
        return y
