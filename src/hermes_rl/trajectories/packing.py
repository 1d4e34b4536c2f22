"""Which groups of the queue make the next batch.

Atropos's rules (``atroposlib.api.utils``), computed in one pass over the queue:

* a batch holds exactly ``batch_size`` sequences, and a group is never split;
* let *M* be the size of the largest group in the queue; groups of one size are taken in *packs* of
  together exactly *M* sequences, in the order in which the packs become complete;
* environments with a minimum allocation come first, up to their minimum; the rest of the batch is filled
  in queue order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A group as far as packing is concerned."""

    @property
    def size(self) -> int:
        """Number of sequences."""
        ...

    @property
    def env_id(self) -> int | None:
        """The environment that sent the group, if it said so."""
        ...


G = TypeVar("G", bound=Sized)


def take_batch(queue: Sequence[G], batch_size: int) -> tuple[list[G], list[G]] | None:
    """The next batch, without minimum allocations.

    Args:
        queue: groups, oldest first.
        batch_size: sequences in a batch.

    Returns:
        ``(batch, rest)``, or None when no batch can be formed yet.
    """
    if not queue or sum(group.size for group in queue) < batch_size:
        return None
    largest = max(group.size for group in queue)
    incomplete: dict[int, list[int]] = {}
    chosen: list[int] = []
    total = 0
    for index, group in enumerate(queue):
        pack = incomplete.setdefault(group.size, [])
        pack.append(index)
        if len(pack) * group.size != largest:
            continue
        for member in pack:
            chosen.append(member)
            total += group.size
            if total == batch_size:
                return _split(queue, chosen)
            if total > batch_size:
                return None
        incomplete[group.size] = []
    return None


def take_batch_with_minimums(
    queue: Sequence[G], batch_size: int, minimums: Mapping[int, float]
) -> tuple[list[G], list[G]] | None:
    """The next batch, when some environments have a minimum share of every batch.

    Args:
        queue: groups, oldest first.
        batch_size: sequences in a batch.
        minimums: env_id → share of the batch (0 to 1), in order of registration.

    Returns:
        ``(batch, rest)``, or None when no batch can be formed yet.
    """
    if not queue:
        return None
    if not minimums:
        return take_batch(queue, batch_size)
    packed, present = _packs_by_environment(queue)

    wanted: dict[int, int] = {}
    for env_id, share in minimums.items():
        sequences = int(batch_size * share)
        if sequences > 0:
            if env_id not in present or not packed.get(env_id):
                return None
            wanted[env_id] = sequences
    total_wanted = sum(wanted.values())
    if total_wanted > batch_size:
        scale = batch_size / total_wanted
        for env_id, sequences in wanted.items():
            smallest = min(queue[index].size for index in packed[env_id])
            wanted[env_id] = max(smallest, int(sequences * scale))

    chosen: list[int] = []
    total = 0
    for env_id, sequences in wanted.items():
        taken = 0
        for index in packed[env_id]:
            if taken >= sequences:
                break
            size = queue[index].size
            if total + size <= batch_size:
                chosen.append(index)
                taken += size
                total += size
    if total < batch_size:
        already = set(chosen)
        packable = {index for indices in packed.values() for index in indices}
        for index, group in enumerate(queue):
            if index in packable and index not in already and total + group.size <= batch_size:
                chosen.append(index)
                total += group.size
                if total == batch_size:
                    break
    return _split(queue, chosen) if total == batch_size else None


def combine_to_size(sizes: Sequence[int], target: int) -> list[int]:
    """Indices of groups that together hold exactly ``target`` sequences.

    First in, first out where that works; otherwise any exact combination (subset sum, a bit set a group).

    Args:
        sizes: sizes of one environment's waiting groups, oldest first.
        target: sequences wanted.

    Returns:
        Ascending indices, or an empty list when no combination fits.
    """
    greedy: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            greedy.append(index)
            total += size
            if total == target:
                return greedy

    mask = (1 << (target + 1)) - 1
    reachable = [1]  # bit s of reachable[i]: the first i groups can make a sum of s
    for size in sizes:
        before = reachable[-1]
        reachable.append((before | before << size if size <= target else before) & mask)
    if not reachable[-1] >> target & 1:
        return []
    chosen: list[int] = []
    left = target
    for index in range(len(sizes) - 1, -1, -1):
        size = sizes[index]
        if size <= left and reachable[index] >> (left - size) & 1:
            chosen.append(index)
            left -= size
    return chosen[::-1]


def _packs_by_environment(queue: Sequence[Sized]) -> tuple[dict[int, list[int]], set[int]]:
    largest = max(group.size for group in queue)
    incomplete: dict[tuple[int, int], list[int]] = {}
    packed: dict[int, list[int]] = {}
    for index, group in enumerate(queue):
        if group.env_id is None:
            continue
        ready = packed.setdefault(group.env_id, [])
        pack = incomplete.setdefault((group.env_id, group.size), [])
        pack.append(index)
        if len(pack) * group.size == largest:
            ready.extend(pack)
            pack.clear()
    return packed, set(packed)


def _split(queue: Sequence[G], chosen: list[int]) -> tuple[list[G], list[G]]:
    taken = set(chosen)
    return [queue[index] for index in chosen], [group for i, group in enumerate(queue) if i not in taken]
