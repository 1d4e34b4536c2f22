"""What W&B gets of a run, and what the run loses when W&B's client goes wrong: nothing."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from wandb.proto import wandb_internal_pb2

from hermes_rl.config import build_run_config
from hermes_rl.trainer import tracking
from hermes_rl.trainer.tracking import Tracker
from hermes_rl.trainer.wandb_mirror import WandbMirror, rows_kept

protocol: Any = wandb_internal_pb2
ENVIRONMENT = SimpleNamespace(name="x", file_path="/none", class_name="None")


class Client:
    """Stands where a W&B run does."""

    def __init__(self, refuses: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.refuses = refuses
        self.has_finished = False

    def define_metric(self, *_: Any, **__: Any) -> None:
        return

    def log(self, row: dict[str, Any]) -> None:
        assert self.go_on.wait(60)
        if self.refuses:
            raise OSError("gone")
        self.rows.append(row)

    def finish(self) -> None:
        self.has_finished = True


def test_rows_that_wandb_has_are_not_sent_again_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = build_run_config(ENVIRONMENT, overrides={"wandb_project": "x"})
    tracker = Tracker(tmp_path, config)
    for step in range(1, 12):
        tracker.record("train", step, {"loss": 0.5} | {f"figure-{number}": 1 / 3 for number in range(200)})
    tracker.record("eval", 10, {"eval_count": 8.0})
    assert tracker.close()
    assert rows_kept(tmp_path / "wandb") == {("eval", 10), *(("train", step) for step in range(1, 12))}
    (first,) = (tmp_path / "wandb").glob("offline-run-*")

    tracker = Tracker(tmp_path, config, resume_step=9)
    for step in range(10, 14):
        tracker.record("train", step, {"loss": 0.5})
    tracker.record("eval", 10, {"eval_count": 8.0})
    tracker.record("eval", 5, {"eval_count": 8.0})
    assert tracker.close()
    shutil.move(first, tmp_path / "first")
    assert rows_kept(tmp_path / "wandb") == {("train", 12), ("train", 13), ("eval", 5)}


@pytest.mark.parametrize("damage", [b"", b"nothing that anybody knows", None])
def test_what_wandb_has_is_read_as_far_as_it_was_written(tmp_path: Path, damage: bytes | None) -> None:
    kept = tmp_path / "offline-run-1-x" / "run-x.wandb"
    kept.parent.mkdir()
    if damage is None:
        row = protocol.HistoryRecord(item=[{"key": "step", "value_json": "3"}, {"key": "train/loss"}])
        data = protocol.Record(history=row).SerializeToString()
        whole = b":W&B\xe1\xbe\x00" + b"\x00" * 4 + len(data).to_bytes(2, "little") + b"\x01" + data
        damage = whole + whole[7:-1]
    kept.write_bytes(damage)
    assert rows_kept(tmp_path) == ({("train", 3)} if b"loss" in damage else set())


def test_a_client_that_blocks_costs_rows_but_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hermes_rl.trainer.wandb_mirror._MOST_ROWS", 5)
    client = Client()
    client.go_on.clear()
    mirror = WandbMirror(tmp_path, lambda: client)
    for step in range(50):
        mirror.log("train", step, {"step": step})
    assert not mirror.close(0.05)
    client.go_on.set()
    assert mirror.close(60)
    assert mirror.dropped == 50 - len(client.rows)
    assert len(client.rows) in (5, 6)
    assert caplog.text.count("takes no metrics") == 1


@pytest.mark.parametrize("start", [lambda: None, lambda: Client(refuses=True)])
def test_a_client_that_is_not_there_is_done_at_once(tmp_path: Path, start: Any) -> None:
    mirror = WandbMirror(tmp_path, start)
    for step in range(5000):
        mirror.log("train", step, {})
    assert mirror.close(60)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("0", 0.0), ("1e9", 240.0), ("soon", 60.0), ("-1", 60.0), ("nan", 60.0)]
)
def test_the_wait_for_wandb_is_bounded(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(tracking.WANDB_FINISH_VARIABLE, text)
    assert tracking._finish_seconds() == seconds


@pytest.fixture
def stopped_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """The processes that the test stops; they go on at its end."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    stopped: list[psutil.Process] = []
    yield stopped
    for process in stopped:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def test_a_wandb_process_that_is_stopped_does_not_stop_the_run(
    tmp_path: Path, stopped_wandb: list[psutil.Process]
) -> None:
    tracker = Tracker(tmp_path, build_run_config(ENVIRONMENT, overrides={"wandb_project": "x"}))
    deadline = time.monotonic() + 120
    tracker.record("train", 0, {})
    while tracker._wandb._rows.qsize():  # the client is there when it has been taken
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped_wandb += [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]
    assert stopped_wandb
    for process in stopped_wandb:
        process.send_signal(signal.SIGSTOP)
    figures = {f"figure-{number}": 1.0 / 3.0 for number in range(300)}

    def record() -> None:
        for step in range(1, 2001):
            tracker.record("train", step, figures)

    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    recording.join(120)
    assert not recording.is_alive(), "the trainer waits for W&B"
    lines = (tmp_path / tracking.METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(2001))
    assert tracker._wandb.dropped > 0
    for process in stopped_wandb:
        process.send_signal(signal.SIGCONT)
    assert tracker.close()
