"""Ends the interpreter that imports it."""

import sys

from atroposlib.envs.base import BaseEnv

sys.exit(3)


class ExitsEnv(BaseEnv):
    """Never gets this far."""

    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs): ...
