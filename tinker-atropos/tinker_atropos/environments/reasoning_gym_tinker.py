"""Any generator of the reasoning-gym package, chosen by name.

Runs in the environment's process; talks to the inference server and to the Atropos API server.
reasoning-gym makes the questions and scores the answers; both work without a network.
"""

from __future__ import annotations

import json
import logging
import random
import re
import zlib
from enum import StrEnum
from typing import Any

import reasoning_gym
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field, field_validator
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from single_turn import (
    Rollout,
    conversation,
    evaluation,
    evaluation_size,
    final_text,
    sample,
    scored_group,
    training_metrics,
)

logger = logging.getLogger(__name__)

Entry = dict[str, Any]

SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}
"""Settings within reach of the embedded model, used when ``dataset_config`` is left out."""

EVALUATION_SEED = 1 << 30
"""reasoning-gym seeds item *i* with ``seed + i``, so ranges of seeds must lie far apart to differ."""

TRAINING_SEED_STRIDE = 1_000_003


class AnswerFormat(StrEnum):
    """Where the answer stands in the model's text."""

    PLAIN = "plain"
    TAGS = "tags"


TAG_INSTRUCTION = "Think it through, then give only the final answer between <answer> and </answer>."


class ReasoningGymTinkerConfig(BaseEnvConfig):
    """Which generator, with which settings."""

    dataset: str = Field(
        default="chain_sum",
        description="Name of a reasoning-gym generator, for example 'spell_backward'.",
        json_schema_extra={"enum": sorted(DATASETS)},
    )
    dataset_config: dict[str, Any] | None = Field(
        default=None,
        description="Settings of that generator, as a mapping or JSON text. Left out: the generator's "
        "defaults, except chain_sum and spell_backward, which then stay within the embedded model's reach.",
    )
    train_size: int = Field(
        default=100_000,
        ge=1,
        le=1_000_000,
        description="Number of training questions; they repeat after that many.",
    )
    answer_format: AnswerFormat = Field(
        default=AnswerFormat.PLAIN,
        description="'plain': the whole reply is the answer. 'tags': the answer stands between <answer> "
        "and </answer>, and a system turn asks for that.",
    )
    seed: int = Field(default=0, description="Decides which training questions are asked.")
    eval_temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=2.0,
        description="Temperature of evaluations: 1 measures the policy that is trained, 0 is greedy.",
    )

    @field_validator("dataset_config", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        """Accept JSON text too, as a command line gives it."""
        return json.loads(value) if isinstance(value, str) else value


class ReasoningGymTinkerEnv(BaseEnv):
    """Asks the questions of any reasoning-gym generator; its own verifier gives the reward, from 0 to 1."""

    name = "reasoning_gym_tinker"
    env_config_cls = ReasoningGymTinkerConfig  # pyright: ignore[reportAssignmentType]
    config: ReasoningGymTinkerConfig

    def __init__(self, config: ReasoningGymTinkerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.position = 0
        self.evaluated: list[Entry] = []
        self.scores: list[float] = []
        self.evaluation: dict[str, float] = {}
        self.system_prompt = TAG_INSTRUCTION if config.answer_format is AnswerFormat.TAGS else ""

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymTinkerConfig, list[APIServerConfig]]:
        """Defaults for a local inference server that speaks SGLang's protocol."""
        config = ReasoningGymTinkerConfig(
            tokenizer_name="models/embedded",
            group_size=8,
            batch_size=16,
            max_token_length=32,
            steps_per_eval=25,
            total_steps=50,
            wandb_name="reasoning_gym_tinker",
        )
        server = APIServerConfig(
            model_name="models/embedded",
            base_url="http://localhost:9001/v1",
            api_key="x",
            server_type="sglang",
            num_requests_for_eval=256,
            health_check=False,
        )
        return config, [server]

    async def setup(self) -> None:
        """Create the generator and the held-out questions.

        Raises:
            ValueError: the generator or one of its settings does not exist, or it yields too few
                different questions to hold some out.
        """
        seed = self.config.seed % 1000 * TRAINING_SEED_STRIDE
        self.train = create_generator(self.config, seed=seed, size=self.config.train_size)
        wanted = evaluation_size(self.server, available=1024)
        candidates = create_generator(self.config, seed=EVALUATION_SEED, size=8 * wanted)
        found: dict[str, Entry] = {}
        for index in range(len(candidates)):
            entry = candidates[index]
            if is_held_out(entry["question"]):
                found.setdefault(entry["question"], entry)
            if len(found) == wanted:
                break
        if not found:
            raise ValueError(
                f"{self.config.dataset} yields too few different questions to hold some out for evaluation; "
                "widen its dataset_config."
            )
        self.evaluated = list(found.values())

    async def get_next_item(self) -> Entry:
        """The training question at the current position; a function of seed and position alone.

        Raises:
            ValueError: every question of the generator is held out.
        """
        for _ in range(1000):
            entry = self.train[self.position % len(self.train)]
            self.position += 1
            if not is_held_out(entry["question"]):
                return entry
        raise ValueError(
            f"{self.config.dataset} yields too few different questions to train on; widen its dataset_config."
        )

    async def collect_trajectories(self, item: Entry) -> tuple[ScoredDataGroup, list[Entry]]:
        """Sample one group of answers with one request, and score them."""
        rollouts = await sample(
            self.server,
            self.tokenizer,
            conversation(self.system_prompt, item["question"]),
            n=self.config.group_size,
            max_tokens=self.config.max_token_length,
        )
        scores = [self.score(rollout, item) for rollout in rollouts]
        self.scores.extend(scores)
        return scored_group(rollouts, scores), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ask every held-out question once."""

        async def attempt(item: Entry) -> float:
            rollouts = await sample(
                self.server,
                self.tokenizer,
                conversation(self.system_prompt, item["question"]),
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=self.config.eval_temperature,
                split="eval",
            )
            return self.score(rollouts[0], item)

        self.evaluation = await evaluation(self.evaluated, attempt)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the accuracy since the last call, and the latest evaluation, to what Atropos logs."""
        metrics = {**(wandb_metrics or {}), **training_metrics(self.scores), **self.evaluation}
        self.scores, self.evaluation = [], {}
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the position in the training questions, so that a resumed run goes on from there."""
        super().save_checkpoint(step, {**(data or {}), "position": self.position})

    def score(self, rollout: Rollout, item: Entry) -> float:
        """What the generator gives for the answer; 0 if it is cut off, missing, or breaks the verifier."""
        answer = final_text(rollout)
        if self.config.answer_format is AnswerFormat.TAGS:
            tagged = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
            answer = tagged[-1].strip() if tagged else ""
        if not rollout.finished or not answer:
            return 0.0
        try:
            return float(self.train.score_answer(answer=answer, entry=item))
        except Exception as error:  # noqa: BLE001 - some verifiers raise on malformed answers
            logger.info("%s could not score %r: %s", self.config.dataset, answer[:80], error)
            return 0.0


def create_generator(config: ReasoningGymTinkerConfig, *, seed: int, size: int) -> Any:
    """Create the configured generator.

    Raises:
        ValueError: its name or one of its settings is unknown or out of range.
    """
    if config.dataset not in DATASETS:
        raise ValueError(
            f"reasoning-gym has no generator {config.dataset!r}. It has: {', '.join(sorted(DATASETS))}."
        )
    settings = config.dataset_config
    if settings is None:
        settings = SMALL_SETTINGS.get(config.dataset, {})
    if config.dataset == "composite" and "datasets" in settings:
        try:
            parts = [DatasetSpec(**{"config": {}, "weight": 1.0, **part}) for part in settings["datasets"]]
        except TypeError as error:
            raise ValueError(f"dataset_config of composite, 'datasets': {error}") from error
        settings = {**settings, "datasets": parts}
    # A few generators draw from the global generator; this makes those repeatable too.
    random.seed(seed)
    try:
        return reasoning_gym.create_dataset(config.dataset, **{**settings, "seed": seed, "size": size})
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"dataset_config of {config.dataset}: {error}") from error


def is_held_out(question: str) -> bool:
    """Whether a question is for evaluation only: half of all are, by checksum, so no seed can leak one."""
    return zlib.crc32(question.encode()) % 2 == 0


if __name__ == "__main__":
    ReasoningGymTinkerEnv.cli()
