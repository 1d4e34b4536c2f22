"""Commands to be copied: as the command line is called from this shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from hermes_rl.config.workspace import Workspace


def program() -> str:
    """How the command line is called from this shell: by its name where that finds this installation."""
    script = Path(sys.executable).parent / "hermes-rl"
    found = shutil.which("hermes-rl")
    if found is not None and (not script.exists() or Path(found).samefile(script)):
        return "hermes-rl"
    if not script.exists():
        return "hermes-rl"
    here = Path.cwd()
    return str(script.relative_to(here)) if script.is_relative_to(here) else str(script)


def command(workspace: Workspace | Path, *arguments: str) -> str:
    """A command that does the same wherever it is pasted in this shell.

    Args:
        workspace: what it is about, or its root; named where a command would take another by itself.
        arguments: what stands after the program: ``"run", "status", run_id``.
    """
    root = workspace.root if isinstance(workspace, Workspace) else workspace
    place = [] if Workspace.usual_root().resolve() == root.resolve() else ["--workspace", str(root)]
    return shlex.join([program(), *arguments, *place])
