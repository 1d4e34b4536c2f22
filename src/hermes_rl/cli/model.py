"""``hermes-rl model …``: the models that runs have trained. Runs in the user's shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hermes_rl.config import Workspace

app = typer.Typer(no_args_is_help=True, help="The models that runs have trained.")


@app.callback()
def model() -> None:
    """The models that runs have trained."""


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's id, the beginning of one, or 'latest'; RUN@STEP for one checkpoint."
        ),
    ],
    merge: Annotated[bool, typer.Option("--merge", help="A whole model instead of a PEFT adapter.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to make. Default: ./RUN.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Where the base model lies, if it has moved.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option("--workspace", metavar="DIR", help="The workspace.")
    ] = None,
) -> None:
    """Write a run's last checkpoint out: a PEFT adapter, or merged into a model that transformers loads."""
    from hermes_rl import runs
    from hermes_rl.config import Workspace
    from hermes_rl.engine.export import export_adapter, export_merged

    ws = Workspace.resolve(workspace)
    name, _, step = run.partition("@")
    run_id = runs.resolve_id(ws, name)
    checkpoint = _checkpoint(ws, run_id, step)
    target = out or Path(run_id)
    if merge:
        export_merged(checkpoint, target, base_model=base_model)
    else:
        export_adapter(checkpoint, target)
    typer.echo(f"wrote {target}")


def _checkpoint(ws: Workspace, run_id: str, step: str) -> Path:
    """The folder of a run's last checkpoint, or of the one of a step.

    Raises:
        EngineError: the run has none, or it does not lie in this workspace.
    """
    from hermes_rl.engine.checkpoints import CheckpointError, CheckpointStore, parse_path
    from hermes_rl.errors import EngineError
    from hermes_rl.runs.files import read_checkpoints

    saved = read_checkpoints(ws.run_dir(run_id))
    asked = [entry for entry in saved if not step or str(entry["step"]) == step]
    if not asked:
        raise EngineError(
            f"Run {run_id} has no checkpoint{f' of step {step}' if step else ''}.",
            allowed=[f"{run_id}@{entry['step']}" for entry in saved] or None,
            hint=None
            if saved
            else "The last step is saved when a run completes; save_checkpoint_interval saves others.",
        )
    last = max(asked, key=lambda entry: entry["step"])
    store = CheckpointStore(ws.checkpoints)
    for path in (last.get("sampler_path"), last["state_path"]):
        try:
            found = store.meta(*parse_path(path)) if path else None
        except CheckpointError:
            continue
        if found is not None:
            return store.folder(found.run, found.kind, found.name)
    raise EngineError(
        f"The checkpoint of step {last['step']} is not in this workspace: {last['state_path']}.",
        hint="It has been deleted, or the run was trained on another Tinker server, which can download it.",
    )
