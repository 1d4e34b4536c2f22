"""Environments that go wrong, each in its own way."""

import asyncio
import time

import httpx
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class MisbehavingConfig(BaseEnvConfig):
    misbehave: str = "not at all"


class MisbehavingEnv(BaseEnv):
    """Goes wrong as its ``misbehave`` field says."""

    name = "misbehaving"
    env_config_cls = MisbehavingConfig

    @classmethod
    def config_init(cls):
        # One configuration instead of a list, which Atropos allows too.
        return MisbehavingConfig(), APIServerConfig(model_name="x", base_url="http://x/v1")

    def does(self, what):
        return self.config.misbehave == what

    async def setup(self):
        if self.does("raise in setup"):
            raise RuntimeError("no data today")
        if self.does("hang in setup"):
            await asyncio.sleep(10_000)
        if self.does("block in setup"):
            time.sleep(10_000)
        if self.does("ask for what is the trainer's"):
            async with httpx.AsyncClient(base_url=self.config.rollout_server_url) as http:
                asked = [await http.post("/finish", json={"reason": "enough"}), await http.get("/reset_data")]
                print("answered", [answer.status_code for answer in asked], flush=True)

    async def get_server_info(self):
        await super().get_server_info()
        while self.does("ask the server for its info again and again"):
            await asyncio.sleep(0.05)
            await super().get_server_info()

    async def get_next_item(self):
        if self.does("raise in get_next_item"):
            raise KeyError("next")
        return 0

    async def collect_trajectories(self, item):
        if self.does("raise in collect_trajectories"):
            raise ValueError("cannot collect")
        if self.does("never return"):
            await asyncio.sleep(10_000)
        if self.does("return nonsense"):
            return "nonsense"
        size = self.config.group_size + (1 if self.does("wrong group size") else 0)
        equal = self.does("equal scores")
        group = {
            "tokens": [[1, 2, 3]] * size,
            "masks": [[-100, 2, 3]] * size,
            "scores": [1.0 if equal else float(i % 2) for i in range(size)],
        }
        if self.does("huge advantages"):
            group["advantages"] = [[1e30 * (-1) ** i] * 3 for i in range(size)]
        return group, []

    async def evaluate(self, *args, **kwargs):
        if self.does("raise in evaluate"):
            raise ZeroDivisionError("no items")
        if self.does("hang in evaluate"):
            await asyncio.sleep(10_000)
        return {"eval/percent_correct": 0.5}
