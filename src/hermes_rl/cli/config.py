"""``hermes-rl config …``: every field, its value and where that comes from. Runs in the user's shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hermes_rl.cli.console import output
from hermes_rl.cli.run import JsonOption, WorkspaceOption
from hermes_rl.errors import ConfigError

if TYPE_CHECKING:
    from hermes_rl.config import CatalogueField, FieldInForce, Policy, Workspace

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

EnvironmentOption = Annotated[
    str | None,
    typer.Option("--environment", "-e", metavar="NAME", help="Include this environment's own fields."),
]
ProfileOption = Annotated[
    str | None, typer.Option(help="Model profile.", show_default="the policy's, else embedded")
]


@app.command()
def show(
    environment: EnvironmentOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Show every field as an agent gets it: value, where it comes from, whether the agent may change it."""
    from hermes_rl.config import Workspace, policy_path

    workspace = Workspace.resolve(workspace_dir)
    _, profile, fields = _in_force(workspace, environment, profile)
    if as_json:
        typer.echo(json.dumps({name: _plain(item) for name, item in fields.items()}, indent=2, default=str))
        return
    console = output()
    path = policy_path(workspace)
    console.print(f"profile {profile}; policy {path if path.exists() else 'none'}\n", markup=False)
    table = Table("field", "value", "from", "agent", "allowed", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    section = None
    for item in fields.values():
        if item.field.section != section:
            section = item.field.section
            table.add_row(f"[bold]{section}[/]")
        table.add_row(
            f"  {item.field.key}",
            escape(_value_text(item, item.value)),
            item.source,
            "locked" if item.field.locked else "may change",
            escape(item.field.allowed()),
        )
    console.print(table)


@app.command()
def explain(
    field: Annotated[str, typer.Argument(help="Name of a field, such as learning_rate.")],
    environment: EnvironmentOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Explain one field: what it does, what it accepts, its value and where that comes from."""
    from hermes_rl.config import FIELDS, PROFILES, Workspace, find_field
    from hermes_rl.config.invocation import command

    workspace = Workspace.resolve(workspace_dir)
    _, profile, fields = _in_force(workspace, environment, profile)
    own = {item.field.name: item.field for item in fields.values() if item.field.own}
    found = find_field(field, own)
    if found.key not in fields:
        raise ConfigError(f"{found.name} is set when a run is created.", hint=found.description)
    item = fields[found.key]
    if as_json:
        typer.echo(json.dumps(_plain(item), indent=2, default=str))
        return
    rows = Table.grid(padding=(0, 2))
    rows.add_row("field", f"{item.field.section}.{item.field.name}")
    rows.add_row("meaning", item.field.description)
    rows.add_row("accepts", item.field.allowed() + (f", in {item.field.unit}" if item.field.unit else ""))
    rows.add_row("value", f"{_value_text(item, item.value)}, from the {item.source}")
    if item.value != item.field.default:
        rows.add_row("", f"without profile and policy: {_value_text(item, item.field.default)}")
    for name, other in PROFILES.items():
        if name != profile and not found.own and found.name in other.values:
            rows.add_row("", f"profile {name}: {_value_text(item, other.values[found.name])}")
    rows.add_row("agent", "locked: only the operator changes it" if item.field.locked else "may change it")
    option = "--seed VALUE" if found is FIELDS["seed"] else f"--set {found.key}=VALUE"
    rows.add_row("set it", f"{command(workspace, 'run', 'start', 'ENVIRONMENT')} {option}")
    output().print(rows, markup=False)


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="A policy (TOML), or a configuration of a run (YAML).")],
    environment: EnvironmentOption = None,
    profile: ProfileOption = None,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Check a policy file or a run's configuration; says what is wrong, or what it sets.

    A policy is checked for every profile that it allows, and with every environment that it has rules for.
    """
    from hermes_rl.config import Workspace, read_policy, without_secrets

    workspace = Workspace.resolve(workspace_dir)
    console = output()
    if file.suffix == ".toml":
        policy = read_policy(file)
        _check_policy(workspace, policy)
        _, profile, fields = _in_force(workspace, environment, profile, policy)
        changed = [item for item in fields.values() if item.source == "policy"]
        unlocked = [name for name, item in fields.items() if not item.field.locked]
        console.print(f"{file} is a valid policy, profile {profile}.", markup=False)
        for item in changed:
            console.print(f"  {item.field.key} = {_value_text(item, item.value)}", markup=False)
        console.print(f"An agent may change: {', '.join(unlocked)}", markup=False)
        return
    overrides = _validated_overrides(workspace, file, environment, profile)
    console.print(f"{file} is a valid configuration. It sets:", markup=False)
    for name, value in without_secrets(overrides).items():
        console.print(f"  {name} = {_plain_text(value)}", markup=False)


def _check_policy(workspace: Workspace, policy: Policy) -> None:
    """Check a policy with all that it names.

    Raises:
        HermesRLError: a name in it is unknown, or its rules leave out a default.
    """
    from hermes_rl.config import fields_in_force
    from hermes_rl.environments.discovery import discover
    from hermes_rl.environments.inspection import environment_fields

    found = {environment.name: environment for environment in discover(workspace.environments_dirs)}
    policy.check_environments(found)
    own_fields = {name: list(environment_fields(workspace, found[name])) for name in policy.own_fields}
    for profile in policy.allowed_profiles:
        fields_in_force(profile, policy)
        for name, own in own_fields.items():
            fields_in_force(profile, policy, environment=name, own_fields=own)


def _validated_overrides(
    workspace: Workspace, file: Path, environment: str | None, profile: str | None
) -> dict[str, Any]:
    from hermes_rl.config import (
        DEFAULT_ENVIRONMENT,
        DEFAULT_PROFILE,
        RunConfig,
        build_run_config,
        read_overrides,
    )
    from hermes_rl.config.runfile import read_yaml_mapping
    from hermes_rl.environments.discovery import find
    from hermes_rl.environments.inspection import environment_fields

    data = read_yaml_mapping(file)
    if isinstance(data.get("run"), dict):
        config = RunConfig.from_yaml(file)
        environment, profile = environment or config.run.environment, profile or config.run.profile
    overrides = read_overrides(file)
    found = find(workspace.environments_dirs, environment or DEFAULT_ENVIRONMENT)
    build_run_config(
        found,
        profile=profile or DEFAULT_PROFILE,
        overrides=overrides,
        own_fields=lambda: environment_fields(workspace, found),
    )
    return overrides


def _in_force(
    workspace: Workspace, environment: str | None, profile: str | None, policy: Policy | None = None
) -> tuple[Policy, str, dict[str, FieldInForce]]:
    from hermes_rl.config import fields_in_force, load_policy

    policy = policy or load_policy(workspace)
    profile = profile or policy.profile
    own: list[CatalogueField] | None = None
    if environment is not None:
        from hermes_rl.environments.discovery import find
        from hermes_rl.environments.inspection import environment_fields

        found = find(workspace.environments_dirs, environment)
        environment, own = found.name, list(environment_fields(workspace, found))
    return policy, profile, fields_in_force(profile, policy, environment=environment, own_fields=own)


def _value_text(item: FieldInForce, value: Any) -> str:
    from hermes_rl.config import without_secrets

    return _plain_text(without_secrets({item.field.key: value})[item.field.key])


def _plain_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(item: FieldInForce) -> dict[str, Any]:
    from hermes_rl.config import without_secrets

    field = item.field
    return {
        "section": field.section,
        "value": without_secrets({field.key: item.value})[field.key],
        "default": without_secrets({field.key: item.default})[field.key],
        "source": item.source,
        "locked": field.locked,
        "type": field.type,
        "unit": field.unit,
        "minimum": field.minimum,
        "maximum": field.maximum,
        "choices": field.choices,
        "allowed": field.allowed(),
        "description": field.description,
    }
