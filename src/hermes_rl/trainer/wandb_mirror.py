"""Weights & Biases beside a run, at arm's length: the trainer never waits for its client.

That is called in a thread of its own, which takes rows from a bounded queue. A client that blocks, as it does
when its process is stopped, costs rows in W&B and nothing else; ``metrics.jsonl`` has them all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST_ROWS = 1000
_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768


class WandbMirror:
    """Passes the rows of one run on to W&B.

    A run that was resumed repeats the steps since its checkpoint. W&B cannot take rows back, so those of
    which it has a row already are not sent again.

    Args:
        run_dir: the run's folder.
        start: begins the W&B run, called in the mirror's thread; None when there is none.
    """

    def __init__(self, run_dir: Path, start: Callable[[], Any]) -> None:
        self._start = start
        self._folder = run_dir / "wandb"
        self._rows: queue.Queue[tuple[str, int, dict[str, Any]] | None] = queue.Queue(_MOST_ROWS)
        self._has_ended = False
        self.dropped = 0
        """Rows that found no room, because the client had not taken those before."""
        self._thread = threading.Thread(target=self._pass_on, name="wandb", daemon=True)
        self._thread.start()

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Pass a row on, at once and without waiting.

        Args:
            kind: kind of the record.
            step: optimizer steps taken.
            row: what W&B gets.
        """
        if self._has_ended:
            return
        try:
            self._rows.put_nowait((kind, step, row))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    "Weights & Biases takes no metrics: %d rows wait, and further ones are left out there. "
                    "The run goes on.",
                    _MOST_ROWS,
                )

    def close(self, seconds: float) -> bool:
        """Finish the W&B run, which sends what is left.

        Returns:
            Whether it is done within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        if not self._has_ended:
            with contextlib.suppress(queue.Full):
                self._rows.put(None, timeout=seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.dropped:
            logger.warning("Weights & Biases lacks %d rows, which metrics.jsonl has.", self.dropped)
        return not self._thread.is_alive()

    def _pass_on(self) -> None:
        try:
            kept = rows_kept(self._folder)
            run = self._start()
            if run is not None:
                self._pass_on_to(run, kept)
        except Exception as error:  # noqa: BLE001  (whatever W&B raises, the run goes on without it)
            logger.warning("Weights & Biases stopped taking metrics (%s); the run goes on.", error)
        finally:
            self._has_ended = True

    def _pass_on_to(self, run: Any, kept: set[tuple[str, int]]) -> None:
        # The client counts its calls; what a row belongs to is the optimizer step.
        run.define_metric("*", step_metric="step")
        while (item := self._rows.get()) is not None:
            kind, step, row = item
            if (kind, step) not in kept:
                run.log(row)
        run.finish()


def rows_kept(folder: Path) -> set[tuple[str, int]]:
    """Kind and step of the rows that W&B's client has kept of a run's earlier starts, online or offline.

    What it had taken and not yet written when it was killed is not among them.

    Args:
        folder: where the client keeps its files.
    """
    kept: set[tuple[str, int]] = set()
    for path in folder.glob("*run-*/run-*.wandb"):
        try:
            from wandb.proto import wandb_internal_pb2

            protocol: Any = wandb_internal_pb2
            for data in _records(path.read_bytes()):
                record = protocol.Record.FromString(data)
                names = {
                    item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                }
                if "step" in names:
                    step = int(json.loads(names["step"]))
                    kept |= {(name.partition("/")[0], step) for name in names if "/" in name}
        except Exception as error:  # noqa: BLE001  (a format of the client's own: then steps may stand twice)
            logger.warning("What Weights & Biases has of this run already is not known (%s).", error)
    return kept


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file, which is a log of LevelDB's format after a header of its own."""
    position, parts = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += _HEADER_BYTES
        parts += data[position : position + size]
        position += size
        if position > len(data) or kind not in (1, 2, 3, 4):
            return  # cut off when the client was killed
        if kind in (1, 4):  # the whole record, or its last part
            yield parts
            parts = b""
