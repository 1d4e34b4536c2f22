"""The configuration file for an environment that someone starts by its own ``serve`` command."""

from __future__ import annotations

from pathlib import Path

import yaml

from hermes_rl.config import RunConfig, write_private


def write_external_config(
    path: Path, config: RunConfig, *, trajectories_url: str, inference_url: str, key: str
) -> None:
    """Write what ``python FILE serve --config PATH`` needs to join a run.

    The file holds the URLs of the run's servers with their capabilities, so it is readable by its owner
    only and is removed when the run ends.
    """
    dumped = config.model_dump(mode="json")
    servers = [entry | {"base_url": inference_url, "api_key": key} for entry in dumped["openai"]]
    contents = {
        "env": dumped["env"] | {"rollout_server_url": trajectories_url},
        "openai": servers,
        "slurm": dumped["slurm"],
        "testing": dumped["testing"],
    }
    write_private(path, yaml.safe_dump(contents, sort_keys=False, allow_unicode=True))
