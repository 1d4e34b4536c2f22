"""When the environment is asked to evaluate, and what it answers."""

from __future__ import annotations

import asyncio
import logging
import time

from hermes_rl.config import RunConfig
from hermes_rl.errors import EnvironmentFailedError
from hermes_rl.trainer.sampling import Sampler
from hermes_rl.trainer.tracking import Tracker
from hermes_rl.trajectories.client import TrajectoriesClient

logger = logging.getLogger(__name__)

_POLL_SECONDS = 30.0
_UNANSWERED_SECONDS = 0.2
_EVALUATOR_CHECK_SECONDS = 2.0
_DELIVERY_SECONDS = 60.0
"""What an environment may take longer than ``max_evaluation_seconds`` to say that an evaluation did."""


class Evaluations:
    """Asks for an evaluation when one is due and records its result when it comes.

    An evaluation runs on the weights of its step, which stay pinned until it has answered; training
    goes on meanwhile.

    Args:
        api: client of the run's API server.
        sampler: where weights are pinned.
        tracker: where results go.
        config: the run's configuration.
    """

    def __init__(
        self, api: TrajectoriesClient, sampler: Sampler, tracker: Tracker, config: RunConfig
    ) -> None:
        self._api = api
        self._sampler = sampler
        self._tracker = tracker
        self._every = config.env.steps_per_eval
        self._only = config.run.evaluation_steps
        self._total = config.env.total_steps
        self._limit = config.tinker.max_evaluation_seconds
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._evaluated: set[int] = set()
        self._ending = False

    def due(self, step: int) -> bool:
        """Before the first step, after the last, and between, regularly or at ``evaluation_steps``."""
        if self._only is not None:
            regular = step in self._only
        else:
            regular = self._every > 0 and step % self._every == 0
        return step not in self._evaluated and (step in (0, self._total) or regular)

    def already_done(self, steps: set[int]) -> None:
        """Evaluations that need not be asked for: they are recorded."""
        self._evaluated |= steps

    async def publish(self, step: int) -> None:
        """Announce the weights of ``step``; ask for an evaluation when one is due."""
        due = self.due(step)
        if due:
            self._evaluated.add(step)
            self._sampler.pin(step)
        await self._api.publish(step, evaluate=due)
        if due:
            self._waiting[step] = asyncio.create_task(self._receive(step), name=f"evaluation-{step}")

    async def _receive(self, step: int) -> None:
        try:
            while True:
                answer = await self._api.evaluation(step, wait=_POLL_SECONDS)
                if answer.get("evaluator") is False:
                    if self._ending:
                        logger.info("No environment here answers evaluations; step %d has none.", step)
                        return
                    # The environment may still be starting, or may never answer (Atropos's own `serve`).
                    await asyncio.sleep(_UNANSWERED_SECONDS)
                elif not answer.get("pending"):
                    break
            if answer.get("error"):
                raise EnvironmentFailedError(f"The evaluation at step {step} failed: {answer['error']}")
            figures = evaluation_figures(answer["metrics"])
            self._tracker.record("eval", step, figures | {"seconds": float(answer["seconds"])})
        finally:
            self._sampler.unpin(step)

    def raise_failed(self) -> None:
        """Raise what an evaluation failed with, if one did."""
        for step in [step for step, task in self._waiting.items() if task.done()]:
            self._waiting[step].result()
            del self._waiting[step]

    async def wait_for_earlier(self, step: int) -> bool:
        """Wait until the evaluations of steps before ``step`` have been answered.

        A run that is resumed at ``step`` asks for that step's own evaluation again, but has no longer the
        weights of earlier ones.

        Returns:
            Whether none will be missed: False when the environment that answers them has left, True also
            when none here ever answered.

        Raises:
            EnvironmentFailedError, ServiceError: one failed, or was not answered in time.
        """
        self.raise_failed()
        deadline = time.monotonic() + self._patience(len(self._earlier(step)))
        while earlier := self._earlier(step):
            environments = (await self._api.state())["envs"]
            evaluators = [found for found in environments if found["evaluator"]]
            if not any(found["connected"] for found in evaluators):
                return not evaluators
            if time.monotonic() > deadline:
                raise self._not_answered()
            await asyncio.wait(earlier, timeout=_EVALUATOR_CHECK_SECONDS)
            self.raise_failed()
        return True

    def _patience(self, evaluations: int) -> float:
        """Seconds within which so many evaluations are answered: the environment does one at a time."""
        return self._limit * evaluations + _DELIVERY_SECONDS

    def _not_answered(self) -> EnvironmentFailedError:
        """An environment that is stuck in ``evaluate`` cannot say so itself."""
        step = min(step for step, task in self._waiting.items() if not task.done())
        return EnvironmentFailedError(
            f"The evaluation at step {step} was not answered within {self._limit:g} s "
            "(max_evaluation_seconds).",
            hint="Look at the environment's log; raise max_evaluation_seconds for slow evaluations.",
        )

    def is_waiting_for_earlier(self, step: int) -> bool:
        """Whether the evaluation of a step before ``step`` has not been recorded."""
        return bool(self._earlier(step))

    def _earlier(self, step: int) -> list[asyncio.Task[None]]:
        """What is under way, or has failed."""

        def is_recorded(task: asyncio.Task[None]) -> bool:
            return task.done() and not task.cancelled() and task.exception() is None

        return [task for at, task in self._waiting.items() if at < step and not is_recorded(task)]

    async def wait_for_all(self) -> None:
        """Return when every evaluation asked for has been answered.

        Raises:
            EnvironmentFailedError: one failed, or was not answered in time.
        """
        self._ending = True
        if not self._waiting:
            return
        done, pending = await asyncio.wait(
            self._waiting.values(),
            timeout=self._patience(len(self._waiting)),
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for task in done:
            task.result()
        if pending:
            raise self._not_answered()

    async def cancel(self) -> None:
        """Stop waiting for answers."""
        for task in self._waiting.values():
            task.cancel()
        await asyncio.gather(*self._waiting.values(), return_exceptions=True)


def evaluation_figures(metrics: dict[str, float]) -> dict[str, float]:
    """An environment's evaluation metrics under the names of a run's record.

    ``eval/percent_correct`` becomes ``eval_percent_correct``, ``eval/count`` ``eval_count``; the others
    keep their name with ``/`` replaced by ``_``.
    """
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        flat = name.replace("/", "_")
        if isinstance(value, int | float):
            figures[flat if flat.startswith("eval") else f"eval_{flat}"] = float(value)
    return figures
