"""The one schema of metrics: what a run records, under which name, in which unit, meaning what.

The same names stand in ``metrics.jsonl``, in Weights & Biases, in status and in reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: name in a record.
        kind: which records carry it, ``train`` (one an optimizer step) or ``eval`` (one an evaluation).
        unit: unit of the value.
        meaning: one sentence.
    """

    name: str
    kind: Literal["train", "eval"]
    unit: str
    meaning: str


_TRAIN: tuple[tuple[str, str, str], ...] = (
    ("reward_mean", "score", "Mean score of all rollouts since the last step, taught from or not."),
    ("reward_std", "score", "Standard deviation of those scores."),
    ("percent_correct", "share 0–1", "train/percent_correct of the environment, or the share of scores > 0."),
    ("batch_reward_mean", "score", "Mean score of the rollouts of this batch."),
    ("batch_reward_std", "score", "Standard deviation of the scores of this batch."),
    ("groups", "groups", "Groups in this batch."),
    ("equal_score_groups", "groups", "Groups of this batch that teach nothing: all scores equal."),
    ("sequences", "sequences", "Sequences trained on."),
    ("sequences_dropped", "sequences", "Sequences of this batch left out, for the reasons that follow."),
    ("dropped_too_long", "sequences", "Left out: longer than max_token_trainer_length."),
    ("dropped_malformed", "sequences", "Left out: scores or masks missing, or a score that is no number."),
    ("dropped_nothing_trained", "sequences", "Left out: the environment's mask trains no token."),
    ("dropped_zero_advantage", "sequences", "Left out: every advantage is zero."),
    ("sampled_groups", "groups", "Groups the environment sampled since the last step."),
    ("sampled_groups_mixed", "groups", "Of those, groups with unequal scores: the ones that teach."),
    ("sampled_groups_all_right", "groups", "Of those, groups with equal scores above zero."),
    ("sampled_groups_all_wrong", "groups", "Of those, groups with equal scores of zero or less."),
    ("sampled_rollouts", "sequences", "Rollouts in those groups."),
    ("sampled_completions", "sequences", "Completions served since the last step, evaluations included."),
    ("sampled_tokens", "tokens", "Tokens of those completions."),
    ("truncated_fraction", "share 0–1", "Share of those completions that ended at their length limit."),
    ("completion_tokens_mean", "tokens", "Mean number of trained tokens of a sequence."),
    ("completion_tokens_max", "tokens", "Largest number of trained tokens of a sequence."),
    ("trained_tokens", "tokens", "Tokens trained on."),
    ("loss", "score", "Importance-sampling objective, mean over trained tokens: -(ratio x advantage)."),
    ("entropy", "nats/token", "Mean negative log-probability of the trained tokens when they were sampled."),
    ("kl_sampler_trainer", "nats/token", "KL divergence from sampling to trained weights (k3 estimator)."),
    ("importance_ratio_mean", "ratio", "Mean of trained over sampling probability of a token."),
    ("importance_ratio_max", "ratio", "Largest such ratio."),
    ("learning_rate", "per step", "Step size of the optimizer in this step."),
    ("grad_norm", "norm", "Norm of the gradient before clipping, where the Tinker server reports it."),
    ("staleness_mean", "steps", "Mean number of optimizer steps between sampling and training of a token."),
    ("staleness_max", "steps", "Largest such number."),
    ("logprobs_recomputed", "sequences", "Sequences whose sampling log-probabilities were not known."),
    ("empty_batch", "flag", "1 when nothing of the batch could be trained on."),
    ("seconds", "seconds", "Wall time of the step."),
    ("seconds_waiting", "seconds", "Of it, waiting for the batch."),
    ("seconds_training", "seconds", "Of it, gradient and optimizer step."),
    ("seconds_publishing", "seconds", "Of it, saving the new weights for sampling and serving them."),
    ("waiting_fraction", "share 0–1", "Share of the step's time spent waiting for the batch."),
    ("training_fraction", "share 0–1", "Share of it spent on gradient and optimizer step."),
    ("publishing_fraction", "share 0–1", "Share of it spent on publishing the new weights."),
    ("sampled_tokens_per_second", "tokens/s", "Tokens sampled since the last step, by the step's time."),
    ("trained_tokens_per_second", "tokens/s", "Tokens trained on, by the step's time."),
)  # fmt: skip

_EVAL: tuple[tuple[str, str, str], ...] = (
    (
        "eval_percent_correct",
        "share 0–1",
        "Share of held-out items answered rightly, as the environment says.",
    ),
    ("eval_count", "items", "Held-out items of the evaluation."),
    ("seconds", "seconds", "Wall time of the evaluation."),
)

METRICS: tuple[Metric, ...] = tuple(
    [Metric(name, "train", unit, meaning) for name, unit, meaning in _TRAIN]
    + [Metric(name, "eval", unit, meaning) for name, unit, meaning in _EVAL]
)
"""Every metric of hermes-rl itself; the environment's own come beside them, as it named them."""
