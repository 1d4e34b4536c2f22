"""Never finishes being imported."""

from atroposlib.envs.base import BaseEnv

while True:
    pass


class LoopsEnv(BaseEnv):
    """Never gets this far."""

    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs): ...
