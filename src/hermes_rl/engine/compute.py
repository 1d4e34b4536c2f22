"""The compute thread: everything that touches model weights runs here, one piece at a time.

Training work is cut into pieces (micro-batches); models take turns, request by request or, where one is
long, after some seconds. Sampling goes one decode step at a time. When both have work, whichever has had
less of the thread's time lately goes next, so that neither starves the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hermes_rl.engine.decoding import DecodeBatch, SampleJob

logger = logging.getLogger(__name__)

TURN_S = 2.0
"""How long one model's training may go on while others wait. Taking turns more often would make every request
wait for all others, each with half-made gradients in memory."""

Work = Callable[[], "Any | Iterator[Any]"]
Done = Callable[[Any, BaseException | None], None]


@dataclass
class _Task:
    work: Work
    done: Done
    pieces: Iterator[Any] | None = None
    turn_s: float = 0.0


class ComputeThread:
    """Runs training tasks and the decode batch.

    Tasks of one queue (a training model) run in order; queues take turns.
    """

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch
        self._queues: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._arrivals: deque[SampleJob] = deque()
        self._cancelled: deque[SampleJob] = deque()
        self._forgotten: deque[object] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._spent = {"train": 0.0, "sample": 0.0}
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the piece at hand finish, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def submit(self, queue: str, work: Work, done: Done) -> None:
        """Run ``work`` after all earlier work of ``queue``.

        ``work`` returns a result, or an iterator whose last item is the result. ``done`` is called on the
        compute thread with the result or the error.
        """
        with self._wake:
            self._queues.setdefault(queue, deque()).append(_Task(work, done))
            self._wake.notify()

    def sample(self, job: SampleJob) -> None:
        """Add a sampling request to the running batch."""
        with self._wake:
            self._arrivals.append(job)
            self._wake.notify()

    def cancel(self, job: SampleJob) -> None:
        """Take a sampling request out of the batch."""
        with self._wake:
            job.cancelled = True
            self._cancelled.append(job)
            self._wake.notify()

    def pending_samples(self) -> int:
        """Requests that have not begun."""
        return len(self._arrivals) + len(self._batch.waiting)

    def discard(self, queue: str, reason: Exception) -> None:
        """Have a queue's work that has not begun fail with ``reason`` instead."""

        def fail() -> None:
            raise reason

        with self._wake:
            for task in self._queues.get(queue, ()):
                if task.pieces is None:
                    task.work = fail

    def forget(self, key: object) -> None:
        """Free what sampling keeps of the weights with this key, once nobody samples from them."""
        with self._wake:
            self._forgotten.append(key)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (
                    self._stopping or self._arrivals or self._queues or self._forgotten or self._batch.busy
                ):
                    self._wake.wait()
                if self._stopping:
                    break
                while self._arrivals:
                    self._batch.waiting.append(self._arrivals.popleft())
                while self._cancelled:
                    self._batch.watch(self._cancelled.popleft())
                while self._forgotten:
                    self._batch.table.drop(self._forgotten.popleft())
                training = bool(self._queues)
            sampling = self._batch.busy
            if not (training or sampling):
                continue
            if training and sampling:
                turn = "train" if self._spent["train"] <= self._spent["sample"] else "sample"
            else:
                turn = "train" if training else "sample"
                self._spent = {"train": 0.0, "sample": 0.0}
            begin = time.perf_counter()
            if turn == "train":
                self._train_piece()
            else:
                self._decode()
            self._spent[turn] += time.perf_counter() - begin
        self._batch.abort("the engine is stopping")

    def _decode(self) -> None:
        try:
            self._batch.advance()
        except Exception as error:
            logger.exception("sampling failed")
            self._batch.abort(f"sampling failed: {error}")

    def _train_piece(self) -> None:
        with self._wake:
            name, queue = next(iter(self._queues.items()))
            task = queue[0]
        result, failure, finished = None, None, False
        begin = time.perf_counter()
        try:
            if task.pieces is None:
                result = task.work()
                if isinstance(result, Iterator):
                    task.pieces, result = result, None
                else:
                    finished = True
            if task.pieces is not None:
                result = next(task.pieces)
                finished = result is not None
        except Exception as error:  # noqa: BLE001 - handed to the caller of the task
            failure, finished = error, True
        task.turn_s += time.perf_counter() - begin
        with self._wake:
            if finished:
                queue.popleft()
            if not queue:
                self._queues.pop(name, None)
            elif finished or task.turn_s > TURN_S:
                task.turn_s = 0.0
                self._queues.move_to_end(name)
        if finished:
            task.done(result, failure)
