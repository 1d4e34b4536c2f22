"""Addition and subtraction of small numbers: the environment to begin with.

Runs in the environment's process; talks to the inference server and to the Atropos API server.
Thousands of distinct questions of a few bytes each, an exact verifier, and a fixed tenth of all
questions that is only ever evaluated.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, NamedTuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field
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

HELD_OUT_SHARE = 10


class Question(NamedTuple):
    """A question as the model sees it, and its answer."""

    text: str
    answer: int


class ArithmeticTinkerConfig(BaseEnvConfig):
    """Settings of the arithmetic task."""

    digits: int = Field(
        default=2, ge=1, le=6, description="Numbers have up to this many digits; more is harder."
    )
    operations: str = Field(
        default="+-",
        pattern=r"^(\+|-|\+-|-\+)$",
        description="Which operations are asked: '+', '-' or '+-'. A difference is never negative.",
    )
    system_prompt: str = Field(
        default="", description="Text of the system turn; empty for none. The embedded model expects none."
    )
    seed: int = Field(default=0, description="Decides the order of the training questions.")
    eval_temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=2.0,
        description="Temperature of evaluations: 1 measures the policy that is trained, 0 is greedy.",
    )


class ArithmeticTinkerEnv(BaseEnv):
    """Asks sums and differences like 12+34= and gives 1 for the right number alone, else 0."""

    name = "arithmetic_tinker"
    env_config_cls = ArithmeticTinkerConfig  # pyright: ignore[reportAssignmentType]
    config: ArithmeticTinkerConfig

    def __init__(self, config: ArithmeticTinkerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.position = 0
        self.evaluated: list[Question] = []
        self.scores: list[float] = []
        self.evaluation: dict[str, float] = {}

    @classmethod
    def config_init(cls) -> tuple[ArithmeticTinkerConfig, list[APIServerConfig]]:
        """Defaults for a local inference server that speaks SGLang's protocol."""
        config = ArithmeticTinkerConfig(
            tokenizer_name="models/embedded",
            group_size=8,
            batch_size=16,
            max_token_length=16,
            steps_per_eval=25,
            total_steps=50,
            wandb_name="arithmetic_tinker",
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
        """Choose the held-out questions: the same ones whatever the training seed."""
        rng = random.Random("arithmetic_tinker evaluation")
        wanted = evaluation_size(self.server, available=1024)
        found: dict[str, Question] = {}
        for _ in range(200 * wanted):
            question = draw(rng, self.config.digits, self.config.operations)
            if is_held_out(question.text):
                found.setdefault(question.text, question)
            if len(found) == wanted:
                break
        self.evaluated = list(found.values())

    async def get_next_item(self) -> Question:
        """The training question at the current position; a function of seed and position alone."""
        rng = random.Random(f"{self.config.seed}:{self.position}")
        self.position += 1
        while True:
            question = draw(rng, self.config.digits, self.config.operations)
            if not is_held_out(question.text):
                return question

    async def collect_trajectories(self, item: Question) -> tuple[ScoredDataGroup, list[Question]]:
        """Sample one group of answers with one request, and score them."""
        rollouts = await sample(
            self.server,
            self.tokenizer,
            conversation(self.config.system_prompt, item.text),
            n=self.config.group_size,
            max_tokens=self.config.max_token_length,
        )
        scores = [self.score(rollout, item) for rollout in rollouts]
        self.scores.extend(scores)
        return scored_group(rollouts, scores), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ask every held-out question once."""

        async def attempt(item: Question) -> float:
            rollouts = await sample(
                self.server,
                self.tokenizer,
                conversation(self.config.system_prompt, item.text),
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

    @staticmethod
    def score(rollout: Rollout, item: Question) -> float:
        """1 if the answer, and nothing but the answer, was given before the length limit; else 0."""
        return float(rollout.finished and final_text(rollout) == str(item.answer))


def draw(rng: random.Random, digits: int, operations: str) -> Question:
    """Draw a question with numbers below ``10**digits``."""
    left, right = rng.randrange(10**digits), rng.randrange(10**digits)
    if rng.choice(operations) == "+":
        return Question(f"{left}+{right}=", left + right)
    left, right = max(left, right), min(left, right)
    return Question(f"{left}-{right}=", left - right)


def is_held_out(text: str) -> bool:
    """Whether a question is for evaluation only. It hangs on the text alone, so no seed can leak one."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


if __name__ == "__main__":
    ArithmeticTinkerEnv.cli()
