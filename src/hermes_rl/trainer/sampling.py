"""The sampling side of the trainer: which weights answer a request, and with which seed.

One sampling client a version of the weights. Requests go to the newest; an evaluation is pinned to the
version it was asked for, however far training has gone on meanwhile.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from hermes_rl.errors import ServiceError
from hermes_rl.trainer.ledger import SampledCompletion, SamplingLedger


@dataclass(frozen=True)
class SamplingRequest:
    """One request for completions.

    Attributes:
        prompt_tokens: token ids of the prompt.
        n: number of completions.
        max_tokens: most tokens of a completion.
        temperature: 0 is greedy.
        top_p, top_k: truncation of the distribution; 1.0 and -1 do not truncate.
        stop: strings that end a completion, besides the end-of-turn token.
        seed: seed of the caller; None derives one from the run's seed, the prompt and how often the
            prompt was asked before, so that the order in which requests arrive changes nothing.
        step: version of the weights; None is the newest.
    """

    prompt_tokens: tuple[int, ...]
    n: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    step: int | None = None


@dataclass(frozen=True)
class SampledSequence:
    """One completion and why it ended (``stop`` or ``length``)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class WeightsGoneError(ServiceError):
    """The version of the weights that a request is pinned to is not served (any more)."""


class Sampler:
    """Samples from the newest weights, or from a pinned version.

    Args:
        seed: the run's seed.
        eos_tokens: texts of the tokens that end a turn.
        ledger: every completion of the newest weights is entered here.
    """

    def __init__(self, seed: int, eos_tokens: Sequence[str], ledger: SamplingLedger) -> None:
        self._seed = seed
        self._eos_tokens = list(eos_tokens)
        self._ledger = ledger
        self._clients: OrderedDict[int, tinker.SamplingClient] = OrderedDict()
        self._pinned: set[int] = set()
        self._asked: Counter[tuple[int | None, bytes]] = Counter()
        self.completions = 0
        self.truncated = 0
        self.tokens = 0

    @property
    def step(self) -> int:
        """Optimizer steps of the newest weights.

        Raises:
            ServiceError: there are none yet.
        """
        if not self._clients:
            raise ServiceError("The trainer has no weights to sample from yet.")
        return next(reversed(self._clients))

    @property
    def ready(self) -> bool:
        return bool(self._clients)

    def use(self, step: int, client: tinker.SamplingClient) -> None:
        """Serve ``client`` as the weights of ``step``, the newest from now on."""
        self._clients[step] = client
        self._clients.move_to_end(step)
        self._forget()

    def take_figures(self) -> dict[str, float]:
        """What was sampled since the last call, training and evaluation together."""
        figures = {
            "sampled_completions": float(self.completions),
            "sampled_tokens": float(self.tokens),
            "truncated_fraction": self.truncated / self.completions if self.completions else 0.0,
        }
        self.completions = self.tokens = self.truncated = 0
        return figures

    def pin(self, step: int) -> None:
        """Keep the weights of ``step`` until :meth:`unpin`."""
        self._pinned.add(step)

    def unpin(self, step: int) -> None:
        self._pinned.discard(step)
        self._forget()

    def _forget(self) -> None:
        newest = self.step
        for step in [s for s in self._clients if s != newest and s not in self._pinned]:
            del self._clients[step]

    def _derived_seed(self, request: SamplingRequest) -> int:
        prompt = np.asarray(request.prompt_tokens, dtype=np.int32).tobytes()
        digest = hashlib.blake2b(prompt, digest_size=16).digest()
        occurrence = self._asked[request.step, digest]
        self._asked[request.step, digest] += 1
        material = f"{self._seed}:{request.step}:{occurrence}:".encode() + digest
        return int.from_bytes(hashlib.blake2b(material, digest_size=4).digest(), "little") & 0x7FFFFFFF

    async def sample(self, request: SamplingRequest) -> list[SampledSequence]:
        """Sample the completions of a request.

        Raises:
            WeightsGoneError: the pinned version is not served.
            ServiceError: there are no weights yet.
        """
        step = self.step if request.step is None else request.step
        client = self._clients.get(step)
        if client is None:
            raise WeightsGoneError(
                f"The weights of step {step} are not served.",
                allowed=sorted(self._clients),
                hint="Ask for the newest weights, or for a step whose evaluation is running.",
            )
        seed = self._derived_seed(request) if request.seed is None else request.seed
        # Without stop strings the server's own end-of-turn stopping holds.
        stop = [*request.stop, *self._eos_tokens] if request.stop else None
        response = await client.sample(
            prompt=tinker.ModelInput.from_ints(list(request.prompt_tokens)),
            num_samples=request.n,
            sampling_params=tinker.SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=seed,
                stop=stop,
            ),
        )
        sampled: list[SampledSequence] = []
        for sequence in response.sequences:
            tokens = tuple(int(token) for token in sequence.tokens)
            logprobs = tuple(float(value) for value in sequence.logprobs or ())
            sampled.append(SampledSequence(tokens, logprobs, sequence.stop_reason))
            self.completions += 1
            self.tokens += len(tokens)
            self.truncated += sequence.stop_reason == "length"
            if request.step is None and len(logprobs) == len(tokens):
                self._ledger.record(request.prompt_tokens, SampledCompletion(tokens, logprobs, step))
        return sampled

    async def logprobs(self, prompt_tokens: Sequence[int], step: int | None = None) -> list[float | None]:
        """Log-probability of every prompt token given those before it; None for the first."""
        client = self._clients[self.step if step is None else step]
        return await client.compute_logprobs(tinker.ModelInput.from_ints(list(prompt_tokens)))
