"""Batches from the API server, and the reasons for which none may come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.config import RunConfig
from hermes_rl.errors import RunFailedError
from hermes_rl.trainer.datums import Assembled
from hermes_rl.trainer.evaluations import Evaluations
from hermes_rl.trainer.tracking import Tracker
from hermes_rl.trainer.watchdogs import Watchdogs
from hermes_rl.trajectories.client import TrajectoriesClient

_POLL_SECONDS = 5.0


class BatchSource:
    """Takes batches from the API server and drains what the environment logged.

    Args:
        api: client of the run's API server.
        evaluations: looked at while waiting, because a failed evaluation ends the run.
        watchdogs: looked at while waiting, because a full disk does.
        config: the run's configuration.
    """

    def __init__(
        self, api: TrajectoriesClient, evaluations: Evaluations, watchdogs: Watchdogs, config: RunConfig
    ) -> None:
        self._api = api
        self._watchdogs = watchdogs
        self._evaluations = evaluations
        self._patience = config.tinker.max_seconds_without_batch
        self._evaluation_patience = config.tinker.max_evaluation_seconds
        self._max_equal = config.tinker.max_equal_score_groups
        self._log_cursor = 0
        self._equal_in_a_row = 0
        self._untaught = Untaught()
        self._has_taught = False
        self._figures: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    async def next_batch(self, step: int) -> list[dict[str, Any]]:
        """The next batch of scored groups, waiting for it.

        Args:
            step: optimizer steps taken so far.

        Raises:
            RunFailedError: none came for ``max_seconds_without_batch``, too many groups in a row had
                equal scores, or the disk is nearly full.
            EnvironmentFailedError: an evaluation failed.
        """
        started = time.monotonic()
        while True:
            self._evaluations.raise_failed()
            batch = await self._api.batch(wait=_POLL_SECONDS)
            if batch is not None:
                return batch
            await self._watchdogs.check_disk(step)
            if (state := await self._api.state())["finished"]:
                raise RunFailedError(
                    f"Someone else than the trainer told the API server that the run is over: "
                    f"{state['finish_reason']}."
                )
            await self._drain()
            if self._equal_in_a_row >= self._max_equal:
                raise RunFailedError(
                    f"{self._equal_in_a_row} groups in a row had equal scores, so no batch could be formed: "
                    "there is nothing to learn from.",
                    hint=_EQUAL_HINT,
                )
            waited = time.monotonic() - started
            if waited > self._patience:
                # It may hold rollouts up, and has a limit of its own.
                if _is_evaluating(state) and waited <= self._patience + self._evaluation_patience:
                    continue
                raise RunFailedError(
                    f"No batch came for {waited:.0f} s. {_describe(state)}",
                    hint="Look at the environment's log; raise max_seconds_without_batch for slow rollouts.",
                )

    def note(self, batch: Assembled) -> None:
        """Look at whether a batch held anything to learn from.

        Raises:
            RunFailedError: ``max_equal_score_groups`` groups in a row, all of batches with nothing, taught
                nothing.
        """
        if batch.sequences:
            self._has_taught = True
            self._equal_in_a_row = 0
            self._untaught = Untaught()
            return
        self._untaught.add(batch)
        if self._untaught.groups >= self._max_equal:
            raise self._untaught.as_error()

    def check_end(self) -> None:
        """Look at a run that has taken all its batches.

        Raises:
            RunFailedError: none of them held anything to learn from, so that nothing was trained.
        """
        if self._untaught.batches and not self._has_taught:
            raise self._untaught.as_error()

    async def _drain(self, tracker: Tracker | None = None) -> None:
        records, self._log_cursor = await self._api.drain_environment_log(self._log_cursor)
        for record in records:
            metrics: Mapping[str, float] = record.get("metrics") or {}
            counts: Mapping[str, float] = record.get("counts") or {}
            for name, value in counts.items():
                self._counts[name] = self._counts.get(name, 0.0) + float(value)
            groups = counts.get("groups", 0)
            equal = counts.get("groups_all_right", 0) + counts.get("groups_all_wrong", 0)
            if groups:
                self._equal_in_a_row = self._equal_in_a_row + int(equal) if equal >= groups else 0
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    self._figures[name] = float(value)
            if tracker is not None and metrics:
                numbers = {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}
                tracker.record("env", int(record.get("step", 0)), numbers)

    async def environment_figures(self, tracker: Tracker) -> dict[str, float]:
        """What the environment reported since the last step.

        ``reward_mean`` is over every rollout, also those of groups that were dropped because their
        scores were equal; ``percent_correct`` is the environment's own ``train/percent_correct`` where it
        logs one, else the share of rollouts with a score above zero.
        """
        await self._drain(tracker)
        counts = self._counts
        figures: dict[str, float] = {}
        rollouts = counts.get("rollouts", 0.0)
        if rollouts:
            mean = counts.get("score_sum", 0.0) / rollouts
            figures["reward_mean"] = mean
            figures["reward_std"] = max(0.0, counts.get("score_square_sum", 0.0) / rollouts - mean**2) ** 0.5
            figures["percent_correct"] = counts.get("correct", 0.0) / rollouts
            for name in ("groups", "groups_mixed", "groups_all_right", "groups_all_wrong", "rollouts"):
                figures[f"sampled_{name}"] = counts.get(name, 0.0)
        if "train/percent_correct" in self._figures:
            figures["percent_correct"] = self._figures["train/percent_correct"]
        self._figures.clear()
        self._counts.clear()
        return figures


@dataclass
class Untaught:
    """Batches in a row that held nothing to learn from."""

    batches: int = 0
    groups: int = 0
    equal_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, batch: Assembled) -> None:
        self.batches += 1
        self.groups += batch.groups
        self.equal_groups += batch.equal_score_groups
        self.dropped.update(batch.dropped)

    def as_error(self) -> RunFailedError:
        """Why nothing was trained, with the numbers, and what to do."""
        if self.equal_groups == self.groups:
            what, hint = f"{self.groups} groups in a row had equal scores", _EQUAL_HINT
        else:
            sequences = ", ".join(f"{count} {_DROPPED[reason]}" for reason, count in self.dropped.items())
            what = (
                f"{self.groups} groups in a row taught nothing: {self.equal_groups} had equal scores; of the "
                f"others' sequences {sequences}"
            )
            hint = (
                "Look at the scores, masks and advantages that the environment sends, and at their lengths."
            )
        return RunFailedError(
            f"{what}. The last {self.batches} batches held nothing to learn from.",
            hint=hint,
        )


_EQUAL_HINT = (
    "Raise group_size, or choose items of another difficulty: the model gets every one right or every one "
    "wrong."
)
_DROPPED = {
    "malformed": "were malformed",
    "too_long": "were longer than max_token_trainer_length",
    "nothing_trained": "had a mask that trains no token",
    "zero_advantage": "had no advantage but zero",
}


def _is_evaluating(state: Mapping[str, Any]) -> bool:
    evaluators = [env for env in state.get("envs", []) if env.get("connected") and env.get("evaluator")]
    return bool(state.get("evaluations_wanted") and evaluators)


def _describe(state: Mapping[str, Any]) -> str:
    environments = [env for env in state.get("envs", []) if env.get("connected")]
    if not environments:
        return "No environment is registered at the API server."
    failures = state.get("failures") or []
    text = (
        f"{len(environments)} environment(s) registered, "
        f"{state.get('queue_sequences', 0)} sequences waiting, "
        f"{(state.get('groups') or {}).get('received', 0)} groups received."
    )
    if failures:
        last = failures[-1]
        text += f" Last failure in {last.get('where')}: {last.get('error')}"
    return text
