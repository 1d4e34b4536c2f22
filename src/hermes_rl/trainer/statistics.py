"""Figures of one optimizer step, from what went in and what ``forward_backward`` returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hermes_rl.trainer.datums import Assembled, Rollout


def batch_statistics(batch: Assembled, step: int) -> dict[str, float]:
    """Figures of the batch itself.

    Args:
        batch: the assembled batch.
        step: optimizer steps taken before this one; staleness counts from here.
    """
    figures: dict[str, float] = {
        "batch_reward_mean": float(np.mean(batch.scores)) if batch.scores else 0.0,
        "batch_reward_std": float(np.std(batch.scores)) if batch.scores else 0.0,
        "groups": float(batch.groups),
        "equal_score_groups": float(batch.equal_score_groups),
        "sequences": float(len(batch.sequences)),
        "sequences_dropped": float(sum(batch.dropped.values())),
    }
    figures |= {f"dropped_{reason}": float(count) for reason, count in batch.dropped.items()}
    if batch.sequences:
        lengths = [int(rollout.trained.sum()) for rollout in batch.sequences]
        figures["completion_tokens_mean"] = float(np.mean(lengths))
        figures["completion_tokens_max"] = float(np.max(lengths))
        figures["trained_tokens"] = float(np.sum(lengths))
        known = np.concatenate([r.sampled_at[r.trained & (r.sampled_at >= 0)] for r in batch.sequences])
        if known.size:
            figures["staleness_mean"] = float(np.mean(step - known))
            figures["staleness_max"] = float(np.max(step - known))
    return figures


def policy_statistics(
    rollouts: Sequence[Rollout], trainer_logprobs: Sequence[npt.NDArray[np.floating]]
) -> dict[str, float]:
    """How far the weights that are trained are from those that sampled.

    Args:
        rollouts: the N sequences trained on.
        trainer_logprobs: for each, the log-probability of tokens 1 … T-1 under the weights before the
            step, shape [T-1].

    Returns:
        ``loss`` (importance-sampling objective a trained token), ``entropy`` (estimated by the mean
        negative sampling log-probability, nats a token), ``kl_sampler_trainer`` (the k3 estimator of
        http://joschu.net/blog/kl-approx.html, nats a token), ``importance_ratio_mean`` and ``_max``.
    """
    sampled = np.concatenate([r.logprobs[1:][r.trained[1:]] for r in rollouts])
    current = np.concatenate(
        [
            np.asarray(lp, dtype=np.float64)[r.trained[1:]]
            for r, lp in zip(rollouts, trainer_logprobs, strict=True)
        ]
    )
    advantages = np.concatenate([r.advantages[1:][r.trained[1:]] for r in rollouts])
    log_ratio = np.clip(current - sampled, -50.0, 50.0)
    ratio = np.exp(log_ratio)
    return {
        "loss": float(np.mean(-ratio * advantages)),
        "entropy": float(np.mean(-sampled)),
        "kl_sampler_trainer": float(np.mean(ratio - 1.0 - log_ratio)),
        "importance_ratio_mean": float(np.mean(ratio)),
        "importance_ratio_max": float(np.max(ratio)),
    }


def time_figures(
    figures: Mapping[str, float], seconds: float, *, waiting: float, training: float, publishing: float
) -> dict[str, float]:
    """Where a step's time went, and how many tokens it came to a second.

    Args:
        figures: the step's figures, with ``sampled_tokens`` and, if any were, ``trained_tokens``.
        seconds: wall time of the step.
        waiting: of it, waiting for the batch, in seconds.
        training: of it, gradient and optimizer step.
        publishing: of it, saving the new weights for sampling and beginning to serve them.
    """
    return {
        "seconds": seconds,
        "seconds_waiting": waiting,
        "seconds_training": training,
        "seconds_publishing": publishing,
        "waiting_fraction": waiting / seconds,
        "training_fraction": training / seconds,
        "publishing_fraction": publishing / seconds,
        "sampled_tokens_per_second": figures["sampled_tokens"] / seconds,
        "trained_tokens_per_second": figures.get("trained_tokens", 0.0) / seconds,
    }
