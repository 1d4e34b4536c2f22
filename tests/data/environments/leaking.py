"""An environment that tells everybody everything it knows, then fails."""

import logging
import os
import subprocess
import sys

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
        subprocess.run(["env"], check=True)
        subprocess.run(["env"], check=True, stdout=sys.stdout, stderr=sys.stderr)
        sys.stdout.buffer.write(b"by buffer: " + os.environb[b"HF_TOKEN"] + b"\n")
        for part in (b"by descr", b"iptor: ", *(bytes([byte]) for byte in os.environb[b"OPENAI_API_KEY"])):
            os.write(2, part)
        os.write(2, b"\n")

    async def get_next_item(self):
        return 0

    async def collect_trajectories(self, item):
        raise RuntimeError(self.everything())

    async def evaluate(self, *args, **kwargs):
        raise RuntimeError(self.everything())
