"""Checkpoints of a run: where they are, which to resume from, and which to remove."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import tinker

from hermes_rl.config import RunConfig, write_private
from hermes_rl.trainer.retention import CHECKPOINTS_FILE, held_paths, kept_steps

logger = logging.getLogger(__name__)

DOOMED_FILE = "checkpoints.doomed.json"
"""Paths that are off the list, or not yet on it, and may lie at the server."""
_DELETE_SECONDS = 15.0


@dataclass(frozen=True)
class Checkpoint:
    """One saved state.

    Attributes:
        step: optimizer steps taken.
        state_path: ``tinker://`` path of weights and optimizer, to resume from.
        sampler_path: ``tinker://`` path of the weights alone, to sample from or export.
    """

    step: int
    state_path: str
    sampler_path: str | None = None


def read_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first; empty when there are none."""
    path = run_dir / CHECKPOINTS_FILE
    if not path.exists():
        return []
    return [Checkpoint(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


class Checkpoints:
    """Saves checkpoints through the Tinker service, keeps their list in the run's folder, removes old ones.

    The newest ``keep_checkpoints`` stay, the one with the best evaluation, and those that other runs begin
    with. What goes is first taken off the list, then deleted at the server; what could not be deleted is
    tried again with the next checkpoint, also by a resumed run.

    Args:
        run_dir: the run's folder.
        client: the training client.
        config: the run's configuration.
        rest: deletes checkpoints.
        evaluated: share correct of the evaluations so far, by step; read anew for each checkpoint, by when
            those of earlier steps are there.
    """

    def __init__(
        self,
        run_dir: Path,
        client: tinker.TrainingClient,
        config: RunConfig,
        rest: tinker.RestClient,
        evaluated: Mapping[int, float],
    ) -> None:
        self._run_dir = run_dir
        self._client = client
        self._rest = rest
        self._evaluated = evaluated
        self._run_id = config.run.run_id
        self._every = config.tinker.save_checkpoint_interval
        self._newest = config.tinker.keep_checkpoints
        self._total = config.env.total_steps
        self._saved = read_checkpoints(run_dir)

    def due(self, step: int) -> bool:
        """Every ``save_checkpoint_interval`` steps, but the last step, whose state is saved anyway."""
        return self._every > 0 and step % self._every == 0 and step < self._total

    def has(self, step: int) -> bool:
        """Whether the state after ``step`` optimizer steps is saved already."""
        return any(saved.step == step for saved in self._saved)

    async def save(self, step: int) -> Checkpoint:
        """Save weights and optimizer state.

        The same name again holds the same state: that of a save which was broken off before it was listed.
        """
        name = f"{self._run_id}-{step:06d}"
        self._announce(f"weights/{name}")
        saved = await self._client.save_state(name, overwrite=True)
        checkpoint = Checkpoint(step, saved.path)
        await self._note(checkpoint)
        return checkpoint

    async def save_final(self, step: int) -> Checkpoint:
        """Save the state and, for use after the run, the sampler's weights."""
        name, final = f"{self._run_id}-{step:06d}", f"{self._run_id}-final"
        self._announce(f"weights/{name}", f"sampler_weights/{final}")
        state = self._client.save_state(name, overwrite=True)
        weights = self._client.save_weights_for_sampler(final)
        checkpoint = Checkpoint(step, (await state).path, (await weights).path)
        await self._note(checkpoint)
        return checkpoint

    def _announce(self, *names: str) -> None:
        """Note what is about to be saved, so that a run that is killed before it is listed leaves nothing."""
        if self._newest > 0:
            paths = {f"tinker://{self._client.model_id}/{name}" for name in names}
            self._write_doomed(self._doomed() | paths)

    async def _note(self, checkpoint: Checkpoint) -> None:
        others = [saved for saved in self._saved if saved.step != checkpoint.step]
        replaced = [saved for saved in self._saved if saved.step == checkpoint.step]
        self._saved = sorted([*others, checkpoint], key=lambda saved: saved.step)
        self._write_list()
        if self._newest > 0:
            await self._remove(replaced)

    async def _remove(self, replaced: list[Checkpoint]) -> None:
        kept = kept_steps([saved.step for saved in self._saved], self._newest, self._evaluated)
        held = held_paths(self._run_dir)
        everything = self._saved
        stays = [saved for saved in everything if saved.step in kept or saved.state_path in held]
        going = [saved for saved in [*everything, *replaced] if saved not in stays]
        if going:
            self._write_doomed(self._doomed() | {path for saved in going for path in _paths(saved)})
            self._saved = stays
            self._write_list()
            late = held_paths(self._run_dir) - held
            if late:  # chosen by another run while the list was rewritten
                self._saved = [saved for saved in everything if saved in stays or saved.state_path in late]
                self._write_list()
        await self._delete_doomed()

    async def _delete_doomed(self) -> None:
        doomed, held = self._doomed(), held_paths(self._run_dir)
        listed = {path for saved in self._saved for path in _paths(saved)}
        left = doomed - listed
        for path in sorted(left - held):
            try:
                async with asyncio.timeout(_DELETE_SECONDS):
                    await self._rest.delete_checkpoint_from_tinker_path(path)
            except (tinker.NotFoundError, tinker.BadRequestError) as error:
                logger.info("%s is not there to be deleted: %s", path, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
                logger.warning("%s could not be deleted; with the next checkpoint again: %r", path, error)
                break
            left.discard(path)
        if left != doomed:
            self._write_doomed(left)

    def _write_list(self) -> None:
        text = json.dumps([asdict(saved) for saved in self._saved], indent=1)
        write_private(self._run_dir / CHECKPOINTS_FILE, text)

    def _doomed(self) -> set[str]:
        try:
            return set(json.loads((self._run_dir / DOOMED_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return set()

    def _write_doomed(self, paths: set[str]) -> None:
        if paths:
            write_private(self._run_dir / DOOMED_FILE, json.dumps(sorted(paths), indent=1))
        else:
            (self._run_dir / DOOMED_FILE).unlink(missing_ok=True)


def _paths(checkpoint: Checkpoint) -> list[str]:
    return [path for path in (checkpoint.state_path, checkpoint.sampler_path) if path is not None]
