"""An environment that tells everybody everything it knows, then fails."""

import logging
import os

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class LeakingEnv(BaseEnv):
    """Prints, logs and raises its environment variables and addresses."""

    name = "leaking"
    env_config_cls = BaseEnvConfig

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), APIServerConfig(model_name="x", base_url="http://x/v1")

    def everything(self):
        return f"{dict(os.environ)} {self.config.rollout_server_url} {self.server.servers[0].config}"

    async def setup(self):
        print(self.everything(), flush=True)
        logging.getLogger("leaking").error("%s", self.everything())

    async def get_next_item(self):
        return 0

    async def collect_trajectories(self, item):
        raise RuntimeError(self.everything())

    async def evaluate(self, *args, **kwargs):
        raise RuntimeError(self.everything())
