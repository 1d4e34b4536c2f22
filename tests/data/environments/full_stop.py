"""Answer a sum without a full stop: written the way most Atropos environments are, knowing nothing of us."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field


class FullStopConfig(BaseEnvConfig):
    eval_items: int = Field(default=8, description="Held-out items of one evaluation.")


class FullStopEnv(BaseEnv):
    """Any answer is right that does not end in a full stop."""

    name = "full_stop"
    env_config_cls = FullStopConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(
            model_name="x", base_url="http://x/v1", server_type="openai", health_check=False
        )
        return FullStopConfig(group_size=4, batch_size=8), [server]

    async def setup(self):
        self.rng = random.Random(0)
        self.shares = []

    def question(self):
        return f"{self.rng.randrange(10, 100)}+{self.rng.randrange(10, 100)}="

    async def get_next_item(self):
        return [{"role": "user", "content": self.question()}]

    async def collect_trajectories(self, item):
        completion = await self.server.chat_completion(messages=item, n=self.config.group_size, max_tokens=8)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in completion.choices:
            messages = [*item, {"role": "assistant", "content": choice.message.content}]
            tokenized = tokenize_for_trainer(self.tokenizer, messages)
            group["tokens"].append(tokenized["tokens"])
            group["masks"].append(tokenized["masks"])
            group["scores"].append(0.0 if choice.message.content.endswith(".") else 1.0)
        return group, []

    async def evaluate(self, *args, **kwargs):
        answers = [
            await self.server.chat_completion(
                messages=await self.get_next_item(), n=1, max_tokens=8, split="eval"
            )
            for _ in range(self.config.eval_items)
        ]
        right = [not answer.choices[0].message.content.endswith(".") for answer in answers]
        self.shares.append(sum(right) / len(right))

    async def wandb_log(self, wandb_metrics=None):
        wandb_metrics = wandb_metrics or {}
        if self.shares:
            wandb_metrics["eval/percent_correct"] = self.shares.pop()
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    FullStopEnv.cli()
