"""The training loop, top to bottom.

A step takes one batch of scored groups, turns scores into advantages, takes one gradient and one
optimizer step through the Tinker SDK, and serves the new weights to the environment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np
import tinker

from hermes_rl.config import RunConfig
from hermes_rl.trainer.batches import BatchSource
from hermes_rl.trainer.checkpoints import Checkpoints
from hermes_rl.trainer.datums import Assembled, assemble, likelihood_datum, policy_datum
from hermes_rl.trainer.evaluations import Evaluations
from hermes_rl.trainer.ledger import SamplingLedger
from hermes_rl.trainer.sampling import Sampler
from hermes_rl.trainer.statistics import batch_statistics, policy_statistics, time_figures
from hermes_rl.trainer.tracking import Tracker
from hermes_rl.trainer.watchdogs import Watchdogs

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 2.0


@dataclass
class Training:
    """What the loop works with."""

    config: RunConfig
    client: tinker.TrainingClient
    sampler: Sampler
    ledger: SamplingLedger
    batches: BatchSource
    evaluations: Evaluations
    checkpoints: Checkpoints
    tracker: Tracker
    watchdogs: Watchdogs
    at_rest: int | None = None
    """Optimizer steps taken, while no gradient is under way and all that was done is recorded."""
    is_stopping: bool = False
    """Whether to end after the step that is under way."""

    async def save_where_it_stopped(self) -> None:
        """Save the state of a run that ends between two steps, if one resumed from it would lack nothing."""
        step = self.at_rest
        if not step or self.checkpoints.has(step) or self.evaluations.is_waiting_for_earlier(step):
            return
        try:
            async with asyncio.timeout(_SAVE_SECONDS):
                await self.checkpoints.save(step)
        except Exception as error:  # noqa: BLE001 - the run ends as it was asked to; the last checkpoint holds
            logger.warning("No checkpoint of step %d could be saved: %r", step, error)


async def train(training: Training, first_step: int) -> None:
    """Train from ``first_step`` optimizer steps to ``total_steps``.

    Raises:
        RunFailedError: nothing can be learned any more, with the reason.
    """
    config, tracker = training.config, training.tracker
    total_steps = config.env.total_steps
    await serve_weights(training, first_step)
    tracker.phase = "training"
    training.at_rest = first_step
    for step in range(first_step, total_steps):
        if training.is_stopping:
            raise asyncio.CancelledError
        started = time.perf_counter()
        groups = await training.batches.next_batch(step)
        waited = time.perf_counter() - started
        training.at_rest = None

        batch = assemble(
            groups,
            training.ledger,
            max_token_length=config.tinker.max_token_trainer_length,
            normalize_advantages=config.tinker.normalize_advantages,
        )
        figures = batch_statistics(batch, step)
        figures |= await policy_step(training, batch)
        trained = time.perf_counter() - started - waited

        await serve_weights(training, step + 1)
        published = time.perf_counter() - started - waited - trained
        figures |= await training.batches.environment_figures(tracker)
        figures.setdefault("reward_mean", figures["batch_reward_mean"])
        figures |= training.sampler.take_figures()
        figures |= time_figures(
            figures, time.perf_counter() - started, waiting=waited, training=trained, publishing=published
        )
        tracker.record("train", step + 1, figures)
        training.at_rest = step + 1
        await training.watchdogs.after_step(step + 1, figures)
        training.batches.note(batch)
        # After the records of all that lies before it: a run resumed from it lacks none.
        if training.checkpoints.due(step + 1) and await training.evaluations.wait_for_earlier(step + 1):
            await training.checkpoints.save(step + 1)

    if first_step == 0:
        training.batches.check_end()
    tracker.phase = "evaluating"
    await training.evaluations.wait_for_all()
    tracker.phase = "saving"
    await training.checkpoints.save_final(total_steps)


async def policy_step(training: Training, batch: Assembled) -> dict[str, float]:
    """One gradient and one optimizer step on a batch.

    Returns:
        The step's figures; empty when nothing in the batch could be trained on.
    """
    tinker_config = training.config.tinker
    rollouts = batch.sequences
    if not rollouts:
        logger.warning("No sequence of this batch can be trained on: %s", batch.dropped or "equal scores")
        return {"empty_batch": 1.0}
    unknown = [rollout for rollout in rollouts if rollout.missing]
    if unknown:
        # Sampled elsewhere (an environment with its own inference): the weights about to be trained
        # stand in for those that sampled, so the importance ratio starts at one.
        forward = await training.client.forward([likelihood_datum(r) for r in unknown], "cross_entropy")
        outputs = forward.loss_fn_outputs
        for rollout, output in zip(unknown, outputs, strict=True):
            logprobs = np.concatenate(([0.0], np.asarray(output["logprobs"].to_numpy(), dtype=np.float64)))
            rollout.logprobs = np.where(np.isnan(rollout.logprobs), logprobs, rollout.logprobs)

    gradient = training.client.forward_backward(
        [policy_datum(rollout) for rollout in rollouts],
        loss_fn=tinker_config.loss_fn,
        loss_fn_config=dict(tinker_config.loss_fn_config) if tinker_config.loss_fn_config else None,
    )
    update = training.client.optim_step(
        tinker.AdamParams(
            learning_rate=tinker_config.learning_rate,
            beta1=tinker_config.beta1,
            beta2=tinker_config.beta2,
            eps=tinker_config.adam_eps,
            weight_decay=tinker_config.weight_decay,
            grad_clip_norm=tinker_config.grad_clip_norm,
        )
    )
    result = await gradient
    updated = await update
    trainer_logprobs = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    figures = policy_statistics(rollouts, trainer_logprobs)
    figures["logprobs_recomputed"] = float(len(unknown))
    figures["learning_rate"] = tinker_config.learning_rate
    if updated.metrics and "grad_norm" in updated.metrics:
        figures["grad_norm"] = float(updated.metrics["grad_norm"])
    return figures


async def serve_weights(training: Training, step: int) -> None:
    """Serve the current weights as those of ``step``, and ask for an evaluation when one is due."""
    client = await training.client.save_weights_and_get_sampling_client()
    training.sampler.use(step, client)
    await training.evaluations.publish(step)
