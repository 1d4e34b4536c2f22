"""What a user loses if these fail: a trainer that learns from the right tokens with the right sign."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hermes_rl.trainer.advantages import group_advantages, token_advantages
from hermes_rl.trainer.datums import Assembled, assemble, likelihood_datum, policy_datum
from hermes_rl.trainer.ledger import SampledCompletion, SamplingLedger
from hermes_rl.trainer.statistics import batch_statistics, policy_statistics

PROMPT = [1, 2, 3]


def group(scores: list[float], completions: list[list[int]] | None = None, **more: Any) -> dict[str, Any]:
    completions = completions or [[10 + index, 11] for index in range(len(scores))]
    return {
        "tokens": [PROMPT + completion for completion in completions],
        "masks": [[-100] * len(PROMPT) + completion for completion in completions],
        "scores": scores,
        **more,
    }


def ledger_with(groups: list[dict[str, Any]], step: int = 4, logprob: float = -0.5) -> SamplingLedger:
    ledger = SamplingLedger()
    for one in groups:
        for tokens in one["tokens"]:
            completion = tuple(tokens[len(PROMPT) :])
            ledger.record(PROMPT, SampledCompletion(completion, (logprob,) * len(completion), step))
    return ledger


def put_together(
    groups: list[dict[str, Any]], ledger: SamplingLedger | None = None, **options: Any
) -> Assembled:
    defaults = {"max_token_length": 100, "normalize_advantages": False}
    return assemble(groups, ledger_with(groups) if ledger is None else ledger, **{**defaults, **options})


def test_the_baseline_of_a_rollout_is_its_groups_mean() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], normalize=False), [0.75, -0.25, -0.25, -0.25])


def test_advantages_can_be_divided_by_the_groups_deviation() -> None:
    advantages = group_advantages([1.0, 0.0, 1.0, 0.0], normalize=True)
    np.testing.assert_allclose(advantages, [1, -1, 1, -1], rtol=1e-5)


def test_equal_scores_teach_nothing_and_are_counted() -> None:
    batch = put_together([group([1.0, 1.0]), group([1.0, 0.0])])
    assert batch.equal_score_groups == 1
    assert len(batch.sequences) == 2
    assert len(batch.scores) == 4


def test_trained_tokens_come_from_the_masks_and_not_from_a_logprob_value() -> None:
    one = group([1.0, 0.0], inference_logprobs=[[1.0] * 3 + [-0.1, -0.2]] * 2)
    one["masks"][0][-1] = -100  # the environment masks a sampled token
    batch = put_together([one])
    assert batch.sequences[0].trained.tolist() == [False, False, False, True, False]
    datum = policy_datum(batch.sequences[0])
    assert datum.loss_fn_inputs["advantages"].to_numpy().tolist() == [0, 0, 0.5, 0]


def test_a_datum_predicts_each_next_token() -> None:
    batch = put_together([group([1.0, 0.0])])
    datum = policy_datum(batch.sequences[0])
    assert datum.model_input.to_ints() == [1, 2, 3, 10]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 3, 10, 11]
    np.testing.assert_allclose(datum.loss_fn_inputs["logprobs"].to_numpy(), [0, 0, -0.5, -0.5])
    np.testing.assert_allclose(datum.loss_fn_inputs["advantages"].to_numpy(), [0, 0, 0.5, 0.5])
    assert likelihood_datum(batch.sequences[0]).loss_fn_inputs["weights"].to_numpy().tolist() == [0, 0, 1, 1]


def test_the_environments_own_advantages_are_honoured() -> None:
    own = [[0, 0, 0, 0.3, 0.4], [0, 0, 0, -0.1, -0.2]]
    advantages = token_advantages(group([1.0, 1.0], advantages=own), normalize=False)
    np.testing.assert_allclose(advantages[0], own[0])
    batch = put_together([group([1.0, 1.0], advantages=own)])
    assert len(batch.sequences) == 2
    assert batch.equal_score_groups == 0


def test_an_override_silences_one_sequence() -> None:
    batch = put_together([group([1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}])])
    assert len(batch.sequences) == 1
    assert batch.dropped == {"zero_advantage": 1}


def test_a_sequence_that_is_too_long_is_dropped_and_counted() -> None:
    batch = put_together([group([1.0, 0.0], [[5] * 20, [6]])], max_token_length=10)
    assert batch.dropped == {"too_long": 1}


@pytest.mark.parametrize("damage", [{"scores": [1.0]}, {"masks": [[1]]}, {"scores": [float("nan"), 1.0]}])
def test_a_malformed_group_is_dropped_and_counted(damage: dict[str, Any]) -> None:
    batch = put_together([{**group([1.0, 0.0]), **damage}, group([1.0, 0.0])])
    assert batch.dropped == {"malformed": 2}
    assert len(batch.sequences) == 2


def test_the_environments_logprobs_win_over_the_ledger() -> None:
    one = group([1.0, 0.0], inference_logprobs=[[1.0] * 3 + [-0.1, -0.2]] * 2)
    batch = put_together([one])
    np.testing.assert_allclose(batch.sequences[0].logprobs[3:], [-0.1, -0.2])


def test_logprobs_of_another_length_are_not_trusted() -> None:
    one = group([1.0, 0.0], inference_logprobs=[[-0.1], [-0.1]])
    batch = put_together([one])
    np.testing.assert_allclose(batch.sequences[0].logprobs[3:], [-0.5, -0.5])


def test_tokens_nobody_sampled_here_are_known_as_missing() -> None:
    one = group([1.0, 0.0])
    batch = put_together([one], SamplingLedger())
    assert all(rollout.missing for rollout in batch.sequences)


def test_a_conversation_is_found_turn_by_turn() -> None:
    ledger = SamplingLedger()
    ledger.record([1, 2], SampledCompletion((3, 4), (-0.1, -0.2), 1))
    ledger.record([1, 2, 3, 4, 9], SampledCompletion((5,), (-0.3,), 2))
    trained = np.array([False, False, True, True, False, True])
    found = ledger.find([1, 2, 3, 4, 9, 5], trained)
    np.testing.assert_allclose(found.logprobs[trained], [-0.1, -0.2, -0.3])
    assert found.steps[trained].tolist() == [1, 1, 2]


def test_the_longest_agreement_wins_and_the_newest_among_equals() -> None:
    ledger = SamplingLedger()
    ledger.record(PROMPT, SampledCompletion((7, 8), (-1.0, -1.0), 1))
    ledger.record(PROMPT, SampledCompletion((7, 9), (-2.0, -2.0), 1))
    ledger.record(PROMPT, SampledCompletion((7, 9), (-3.0, -3.0), 2))
    found = ledger.find([*PROMPT, 7, 9], np.array([False] * 3 + [True] * 2))
    np.testing.assert_allclose(found.logprobs[3:], [-3.0, -3.0])


def test_the_ledger_forgets_the_oldest_and_stays_bounded() -> None:
    ledger = SamplingLedger(max_completions=10)
    for prompt in range(100):
        ledger.record([prompt], SampledCompletion((1,), (-0.1,), 0))
    assert len(ledger) == 10
    assert not np.isnan(ledger.find([99, 1], np.array([False, True])).logprobs[1])


def test_staleness_counts_the_steps_since_a_token_was_sampled() -> None:
    one = group([1.0, 0.0])
    batch = put_together([one], ledger_with([one], step=4))
    figures = batch_statistics(batch, step=6)
    assert figures["staleness_mean"] == 2
    assert figures["batch_reward_mean"] == 0.5


def test_divergence_is_zero_when_sampler_and_trainer_agree() -> None:
    batch = put_together([group([1.0, 0.0])])
    same = [rollout.logprobs[1:] for rollout in batch.sequences]
    figures = policy_statistics(batch.sequences, same)
    assert figures["kl_sampler_trainer"] == pytest.approx(0)
    assert figures["importance_ratio_mean"] == pytest.approx(1)
    assert figures["loss"] == pytest.approx(0)
    shifted = policy_statistics(batch.sequences, [lp + 0.1 for lp in same])
    assert shifted["importance_ratio_max"] == pytest.approx(np.exp(0.1))
    assert shifted["kl_sampler_trainer"] > 0
