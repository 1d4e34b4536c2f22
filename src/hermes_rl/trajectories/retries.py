"""Recognising a post that repeats one already taken.

An environment that lost the answer to its post sends it again (atroposlib: up to three times). Counting
the group twice would train on it twice, but two *honest* groups can be identical too: a small, peaked
model asked the same question twice gives the same tokens, log probabilities and scores. So equal content
alone is never enough. A post is a retry only when

* it carries an ``Idempotency-Key`` header that was seen already (our environment runner sends one), or
* its body equals that of a post whose sender closed the connection without reading the answer, which TCP
  tells by a reset. A sender that got no answer has a reason to repeat itself, and one that got it has none.

(A post whose sender has hung up before it is taken is not taken at all, so its repetition is the first.)
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

Peer = tuple[str, int]
"""The other end of a connection: host and port."""


class Retries:
    """What was answered already, and which answers were never read.

    Args:
        window_s: seconds for which a post is remembered.
        capacity: most posts remembered of either kind.
        clock: monotonic seconds.
    """

    def __init__(
        self, window_s: float = 600.0, capacity: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window = window_s
        self._capacity = capacity
        self._clock = clock
        self._keys: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._unread: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._answered: OrderedDict[Peer, tuple[bytes, bytes]] = OrderedDict()
        self._hung_up: set[Peer] = set()

    def earlier_answer(self, key: str | None, body: bytes) -> bytes | None:
        """The answer that this post was given before, when it is surely a repetition."""
        self._expire()
        if key is not None:
            known = self._keys.get(key)
            return known[1] if known else None
        known = self._unread.pop(_digest(body), None)
        return known[1] if known else None

    def remember(self, key: str, answer: bytes) -> None:
        """A post with an idempotency key was taken and given ``answer``."""
        self._keys[key] = (self._clock(), answer)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def answered(self, peer: Peer, body: bytes, answer: bytes) -> None:
        """A post was taken and its answer is on the way to ``peer``."""
        self._answered.pop(peer, None)
        self._answered[peer] = (_digest(body), answer)
        while len(self._answered) > self._capacity:
            self._answered.popitem(last=False)

    def hung_up(self, peer: Peer) -> None:
        """The other end has closed a connection that is not over yet: nothing more is taken from it."""
        self._hung_up.add(peer)

    def has_hung_up(self, peer: Peer) -> bool:
        """Whether it has."""
        return peer in self._hung_up

    def connection_lost(self, peer: Peer, *, unread: bool) -> None:
        """A connection is over.

        Args:
            peer: its other end.
            unread: whether the last answer was not sent any more, or the other end closed with it unread.
        """
        self._hung_up.discard(peer)
        last = self._answered.pop(peer, None)
        if last is not None and unread:
            digest, answer = last
            self._unread[digest] = (self._clock(), answer)
            while len(self._unread) > self._capacity:
                self._unread.popitem(last=False)

    def _expire(self) -> None:
        oldest = self._clock() - self._window
        for remembered in (self._keys, self._unread):
            while remembered and next(iter(remembered.values()))[0] < oldest:
                remembered.popitem(last=False)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
