"""Which checkpoints of a run stay, and that none vanishes while another run begins with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.config import build_run_config
from hermes_rl.trainer.checkpoints import Checkpoints, read_checkpoints
from hermes_rl.trainer.retention import held_paths, hold, kept_steps, release

ENVIRONMENT = SimpleNamespace(name="x", file_path="/none", class_name="None")


@pytest.mark.parametrize(
    ("newest", "evaluated", "kept"),
    [
        (0, {}, {1, 2, 3, 4, 5}),
        (1, {}, {5}),
        (2, {2: 0.5, 3: 0.5, 5: 0.1}, {2, 4, 5}),
        (2, {5: 0.9}, {4, 5}),
        (2, {0: 0.9, 7: 0.9, 1: 0.2}, {1, 4, 5}),  # no checkpoint of steps 0 and 7
        (9, {1: 0.4}, {1, 2, 3, 4, 5}),
    ],
)
def test_the_newest_and_the_best_stay(newest: int, evaluated: dict[int, float], kept: set[int]) -> None:
    assert kept_steps([3, 1, 2, 5, 4], newest, evaluated) == kept


class TinkerServer:
    """What a Tinker server holds, by path; ``broken`` lets its deletions fail."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.broken = False
        self.model_id = "session:train:0"

    async def _save(self, kind: str, name: str, overwrite: bool) -> SimpleNamespace:
        path = f"tinker://{self.model_id}/{kind}/{name}"
        assert overwrite or path not in self.paths, f"{path} exists already"
        self.paths.add(path)
        await asyncio.sleep(0)
        return SimpleNamespace(path=path)

    def save_state(self, name: str, overwrite: bool = False) -> Any:
        return asyncio.ensure_future(self._save("weights", name, overwrite))

    def save_weights_for_sampler(self, name: str) -> Any:
        return asyncio.ensure_future(self._save("sampler_weights", name, overwrite=True))

    async def delete_checkpoint_from_tinker_path(self, path: str) -> None:
        if self.broken:
            raise OSError("no answer")
        self.paths.remove(path)


def checkpoints(
    run_dir: Path, server: TinkerServer, evaluated: dict[int, float] | None = None, **fields: Any
) -> Checkpoints:
    run_dir.mkdir(exist_ok=True)
    overrides = {"save_checkpoint_interval": 1, "steps_per_eval": 0, "total_steps": 9} | fields
    config = build_run_config(ENVIRONMENT, overrides=overrides, run_id="r")
    client: Any = server
    return Checkpoints(run_dir, client, config, client, {} if evaluated is None else evaluated)


def listed(run_dir: Path) -> list[int]:
    return [saved.step for saved in read_checkpoints(run_dir)]


def at_server(server: TinkerServer) -> list[int]:
    return sorted(int(path[-6:]) for path in server.paths if "/weights/" in path)


async def test_a_run_ends_with_its_newest_its_best_and_its_last(tmp_path: Path) -> None:
    server, evaluated = TinkerServer(), {0: 0.9}
    saving = checkpoints(tmp_path / "r", server, evaluated, keep_checkpoints=2)
    for step in range(1, 9):
        evaluated[step] = 0.5 if step == 3 else 0.1
        await saving.save(step)
    assert listed(tmp_path / "r") == at_server(server) == [3, 7, 8]
    await saving.save_final(9)
    assert listed(tmp_path / "r") == at_server(server) == [3, 8, 9]
    assert len(server.paths) == 4  # the last one's sampler weights
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"checkpoints.json"}


@pytest.mark.parametrize("keep_checkpoints", [0, 1])
@pytest.mark.parametrize("last", [False, True])
async def test_a_save_that_was_broken_off_can_be_made_again(
    tmp_path: Path, keep_checkpoints: int, last: bool
) -> None:
    server = TinkerServer()
    saving = checkpoints(tmp_path / "r", server, keep_checkpoints=keep_checkpoints)
    save = asyncio.create_task(saving.save_final(9) if last else saving.save(9))
    while not server.paths:
        await asyncio.sleep(0)
    save.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    assert not saving.has(9)
    await saving.save(9)
    assert listed(tmp_path / "r") == at_server(server) == [9]


async def test_all_stay_when_nobody_wants_them_removed(tmp_path: Path) -> None:
    server = TinkerServer()
    saving = checkpoints(tmp_path / "r", server, keep_checkpoints=0)
    for step in range(1, 6):
        await saving.save(step)
    assert listed(tmp_path / "r") == at_server(server) == [1, 2, 3, 4, 5]


async def test_a_deletion_that_fails_is_made_up_for(tmp_path: Path) -> None:
    server = TinkerServer()
    saving = checkpoints(tmp_path / "r", server, keep_checkpoints=1)
    await saving.save(1)
    server.broken = True
    await saving.save(2)
    await saving.save(3)
    assert (listed(tmp_path / "r"), at_server(server)) == ([3], [1, 2, 3])
    server.broken = False
    resumed = checkpoints(tmp_path / "r", server, keep_checkpoints=1)
    await resumed.save(4)
    assert listed(tmp_path / "r") == at_server(server) == [4]


async def test_what_was_saved_and_not_yet_listed_when_the_trainer_was_killed_goes(tmp_path: Path) -> None:
    server = TinkerServer()
    saving = checkpoints(tmp_path / "r", server, keep_checkpoints=2)
    await saving.save(1)
    saving._announce("weights/r-000002")
    await server.save_state("r-000002")
    server.model_id = "later:train:0"
    resumed = checkpoints(tmp_path / "r", server, keep_checkpoints=2)
    await resumed.save(2)
    assert listed(tmp_path / "r") == at_server(server) == [1, 2]
    assert "tinker://session:train:0/weights/r-000002" not in server.paths


async def test_a_step_that_is_saved_again_leaves_one_checkpoint(tmp_path: Path) -> None:
    server = TinkerServer()
    await checkpoints(tmp_path / "r", server, keep_checkpoints=2).save_final(9)
    server.model_id = "later:train:0"
    await checkpoints(tmp_path / "r", server, keep_checkpoints=2).save_final(9)
    assert sorted(server.paths) == [
        "tinker://later:train:0/sampler_weights/r-final",
        "tinker://later:train:0/weights/r-000009",
    ]


async def test_what_another_run_begins_with_stays_until_that_run_has_its_own(tmp_path: Path) -> None:
    server = TinkerServer()
    saving = checkpoints(tmp_path / "r", server, keep_checkpoints=1)
    await saving.save(1)
    (tmp_path / "other").mkdir()
    hold(tmp_path / "r", "other", read_checkpoints(tmp_path / "r")[0].state_path)
    await saving.save(2)
    assert listed(tmp_path / "r") == at_server(server) == [1, 2]
    (tmp_path / "other" / "checkpoints.json").write_text("[]")
    await saving.save(3)
    assert listed(tmp_path / "r") == at_server(server) == [3]


def test_a_hold_ends_with_its_run(tmp_path: Path) -> None:
    for run in ("r", "a", "b"):
        (tmp_path / run).mkdir()
        hold(tmp_path / "r", run, f"tinker://s/weights/{run}") if run != "r" else None
    hold(tmp_path / "r", "never-made", "tinker://s/weights/c")
    assert held_paths(tmp_path / "r") == {"tinker://s/weights/a", "tinker://s/weights/b"}
    (tmp_path / "b").rmdir()
    release(tmp_path / "r", "a")
    release(tmp_path / "r", "a")
    assert held_paths(tmp_path / "r") == set()
    assert held_paths(tmp_path / "a") == set()
