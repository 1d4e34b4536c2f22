"""``hermes-rl environments …``: what can be trained on. Runs in the user's shell."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer
from rich.table import Table

from hermes_rl.cli.console import output
from hermes_rl.cli.run import JsonOption, WorkspaceOption

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.command("list")
def list_environments(as_json: JsonOption = False, workspace_dir: WorkspaceOption = None) -> None:
    """List the environments found, without running any of their code."""
    from hermes_rl.config import Workspace
    from hermes_rl.environments.discovery import discover

    workspace = Workspace.resolve(workspace_dir)
    found = discover(workspace.environments_dirs)
    if as_json:
        typer.echo(json.dumps([_plain(environment) for environment in found], indent=2, default=str))
        return
    console = output()
    table = Table("environment", "description", "file", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for environment in found:
        broken = f"cannot be used: {environment.error}" if environment.error else ""
        table.add_row(environment.name, broken or environment.description or "", str(environment.file_path))
    console.print(table, markup=False)
    if not found:
        console.print(
            f"No environment in {workspace.environments}: put an Atropos environment file there.",
            markup=False,
        )


@app.command()
def show(name: str, as_json: JsonOption = False, workspace_dir: WorkspaceOption = None) -> None:
    """Show an environment and the fields of its own, for `run start --set`."""
    from hermes_rl.config import Workspace
    from hermes_rl.environments.discovery import find
    from hermes_rl.environments.inspection import environment_fields

    workspace = Workspace.resolve(workspace_dir)
    environment = find(workspace.environments_dirs, name)
    fields = list(environment_fields(workspace, environment))
    if as_json:
        described = _plain(environment) | {"fields": [_plain(field) for field in fields]}
        typer.echo(json.dumps(described, indent=2, default=str))
        return
    console = output()
    console.print(
        f"{environment.name}: {environment.description or ''}\n{environment.file_path}\n", markup=False
    )
    table = Table("field", "type", "default", "description", box=None, padding=(0, 2, 0, 0))
    for field in fields:
        table.add_row(field.name, str(field.type), str(field.default), field.description or "")
    console.print(table, markup=False)


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value.model_dump(mode="json")  # type: ignore[arg-type]
