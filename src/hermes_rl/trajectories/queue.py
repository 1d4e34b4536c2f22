"""The queue of scored groups: what was accepted, what waits, what was handed out, what was dropped.

Groups are kept as the JSON they will be sent as: a batch is a join of byte strings, and a queued token
costs its digits rather than a Python object.

Kept at every moment: ``received == delivered + formed + queued + buffered + dropped``, in groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hermes_rl.trajectories.packing import combine_to_size, take_batch, take_batch_with_minimums

QUEUE_FULL = "queue_full"
TOO_LARGE = "larger_than_group_size"
UNMATCHED = "no_partner_of_fitting_size"
DUPLICATE = "duplicate_of_a_retried_post"

_BUFFERED_GROUPS_PER_ENVIRONMENT = 256


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """One group: its JSON, its number of sequences, who sent it, whether all its scores are equal."""

    payload: bytes
    size: int
    env_id: int | None
    equal_scores: bool = False


@dataclass(slots=True)
class GroupQueue:
    """Scored groups between environments and trainer.

    Args:
        max_sequences: most sequences held; a group beyond it is dropped.
        max_bytes: most bytes of JSON held.
    """

    max_sequences: int = 1024
    max_bytes: int = 1 << 30
    queued: list[QueuedGroup] = field(default_factory=list)
    formed: list[list[QueuedGroup]] = field(default_factory=list)
    buffers: dict[int, list[QueuedGroup]] = field(default_factory=dict)
    latest: QueuedGroup | None = None
    received: int = 0
    delivered: int = 0
    equal_scores: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    bytes: int = 0

    def accept(self, group: QueuedGroup, expected_size: int | None) -> str:
        """Take one group in.

        Args:
            group: the group.
            expected_size: the group size its environment registered, or None when it is not known.

        Returns:
            ``"received"``, ``"buffered"`` (it waits for others to make up one full group) or
            ``"dropped"``.
        """
        self.received += 1
        self.equal_scores += group.equal_scores
        if expected_size is not None and group.size > expected_size:
            self.dropped[TOO_LARGE] += 1
            return "dropped"
        if (
            self.sequences + group.size > self.max_sequences
            or self.bytes + len(group.payload) > self.max_bytes
        ):
            self.dropped[QUEUE_FULL] += 1
            return "dropped"
        self.sequences += group.size
        self.bytes += len(group.payload)
        if expected_size is None or group.env_id is None or group.size == expected_size:
            self._enqueue(group)
            return "received"
        buffer = self.buffers.setdefault(group.env_id, [])
        buffer.append(group)
        chosen = combine_to_size([waiting.size for waiting in buffer], expected_size)
        for index in chosen:
            self._enqueue(buffer[index])
        for index in reversed(chosen):
            del buffer[index]
        if len(buffer) > _BUFFERED_GROUPS_PER_ENVIRONMENT:
            self._forget(buffer.pop(0))
            self.dropped[UNMATCHED] += 1
        return "buffered"

    def note_duplicate(self) -> None:
        """Count a group that was recognised as the retry of one already taken."""
        self.received += 1
        self.dropped[DUPLICATE] += 1

    def form_batch(self, batch_size: int, minimums: Mapping[int, float]) -> bool:
        """Move the next batch from the queue to ``formed``; False when there is none yet."""
        found = (
            take_batch_with_minimums(self.queued, batch_size, minimums)
            if minimums
            else take_batch(self.queued, batch_size)
        )
        if found is None:
            return False
        batch, self.queued = found
        self.formed.append(batch)
        return True

    def pop_formed(self) -> bytes | None:
        """The oldest formed batch as a JSON array of groups; None when there is none."""
        if not self.formed:
            return None
        batch = self.formed.pop(0)
        for group in batch:
            self._forget(group)
        self.delivered += len(batch)
        return b"[" + b",".join(group.payload for group in batch) + b"]"

    def buffered_sequences(self, env_id: int) -> int:
        """Sequences of ``env_id`` that wait for others to make up one full group."""
        return sum(group.size for group in self.buffers.get(env_id, ()))

    def counts(self) -> dict[str, object]:
        """The books, in groups."""
        return {
            "received": self.received,
            "delivered": self.delivered,
            "formed": sum(len(batch) for batch in self.formed),
            "queued": len(self.queued),
            "buffered": sum(len(buffer) for buffer in self.buffers.values()),
            "dropped": dict(self.dropped),
            "equal_scores": self.equal_scores,
        }

    def _enqueue(self, group: QueuedGroup) -> None:
        self.queued.append(group)
        self.latest = group

    def _forget(self, group: QueuedGroup) -> None:
        self.sequences -= group.size
        self.bytes -= len(group.payload)
