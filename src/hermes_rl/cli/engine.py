"""``hermes-rl engine``: serve a model, list and stop engines, look at checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The local Tinker server.")

WorkspaceOption = Annotated[Path | None, typer.Option("--workspace", help="Workspace folder.")]


@app.command()
def serve(
    model: Annotated[str, typer.Option("--model", help="Folder or hub name of the base model.")],
    port: Annotated[int, typer.Option(help="Port on --host; 0 lets the system choose.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16 (base weights).")] = "auto",
    lora_alpha: Annotated[float, typer.Option(help="Numerator of every adapter's scaling.")] = 32.0,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 chooses by model size.")] = 0,
    workspace: WorkspaceOption = None,
) -> None:
    """Serve a model until interrupted. Prints the URL and the key to give to ``tinker`` programs."""
    from hermes_rl.config import Workspace
    from hermes_rl.engine import process

    ws = Workspace.resolve(workspace)
    arguments = ["--model", model, "--host", host, "--port", str(port), "--device", device]
    arguments += ["--dtype", dtype, "--lora-alpha", str(lora_alpha), "--threads", str(threads)]
    arguments += ["--idle-timeout", "0", "--checkpoints", str(ws.checkpoints)]
    raise typer.Exit(process.main(arguments))


@app.command("list")
def list_running(workspace: WorkspaceOption = None) -> None:
    """Engines of this workspace that are running."""
    from hermes_rl.config import Workspace
    from hermes_rl.engine.registry import list_engines

    records = list_engines(Workspace.resolve(workspace))
    if not records:
        typer.echo("No engine is running.")
    for record in records:
        minutes = (time.time() - record.started) / 60
        typer.echo(
            f"{record.key}  pid {record.address.pid}  {record.address.base_url}  "
            f"{record.spec.get('model')}  up {minutes:.0f} min"
        )


@app.command()
def stop(
    key: Annotated[
        str | None, typer.Argument(help="Key as `engine list` shows it; all when left out.")
    ] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Stop an engine. Runs that use it fail."""
    from hermes_rl.config import Workspace
    from hermes_rl.engine.registry import list_engines, stop_engine

    ws = Workspace.resolve(workspace)
    keys = [record.key for record in list_engines(ws)] if key is None else [key]
    for each in keys:
        typer.echo(f"{each} {'stopped' if stop_engine(ws, each) else 'was not running'}")
    if not keys:
        typer.echo("No engine is running.")


@app.command()
def checkpoints(
    keep: Annotated[int | None, typer.Option(min=0, help="Delete all but the newest N of every run.")] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Checkpoints that the engines of this workspace have written, the newest first."""
    from hermes_rl.config import Workspace
    from hermes_rl.engine.checkpoints import CheckpointStore

    store = CheckpointStore(Workspace.resolve(workspace).checkpoints)
    if keep is not None:
        for meta in store.prune(keep):
            typer.echo(f"deleted {meta.path}")
    found = store.all()
    if not found:
        typer.echo("No checkpoints.")
    for meta in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(meta.created))
        size = store.size(meta) / 2**20
        typer.echo(f"{when}  {size:8.1f} MB  rank {meta.rank:<4d} {meta.path}  ({meta.base_model})")


@app.command()
def export(
    path: Annotated[str, typer.Argument(help="tinker://RUN/weights/NAME, or a checkpoint's folder.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    merge: Annotated[bool, typer.Option("--merge", help="A whole model instead of a PEFT adapter.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Where the base model lies, if it has moved.")
    ] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Write a checkpoint out: as a PEFT adapter, or merged into a model that transformers loads."""
    from hermes_rl.config import Workspace
    from hermes_rl.engine.checkpoints import CheckpointError, CheckpointStore, parse_path
    from hermes_rl.engine.export import export_adapter, export_merged
    from hermes_rl.errors import EngineError

    folder = Path(path)
    if path.startswith("tinker://"):
        try:
            folder = CheckpointStore(Workspace.resolve(workspace).checkpoints).folder(*parse_path(path))
        except CheckpointError as error:
            raise EngineError(str(error)) from error
    if merge:
        export_merged(folder, target, base_model=base_model)
    else:
        export_adapter(folder, target)
    typer.echo(f"wrote {target}")
