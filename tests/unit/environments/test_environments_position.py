"""What a resumed run loses if these fail: the environment's position in its items."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv

from hermes_rl.environments import position
from hermes_rl.errors import EnvironmentFailedError


@pytest.fixture(autouse=True)
def _atropos_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseEnv, "save_checkpoint", BaseEnv.save_checkpoint)


class CountingEnv(BaseEnv):
    """Keeps a position, by Atropos's means alone."""

    position = 0

    async def get_next_item(self) -> None:
        return None

    async def evaluate(self, *_: Any, **__: Any) -> None:
        return None

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "position": self.position})


class ParticularEnv(CountingEnv):
    """Wants of its checkpoint what is not in it."""

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        raise KeyError("generation")


def environment(folder: Path, step: int, kind: type[CountingEnv] = CountingEnv) -> Any:
    made: Any = object.__new__(kind)
    made.checkpoint_dir, made.wandb_prepend, made.curr_step = str(folder), "count_0", step
    position.install(made)
    return made


def save(folder: Path, **positions: str) -> Path:
    kept = folder / "env_checkpoints" / "count_0"
    kept.mkdir(parents=True)
    for name, text in positions.items():
        (kept / f"{name.replace('_', '-')}.json").write_text(text)
    return kept


@pytest.mark.parametrize(("begins_at", "expected"), [(12, 90), (11, 90), (9, 90), (8, 40), (3, 0)])
def test_it_goes_on_from_the_newest_checkpoint_up_to_the_steps_beginning(
    tmp_path: Path, begins_at: int, expected: int
) -> None:
    save(tmp_path, step_4='{"position": 40}', step_9='{"position": 90}', step_25='{"position": 250}')
    env = environment(tmp_path, begins_at)
    env.load_checkpoint()
    assert (env.position, env.curr_step) == (expected, begins_at)


@pytest.mark.parametrize("damage", ["", '{"posit', "[1]", "\x00\x00"])
@pytest.mark.parametrize("begins_at", [9, 10])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str, begins_at: int) -> None:
    save(tmp_path, step_4='{"position": 40}', step_9=damage)
    env = environment(tmp_path, begins_at)
    env.load_checkpoint()
    assert env.position == 40


def test_a_run_with_none_but_a_damaged_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    save(tmp_path, step_9="")
    env = environment(tmp_path, 9)
    env.load_checkpoint()
    assert env.position == 0


def test_an_environment_that_cannot_load_its_checkpoint_is_named(tmp_path: Path) -> None:
    save(tmp_path, step_9="{}")
    with pytest.raises(EnvironmentFailedError, match="load_checkpoint raised KeyError"):
        environment(tmp_path, 9, ParticularEnv).load_checkpoint()


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(tmp_path, step_9='{"position": 90}')
    env = environment(tmp_path, 9)
    env.position = 95

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        broken.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            env.save_checkpoint(9)
    assert json.loads((kept / "step-9.json").read_text()) == {"position": 90}
    env.save_checkpoint(9)
    assert json.loads((kept / "step-9.json").read_text()) == {"position": 95}
