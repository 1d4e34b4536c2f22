"""Where an environment was: the checkpoints that Atropos writes for it, kept whole and found again.

``BaseEnv.load_checkpoint`` looks for the file of exactly the step that the run begins at, and finds none
where the environment was stopped a little before the trainer; ``save_checkpoint`` writes in place, so that
a full disk leaves half a file. What a subclass overrides is called as overridden.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.envs.base import BaseEnv

from hermes_rl.config import write_private
from hermes_rl.environments.loading import describe
from hermes_rl.errors import EnvironmentFailedError

log = logging.getLogger("hermes_rl.environments")

_FILE = re.compile(r"step-(\d+)\.json")


def install(env: Any) -> None:
    """Make ``env`` load the newest checkpoint up to its step, and write each of them whole or not at all."""
    setattr(BaseEnv, "save_checkpoint", _save)  # noqa: B010 - a method is replaced, on purpose
    load: Callable[..., Any] = env.load_checkpoint
    env.load_checkpoint = lambda *args, **kwargs: _load_newest(env, lambda: load(*args, **kwargs))


def _folder(env: Any) -> Path:
    return Path(env.checkpoint_dir) / "env_checkpoints" / env.wandb_prepend


def _save(self: Any, step: int, data: dict[str, Any] | None = None) -> None:
    """As ``BaseEnv.save_checkpoint``, atomically."""
    if data is None:
        return
    folder = _folder(self)
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / f"step-{step}.json", json.dumps(data))


def _load_newest(env: Any, load: Callable[[], Any]) -> Any:
    """Call ``load`` as at the step of the newest whole checkpoint at or before ``env.curr_step``.

    Without one it is called as at ``env.curr_step``: an environment may keep files of its own.

    Raises:
        EnvironmentFailedError: the environment's own code raised.
    """
    begins_at = env.curr_step
    step = _newest_whole(_folder(env), begins_at)
    if step is None:
        log.warning("there is no position of the environment to go on from at step %s", begins_at)
        if (_folder(env) / f"step-{begins_at}.json").exists():  # the damaged one, which load() would read
            return None
    env.curr_step = begins_at if step is None else step
    try:
        returned = load()
    except Exception as error:
        raise EnvironmentFailedError(f"load_checkpoint raised {describe(error)}.") from error
    finally:
        env.curr_step = begins_at
    if step is not None:
        log.info("the environment goes on from its position at step %s of %s", step, begins_at)
    return returned


def _newest_whole(folder: Path, begins_at: int) -> int | None:
    found = [match for path in folder.glob("step-*.json") if (match := _FILE.fullmatch(path.name))]
    for step in sorted((int(match[1]) for match in found), reverse=True):
        if step > begins_at:
            continue  # of steps that were lost and are taken again
        path = folder / f"step-{step}.json"
        try:
            if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                raise ValueError("it does not hold a mapping")
        except (OSError, ValueError) as error:
            log.warning("%s is damaged (%s); the checkpoint before it is taken", path.name, error)
            continue
        return step
    return None
