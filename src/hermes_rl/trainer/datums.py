"""From the groups of a batch to the datums of ``forward_backward``.

Shapes: T tokens a sequence; a datum predicts tokens 1 … T-1 from tokens 0 … T-2, so its arrays have
T-1 entries and entry t speaks of token t+1. Which tokens are trained comes from the environment's
masks (-100 is not trained), never from a log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker

from hermes_rl.trainer.advantages import token_advantages
from hermes_rl.trainer.ledger import SamplingLedger

NOT_TRAINED = -100


@dataclass
class Rollout:
    """One rollout, ready to be trained on; all arrays have shape [T].

    Attributes:
        tokens: token ids.
        trained: which tokens are trained on.
        advantages: advantage of each token.
        logprobs: log-probability under the sampling weights; NaN where unknown.
        sampled_at: optimizer steps of the sampling weights; -1 where unknown.
    """

    tokens: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    advantages: npt.NDArray[np.float32]
    logprobs: npt.NDArray[np.float64]
    sampled_at: npt.NDArray[np.int64]

    @property
    def missing(self) -> bool:
        """Whether a trained token's sampling log-probability is unknown."""
        return bool(np.isnan(self.logprobs[self.trained]).any())


@dataclass
class Assembled:
    """A batch as sequences.

    Attributes:
        sequences: the rollouts to train on.
        scores: score of every rollout of the batch, trained on or not.
        dropped: reason → number of sequences left out.
        equal_score_groups: groups that teach nothing because all their scores are equal.
        groups: number of groups.
    """

    sequences: list[Rollout] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    equal_score_groups: int = 0
    groups: int = 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def assemble(
    groups: Sequence[Mapping[str, Any]],
    ledger: SamplingLedger,
    *,
    max_token_length: int,
    normalize_advantages: bool,
) -> Assembled:
    """Turn the groups of a batch into sequences with advantages and sampling log-probabilities.

    Args:
        groups: scored groups as the trajectory API delivers them.
        ledger: what the sampler produced.
        max_token_length: longer sequences are dropped and counted.
        normalize_advantages: see :func:`hermes_rl.trainer.advantages.group_advantages`.
    """
    batch = Assembled(groups=len(groups))
    for group in groups:
        scores = [float(score) for score in group["scores"]]
        if not len(scores) == len(group["tokens"]) == len(group["masks"]) or not np.isfinite(scores).all():
            for _ in group["tokens"]:
                batch.drop("malformed")
            continue
        batch.scores += scores
        own_advantages = bool(group.get("advantages"))
        if len(set(scores)) <= 1 and not own_advantages:
            batch.equal_score_groups += 1
            continue
        advantages = token_advantages(group, normalize=normalize_advantages)
        sent_logprobs = group.get("inference_logprobs") or []
        for index, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
            if len(tokens) > max_token_length:
                batch.drop("too_long")
                continue
            trained = _trained_tokens(tokens, mask)
            if not trained.any():
                batch.drop("nothing_trained")
                continue
            if not np.any(advantages[index][trained]):
                batch.drop("zero_advantage")
                continue
            found = ledger.find(tokens, trained)
            logprobs = found.logprobs
            if index < len(sent_logprobs):
                logprobs = _prefer_sent(sent_logprobs[index], logprobs, trained)
            batch.sequences.append(
                Rollout(
                    tokens=np.asarray(tokens, dtype=np.int64),
                    trained=trained,
                    advantages=advantages[index],
                    logprobs=logprobs,
                    sampled_at=found.steps,
                )
            )
    return batch


def _trained_tokens(tokens: Sequence[int], mask: Sequence[int]) -> npt.NDArray[np.bool_]:
    trained = np.zeros(len(tokens), dtype=bool)
    usable = min(len(tokens), len(mask))
    trained[:usable] = np.asarray(mask[:usable], dtype=np.int64) != NOT_TRAINED
    # The first token has nothing before it to be predicted from.
    trained[:1] = False
    return trained


def _prefer_sent(
    sent: Sequence[float], known: npt.NDArray[np.float64], trained: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """The environment's own log-probabilities where they can be some, the ledger's elsewhere."""
    if len(sent) != known.size:
        return known
    sent_T = np.asarray(sent, dtype=np.float64)
    usable = trained & np.isfinite(sent_T) & (sent_T <= 0.0)
    return np.where(usable, sent_T, known)


def policy_datum(sequence: Rollout) -> tinker.Datum:
    """The datum of a policy-gradient loss (``importance_sampling``, ``ppo``, ``cispo``).

    Tokens that are not trained carry advantage 0 and log-probability 0, which Tinker's losses turn into
    no loss and no gradient (https://tinker-docs.thinkingmachines.ai/losses).
    """
    trained = sequence.trained[1:]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(sequence.tokens[1:]),
            "logprobs": tinker.TensorData.from_numpy(
                np.where(trained, sequence.logprobs[1:], 0.0).astype(np.float32)
            ),
            "advantages": tinker.TensorData.from_numpy(
                np.where(trained, sequence.advantages[1:], 0.0).astype(np.float32)
            ),
        },
    )


def likelihood_datum(sequence: Rollout) -> tinker.Datum:
    """A ``cross_entropy`` datum whose forward pass gives the log-probability of every token."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(sequence.tokens[1:]),
            "weights": tinker.TensorData.from_numpy(sequence.trained[1:].astype(np.float32)),
        },
    )
