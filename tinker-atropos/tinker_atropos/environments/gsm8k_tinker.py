"""GSM8K: grade-school word problems with a whole number as the answer.

Runs in the environment's process; talks to the inference server, to the Atropos API server and, unless a
local file is named, once to the Hugging Face hub.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
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

SYSTEM_PROMPT = "Solve the problem step by step, then give the final number as \\boxed{number}."


class Problem(NamedTuple):
    """A word problem and the number that answers it."""

    question: str
    answer: Decimal


class Gsm8kTinkerConfig(BaseEnvConfig):
    """Where the problems come from, and how they are asked."""

    data_path: str = Field(
        default="",
        description="JSON Lines file with the fields 'question' and 'answer' (ending in '#### 42'). "
        "Empty: the data set is loaded from the Hugging Face hub.",
    )
    eval_data_path: str = Field(
        default="",
        description="Such a file for evaluation. Empty: a fifth of data_path is held out.",
    )
    hub_dataset: str = Field(default="openai/gsm8k", description="Name of the data set on the hub.")
    hub_subset: str = Field(default="main", description="Its configuration: 'main' or 'socratic'.")
    system_prompt: str = Field(default=SYSTEM_PROMPT, description="Text of the system turn; empty for none.")
    seed: int = Field(default=0, description="Decides the order of the training problems.")
    eval_temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=2.0,
        description="Temperature of evaluations: 1 measures the policy that is trained, 0 is greedy.",
    )


class Gsm8kTinkerEnv(BaseEnv):
    """Asks grade-school word problems; 1 for the right number, boxed or else the last one, else 0."""

    name = "gsm8k_tinker"
    env_config_cls = Gsm8kTinkerConfig  # pyright: ignore[reportAssignmentType]
    config: Gsm8kTinkerConfig

    def __init__(self, config: Gsm8kTinkerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.position = 0
        self.train: list[Problem] = []
        self.evaluated: list[Problem] = []
        self.scores: list[float] = []
        self.evaluation: dict[str, float] = {}

    @classmethod
    def config_init(cls) -> tuple[Gsm8kTinkerConfig, list[APIServerConfig]]:
        """Defaults for Qwen3-8B behind a local inference server that speaks SGLang's protocol."""
        config = Gsm8kTinkerConfig(
            tokenizer_name="Qwen/Qwen3-8B",
            group_size=16,
            batch_size=128,
            max_token_length=2048,
            steps_per_eval=25,
            total_steps=2500,
            wandb_name="gsm8k_tinker",
        )
        server = APIServerConfig(
            model_name="Qwen/Qwen3-8B",
            base_url="http://localhost:9001/v1",
            api_key="x",
            server_type="sglang",
            num_requests_for_eval=256,
            health_check=False,
        )
        return config, [server]

    async def setup(self) -> None:
        """Load the problems.

        Raises:
            ValueError: a file has a line that is no problem, or there is nothing to train or evaluate on.
            OSError: a file cannot be read.
            ConnectionError: the hub cannot be reached, and no file is named.
        """
        self.train, held_out = load_problems(self.config)
        if not self.train or not held_out:
            raise ValueError(
                f"There are {len(self.train)} training and {len(held_out)} evaluation problems; "
                "at least one of each is needed."
            )
        random.Random(0).shuffle(held_out)
        self.evaluated = held_out[: evaluation_size(self.server, available=len(held_out))]

    async def get_next_item(self) -> Problem:
        """The training problem at the current position: every pass over the data in an order of its own."""
        passes, place = divmod(self.position, len(self.train))
        order = list(range(len(self.train)))
        random.Random(f"{self.config.seed}:{passes}").shuffle(order)
        self.position += 1
        return self.train[order[place]]

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        """Sample one group of solutions with one request, and score them."""
        rollouts = await sample(
            self.server,
            self.tokenizer,
            conversation(self.config.system_prompt, item.question),
            n=self.config.group_size,
            max_tokens=self.config.max_token_length,
        )
        scores = [self.score(rollout, item) for rollout in rollouts]
        self.scores.extend(scores)
        return scored_group(rollouts, scores), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Ask every held-out problem once."""

        async def attempt(item: Problem) -> float:
            rollouts = await sample(
                self.server,
                self.tokenizer,
                conversation(self.config.system_prompt, item.question),
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
        """Save the position in the training problems, so that a resumed run goes on from there."""
        super().save_checkpoint(step, {**(data or {}), "position": self.position})

    @staticmethod
    def score(rollout: Rollout, item: Problem) -> float:
        """1 if the number the solution ends with is the answer, else 0; a cut-off solution has none."""
        return float(rollout.finished and read_number(final_text(rollout)) == item.answer)


def load_problems(config: Gsm8kTinkerConfig) -> tuple[list[Problem], list[Problem]]:
    """Load training and evaluation problems from files if any is named, else from the hub."""
    if config.data_path:
        problems = read_problems(config.data_path)
        if config.eval_data_path:
            held_out = read_problems(config.eval_data_path)
            asked = {problem.question for problem in held_out}
            return [problem for problem in problems if problem.question not in asked], held_out
        marks = [zlib.crc32(problem.question.encode()) % 5 == 0 for problem in problems]
        return (
            [problem for problem, mark in zip(problems, marks, strict=True) if not mark],
            [problem for problem, mark in zip(problems, marks, strict=True) if mark],
        )
    return load_hub_split(config, "train"), load_hub_split(config, "test")


def load_hub_split(config: Gsm8kTinkerConfig, split: str) -> list[Problem]:
    """Load one split from the hub, or from the hub's cache on this machine.

    Raises:
        ConnectionError: the data set can be had from neither.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(config.hub_dataset, config.hub_subset, split=split)
    except Exception as error:
        raise ConnectionError(
            f"{config.hub_dataset} ({config.hub_subset}, {split}) could not be loaded from the Hugging Face "
            f"hub ({type(error).__name__}: {error}). Without access to the hub, set data_path to a JSON "
            "Lines file with the fields 'question' and 'answer'."
        ) from error
    return [parse_problem(row, f"{config.hub_dataset} {split}") for row in rows]


def read_problems(path: str) -> list[Problem]:
    """Read problems from a JSON Lines file; blank lines are skipped."""
    lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    return list(_parse_lines(path, lines))


def _parse_lines(path: str, lines: Iterable[str]) -> Iterable[Problem]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        yield parse_problem(row, f"{path}, line {number}")


def parse_problem(row: Any, where: str) -> Problem:
    """Read one record.

    Raises:
        ValueError: it lacks ``question`` or ``answer``, or the answer has no number after ``####``.
    """
    if not isinstance(row, dict) or not {"question", "answer"} <= row.keys():
        raise ValueError(f"{where}: expected an object with the fields 'question' and 'answer'.")
    answer = read_number(str(row["answer"]).split("####")[-1])
    if answer is None:
        raise ValueError(f"{where}: the answer {str(row['answer'])[-60:]!r} has no number after '####'.")
    return Problem(str(row["question"]), answer)


NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def read_number(text: str) -> Decimal | None:
    """Read the number a text ends with: the last one inside the last ``\\boxed{}``, else the last of all.

    Thousands separators and a dollar sign are understood; ``18.00`` equals ``18``.
    """
    boxed = re.findall(r"\\boxed\s*\{([^{}]*)\}", text)
    numbers = NUMBER.findall(boxed[-1] if boxed else text)
    if not numbers:
        return None
    try:
        return Decimal(numbers[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


if __name__ == "__main__":
    Gsm8kTinkerEnv.cli()
