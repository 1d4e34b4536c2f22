"""Whether Weights & Biases is used: from the environment, and never in a way that prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

WandbMode = Literal["online", "offline", "disabled"]


def wandb_mode(project: str | None) -> WandbMode:
    """How W&B is used: ``online``, ``offline`` or ``disabled``; never in a way that prompts.

    ``$WANDB_MODE`` decides when it is set. Otherwise W&B is on only with a project and a key
    (``$WANDB_API_KEY`` or a login kept in ``~/.netrc``).
    """
    asked = os.environ.get("WANDB_MODE")
    if asked in ("online", "offline"):
        return asked
    if asked is not None or not project:
        return "disabled"
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    has_login = netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")
    return "online" if os.environ.get("WANDB_API_KEY") or has_login else "disabled"
