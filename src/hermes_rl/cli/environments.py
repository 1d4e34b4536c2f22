"""``hermes-rl environments …``: what can be trained on. Runs in the user's shell."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.table import Table

from hermes_rl.cli.console import output
from hermes_rl.cli.run import JsonOption, WorkspaceOption

if TYPE_CHECKING:
    from hermes_rl.config import CatalogueField

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
    """Show an environment and the fields of its own, for `run start --set`.

    A field that shares its name with one that every run has is called env.NAME.
    """
    from hermes_rl.config import Workspace
    from hermes_rl.environments.discovery import find
    from hermes_rl.environments.inspection import environment_fields

    workspace = Workspace.resolve(workspace_dir)
    environment = find(workspace.environments_dirs, name)
    found = list(environment_fields(workspace, environment))
    fields = [_described(field) for field in found if field.settable]
    if as_json:
        typer.echo(json.dumps(_plain(environment) | {"fields": fields}, indent=2, default=str))
        return
    console = output()
    console.print(
        f"{environment.name}: {environment.description or ''}\n{environment.file_path}\n", markup=False
    )
    table = Table("field", "type", "default", "accepts", "description", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for field in fields:
        shown = (field[key] for key in ("name", "type", "default", "allowed", "description"))
        table.add_row(*(escape(str(value)) for value in shown))
    console.print(table)
    if len(fields) < len(found):
        console.print("\nIts own seed is the run's: --seed.", markup=False)


def _described(field: CatalogueField) -> dict[str, Any]:
    from hermes_rl.config.catalogue import without_secrets

    default = without_secrets({field.key: field.default})[field.key]
    return _plain(field) | {"name": field.key, "default": default, "allowed": field.allowed()}


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value.model_dump(mode="json")  # type: ignore[arg-type]
