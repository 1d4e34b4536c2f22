"""Answer with the digit that is asked for."""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field


class DigitsConfig(BaseEnvConfig):
    digits: int = Field(default=4, ge=1, le=10, description="How many different digits are asked for.")
    eval_items: int = Field(default=8, description="Held-out items of one evaluation.")


class DigitsEnv(BaseEnv):
    """Say the digit.

    The prompt names a digit; a completion that starts with it is right.
    """

    name = "digits"
    env_config_cls = DigitsConfig

    @classmethod
    def config_init(cls):
        return DigitsConfig(group_size=4, batch_size=8), [
            APIServerConfig(model_name="x", base_url="http://x/v1")
        ]

    async def setup(self):
        self.position = 0
        self.right = []
        self.eval_metrics = []

    async def get_next_item(self):
        self.position += 1
        return self.position % self.config.digits

    async def collect_trajectories(self, item):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=f"say {item}:", n=self.config.group_size, max_tokens=4)
            for node in managed.get_state()["nodes"]:
                text = node.full_text.partition(":")[2]
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(1.0 if text.startswith(str(item)) else 0.0)
                self.right.append(group["scores"][-1])
        return group, []

    async def evaluate(self, *args, **kwargs):
        import asyncio

        answers = await asyncio.gather(
            *(
                self.server.chat_completion(
                    messages=[{"role": "user", "content": f"say {i}"}], n=1, max_tokens=4, split="eval"
                )
                for i in range(self.config.eval_items)
            )
        )
        right = [a.choices[0].message.content.startswith(str(i)) for i, a in enumerate(answers)]
        self.eval_metrics.append(("eval/percent_correct", sum(right) / len(right)))

    async def wandb_log(self, wandb_metrics: dict | None = None):
        wandb_metrics = wandb_metrics or {}
        if self.right:
            wandb_metrics["train/percent_correct"] = sum(self.right) / len(self.right)
        self.right = []
        wandb_metrics.update(self.eval_metrics)
        self.eval_metrics = []
        await super().wandb_log(wandb_metrics)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"position": self.position})


if __name__ == "__main__":
    random.seed(0)
    DigitsEnv.cli()
