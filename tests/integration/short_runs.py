"""A workspace whose policy makes every run an agent starts short, and an end to whatever is left running."""

from __future__ import annotations

from pathlib import Path

from hermes_rl import runs
from hermes_rl.config import Workspace
from hermes_rl.engine.registry import list_engines, stop_engine

SHORT = """
[fields.total_steps]
value = 4

[fields.num_requests_for_eval]
value = 16
locked = false

[fields.max_num_workers]
value = 8
locked = false
"""


def short_workspace(root: Path, policy: str = SHORT) -> Workspace:
    """A workspace in ``root`` with this policy."""
    workspace = Workspace.resolve(root / "workspace")
    (workspace.root / "policy.toml").write_text(policy, encoding="utf-8")
    return workspace


def end_everything(workspace: Workspace) -> None:
    """Stop the runs and engines of a workspace."""
    for status in runs.list_runs(workspace):
        if not status.is_final:
            runs.stop(workspace, status.run_id)
    for engine in list_engines(workspace):
        stop_engine(workspace, engine.key)
