"""What the sampler produced: the log-probabilities and the weights behind every sampled token.

Atropos sends tokens and masks to the trainer; log-probabilities only when the environment asked for
them, and never which weights sampled a token. The trainer serves the inference, so it knows both:
each completion is entered here when it is sampled and found again when its group arrives.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SampledCompletion:
    """One completion as it was sampled.

    Attributes:
        tokens: sampled token ids, shape [C].
        logprobs: log-probability of each token under the weights that sampled it, shape [C].
        step: optimizer steps those weights had taken.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    step: int


@dataclass(frozen=True)
class FoundTokens:
    """What the ledger knows of one sequence.

    Attributes:
        logprobs: log-probability of each token, shape [T]; NaN where it is not known.
        steps: step of the weights behind each known token, shape [T]; -1 where it is not known.
    """

    logprobs: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]


class SamplingLedger:
    """A bounded memory of sampled completions, by the prompt they continued.

    Args:
        max_completions: the oldest are forgotten beyond this number.
    """

    def __init__(self, max_completions: int = 200_000) -> None:
        self._by_prompt: OrderedDict[bytes, list[SampledCompletion]] = OrderedDict()
        self._count = 0
        self._max_completions = max_completions

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def _key(prompt_tokens: Sequence[int]) -> bytes:
        return hashlib.blake2b(np.asarray(prompt_tokens, dtype=np.int32).tobytes(), digest_size=16).digest()

    def record(self, prompt_tokens: Sequence[int], completion: SampledCompletion) -> None:
        """Enter a completion of ``prompt_tokens``."""
        key = self._key(prompt_tokens)
        self._by_prompt.setdefault(key, []).append(completion)
        self._by_prompt.move_to_end(key)
        self._count += 1
        while self._count > self._max_completions:
            _, forgotten = self._by_prompt.popitem(last=False)
            self._count -= len(forgotten)

    def find(self, tokens: Sequence[int], trained: npt.NDArray[np.bool_]) -> FoundTokens:
        """Log-probabilities and weights of the trained tokens of a sequence.

        Every maximal run of trained tokens is looked up as a completion of all that stands before it, so
        a conversation of several turns is found turn by turn. Where several completions fit, the one
        that agrees longest wins, the newest among equals.

        Args:
            tokens: token ids of the sequence, shape [T].
            trained: which tokens are trained on, shape [T].
        """
        length = len(tokens)
        logprobs_T = np.full(length, np.nan)
        steps_T = np.full(length, -1, dtype=np.int64)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], trained.astype(np.int8), [0]))))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            span = tuple(tokens[start:end])
            best: SampledCompletion | None = None
            best_agreement = 0
            for completion in self._by_prompt.get(self._key(tokens[:start]), ()):
                agreement = _common_prefix(span, completion.tokens)
                if agreement and agreement >= best_agreement:
                    best, best_agreement = completion, agreement
            if best is not None:
                logprobs_T[start : start + best_agreement] = best.logprobs[:best_agreement]
                steps_T[start : start + best_agreement] = best.step
        return FoundTokens(logprobs_T, steps_T)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    agreement = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        agreement += 1
    return agreement
