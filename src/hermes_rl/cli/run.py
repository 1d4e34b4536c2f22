"""``hermes-rl run …``: one run from start to results. Runs in the user's shell."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hermes_rl.cli.assignments import parse_assignments
from hermes_rl.cli.console import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    EXIT_TIMEOUT,
    age_text,
    number_text,
    output,
    seconds_text,
)
from hermes_rl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hermes_rl.config import RunConfig, Workspace
    from hermes_rl.runs.run_status import RunStatus

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        metavar="DIR",
        help="The workspace. Default: $HERMES_RL_WORKSPACE, else the checkout's tinker-atropos, "
        "else ~/.hermes/rl.",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="[ID]", help="A run's id, the beginning of one, or 'latest'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LOG_ROLES = ("trainer", "env", "api", "supervisor")


@app.command()
def start(
    environment: Annotated[
        str, typer.Argument(help="Name of the environment, as `environments list` shows it.")
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a field; may be repeated. `environments show` lists fields.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Fields from a YAML file, such as a search's best.yaml."
        ),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Model profile. Default: embedded.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data order, adapter and sampling.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Watch the run until it ends.")] = False,
    detach_on_interrupt: Annotated[
        bool, typer.Option("--detach-on-interrupt", help="With --follow: Ctrl-C leaves the run going.")
    ] = False,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(metavar="RUN[@STEP]", help="Begin with the weights and optimizer of another run."),
    ] = None,
    external_environment: Annotated[
        bool,
        typer.Option("--external-environment", help="Start no environment: one that you start joins."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration, start nothing.")
    ] = False,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Start a training run on an ENVIRONMENT.

    The run goes on by itself when this command has returned or its terminal is closed. With [bold]--follow[/]
    Ctrl-C stops the run cleanly, unless --detach-on-interrupt is given.

    Examples:

        hermes-rl run start arithmetic_tinker --follow

        hermes-rl run start arithmetic_tinker --set learning_rate=6e-5 --set batch_size=32 --seed 1

        hermes-rl run start arithmetic_tinker --config best.yaml --set total_steps=200
    """
    from hermes_rl import runs
    from hermes_rl.config.invocation import command

    workspace = _workspace(workspace_dir)
    overrides = _overrides(config_file, assignments)
    config = _build(workspace, environment, profile, overrides, seed)
    console = output()
    if dry_run:
        import yaml

        typer.echo(yaml.safe_dump(config.shown(), sort_keys=False, allow_unicode=True), nl=False)
        return
    run_id = runs.start(
        workspace,
        config,
        overrides=overrides,
        from_checkpoint=from_checkpoint,
        external_environment=external_environment,
    )
    console.print(f"Run {run_id}: {environment}, profile {config.run.profile}, seed {seed}", markup=False)
    if external_environment:
        look = command(workspace, "run", "endpoints", run_id)
        console.print(f"Its servers, for your environment: {look}", markup=False, soft_wrap=True)
    if follow:
        _follow(workspace, run_id, stop_on_interrupt=not detach_on_interrupt)
    else:
        _print_next(console, workspace, run_id)


def _print_next(console: Console, workspace: Workspace, run_id: str) -> None:
    from hermes_rl.config.invocation import command

    for what, verb in (("Watch it:", "watch"), ("Stop it: ", "stop")):
        console.print(f"{what} {command(workspace, 'run', verb, run_id)}", markup=False, soft_wrap=True)


def _workspace(path: Path | None) -> Workspace:
    from hermes_rl.config import Workspace

    return Workspace.resolve(path)


def _overrides(config_file: Path | None, assignments: list[str] | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if config_file is not None:
        from hermes_rl.config import read_overrides

        overrides.update(read_overrides(config_file))
    overrides.update(parse_assignments(assignments or []))
    return overrides


def _build(
    workspace: Workspace, environment: str, profile: str | None, overrides: dict[str, Any], seed: int
) -> RunConfig:
    from hermes_rl.config import DEFAULT_PROFILE, build_run_config
    from hermes_rl.environments.discovery import find

    found = find(workspace.environments_dirs, environment)

    def own_fields() -> Any:
        from hermes_rl.environments.inspection import environment_fields

        return environment_fields(workspace, found)

    return build_run_config(
        found, profile=profile or DEFAULT_PROFILE, overrides=overrides, seed=seed, own_fields=own_fields
    )


def _follow(workspace: Workspace, run_id: str, *, stop_on_interrupt: bool) -> None:
    """Watch a run to its end and leave with the exit status that tells how it ended."""
    from hermes_rl import runs
    from hermes_rl.cli.follow import follow, print_end
    from hermes_rl.config.invocation import command

    console = output()
    try:
        status = follow(workspace, run_id, console)
    except KeyboardInterrupt:
        if not stop_on_interrupt:
            console.print(f"\nNo longer watching; run {run_id} goes on.", markup=False)
            _print_next(console, workspace, run_id)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        console.print(f"\nStopping run {run_id}… (Ctrl-C again stops waiting for it)", markup=False)
        try:
            print_end(console, runs.stop(workspace, run_id))
        except KeyboardInterrupt:
            look = command(workspace, "run", "status", run_id)
            console.print(f"Run {run_id} is stopping by itself: {look}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if status.status != "completed":
        raise typer.Exit(EXIT_RUN_FAILED)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(metavar="ID", help="A run's id, the beginning of one, or 'latest'.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Watch the run until it ends.")] = False,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Go on with a run that was stopped or failed, from its last checkpoint.

    Example:

        hermes-rl run resume latest --follow
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    run_id = runs.resume(workspace, runs.resolve_id(workspace, run))
    output().print(f"Run {run_id} goes on.", markup=False)
    if follow:
        _follow(workspace, run_id, stop_on_interrupt=True)


@app.command()
def watch(run: RunArgument = "latest", workspace_dir: WorkspaceOption = None) -> None:
    """Watch a run until it ends. Ctrl-C ends only the watching.

    Example:

        hermes-rl run watch latest
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    _follow(workspace, runs.resolve_id(workspace, run), stop_on_interrupt=False)


@app.command()
def status(
    run: RunArgument = "latest", as_json: JsonOption = False, workspace_dir: WorkspaceOption = None
) -> None:
    """Show where a run is: steps, metrics, processes, logs.

    Examples:

        hermes-rl run status

        hermes-rl run status 20261130-2041 --json
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    now = runs.status(workspace, runs.resolve_id(workspace, run))
    if as_json:
        typer.echo(now.model_dump_json(indent=2))
        return
    _print_status(now)


def _print_status(now: RunStatus) -> None:
    console = output()
    rows = Table.grid(padding=(0, 2))
    rows.add_row("run", now.run_id)
    rows.add_row("environment", f"{now.environment}, profile {now.profile}, seed {now.seed}")
    rows.add_row("status", now.status + (f" ({now.phase})" if now.phase else ""))
    if now.reason:
        rows.add_row("reason", now.reason)
    rows.add_row("step", f"{now.step}/{now.total_steps}")
    rows.add_row("reward_mean", number_text(now.reward_mean))
    rows.add_row("percent_correct", number_text(now.percent_correct))
    rows.add_row("eval_percent_correct", number_text(now.eval_percent_correct))
    if now.overrides:
        rows.add_row("set", ", ".join(f"{name}={value}" for name, value in now.overrides.items()))
    if now.search_id:
        rows.add_row("search", f"{now.search_id}, trial {now.trial}")
    rows.add_row("created", f"{now.created_at:%Y-%m-%d %H:%M:%S} UTC, {age_text(now.created_at)} ago")
    if now.started_at and now.ended_at:
        rows.add_row("took", seconds_text((now.ended_at - now.started_at).total_seconds()))
    console.print(rows, markup=False)
    table = Table("process", "pid", "state", "CPU %", "memory MB", "log", box=None, padding=(0, 2, 0, 0))
    for process in now.processes:
        table.add_row(
            process.role,
            str(process.pid or "-"),
            process.state + (f" ({process.exit_code})" if process.exit_code else ""),
            number_text(process.cpu_percent, 1),
            number_text(process.memory_mb, 1),
            now.logs.get(process.role, "shared by runs"),
        )
    console.print()
    console.print(table, markup=False)


@app.command("list")
def list_runs(
    as_json: JsonOption = False,
    search: Annotated[str | None, typer.Option(metavar="ID", help="Only the trials of this search.")] = None,
    limit: Annotated[int, typer.Option(help="The last N runs; 0 shows all.", min=0)] = 30,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """List runs, the latest last.

    Example:

        hermes-rl run list --limit 10
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    found = runs.list_runs(workspace, search)
    shown = found[-limit:] if limit else found
    if as_json:
        typer.echo(json.dumps([status.model_dump(mode="json") for status in shown], indent=2))
        return
    console = output()
    if not found:
        from hermes_rl.config.invocation import command

        start = command(workspace, "run", "start", "ENVIRONMENT")
        console.print(f"No runs yet. Start one: {start}", markup=False, soft_wrap=True)
        return
    table = Table(
        "run",
        "environment",
        "status",
        "step",
        "reward",
        "eval",
        "age",
        "reason",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.columns[0].no_wrap = True
    for status in shown:
        table.add_row(
            status.run_id,
            status.environment,
            status.status,
            f"{status.step}/{status.total_steps}",
            number_text(status.reward_mean),
            number_text(status.eval_percent_correct),
            age_text(status.created_at),
            (status.reason or "")[:80] if status.status == "failed" else "",
        )
    console.print(table, markup=False)
    if len(shown) < len(found):
        console.print(f"{len(found) - len(shown)} earlier runs: --limit 0 shows them.", markup=False)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="ID", help="A run's id, the beginning of one, or 'latest'.")],
    wait: Annotated[bool, typer.Option(help="Return when no process of the run is left.")] = True,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Stop a run. What it has learned and measured so far is kept.

    Examples:

        hermes-rl run stop latest

        hermes-rl run stop 20261130-2041 --no-wait
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    run_id = runs.resolve_id(workspace, run)
    if runs.glance(workspace, run_id).is_final:
        output().print(
            f"Run {run_id} has ended already: {runs.glance(workspace, run_id).status}", markup=False
        )
        return
    now = runs.stop(workspace, run_id, wait=wait)
    output().print(f"Run {run_id}: {now.status}, step {now.step}/{now.total_steps}", markup=False)


@app.command()
def wait(
    run: RunArgument = "latest",
    timeout: Annotated[float | None, typer.Option(help="Seconds; then exit status 124.")] = None,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Wait until a run has ended. Exit status 0 if it completed, 1 if it failed or was stopped.

    Example:

        hermes-rl run wait latest --timeout 600
    """
    from hermes_rl import runs
    from hermes_rl.cli.follow import print_end

    workspace = _workspace(workspace_dir)
    now = runs.wait(workspace, runs.resolve_id(workspace, run), timeout)
    if not now.is_final:
        output().print(f"Run {now.run_id} is {now.status}, step {now.step}/{now.total_steps}", markup=False)
        raise typer.Exit(EXIT_TIMEOUT)
    print_end(output(), now)
    if now.status != "completed":
        raise typer.Exit(EXIT_RUN_FAILED)


@app.command()
def logs(
    run: RunArgument = "latest",
    role: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(LOG_ROLES),
            help="Whose log. Default: of the process that failed, else the trainer's.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last N lines; 0 shows all.", min=0)] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Print the log of one of a run's processes.

    Examples:

        hermes-rl run logs latest --follow

        hermes-rl run logs latest --role env --lines 20
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    now = runs.glance(workspace, runs.resolve_id(workspace, run))
    chosen = role or (now.guilty_role if now.guilty_role in now.logs else "trainer")
    if chosen not in now.logs:
        raise ConfigError(
            f"There is no log of {chosen!r}.", allowed=LOG_ROLES, hint="Choose one with --role."
        )
    path = Path(str(now.logs[chosen]))
    if not path.exists() and not follow:
        raise ConfigError(f"Run {now.run_id} has no log of {chosen} yet: {path}", hint="-f waits for it.")
    try:
        _print_log(path, lines, follow, lambda: runs.glance(workspace, now.run_id).is_final)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_log(path: Path, lines: int, follow: bool, is_over: Callable[[], bool]) -> None:
    while follow and not path.exists():
        if is_over():
            return
        time.sleep(0.1)
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read()
        wanted = text.splitlines(keepends=True)[-lines:] if lines else [text]
        sys.stdout.write("".join(wanted))
        over = not follow
        while not over:
            sys.stdout.flush()
            over = is_over()  # before the read, so that what was written last is still printed
            sys.stdout.write(file.read())
            if not over:
                time.sleep(0.2)
    sys.stdout.flush()


@app.command()
def results(
    run: RunArgument = "latest", as_json: JsonOption = False, workspace_dir: WorkspaceOption = None
) -> None:
    """Show what came of a run: final metrics, evaluations, checkpoints, files.

    Examples:

        hermes-rl run results latest

        hermes-rl run results latest --json
    """
    from hermes_rl import runs

    workspace = _workspace(workspace_dir)
    found = runs.results(workspace, runs.resolve_id(workspace, run))
    if as_json:
        typer.echo(json.dumps(found, indent=2, default=str))
        return
    _print_results(found)


def _print_results(found: dict[str, Any]) -> None:
    from hermes_rl.cli.follow import evaluation_line

    console = output()
    took = seconds_text(found["seconds"])
    console.print(
        f"Run {found['run_id']}: {found['status']}, step {found['step']}/{found['total_steps']}, {took}, "
        f"{round(found['tokens']):,} tokens",
        markup=False,
    )
    if found["reason"]:
        console.print(found["reason"], markup=False)
    curve = found["curves"]
    evaluated = [
        (step, value)
        for step, value in zip(curve["step"], curve.get("eval_percent_correct", []), strict=False)
        if value is not None
    ]
    if evaluated:
        console.print("\nEvaluations (eval_percent_correct):")
        for step, value in evaluated:
            console.print(
                f"  step {step:>5}  {value:.3f}  {'█' * round(40 * max(0.0, min(1.0, value)))}", markup=False
            )
        console.print(f"Best: {evaluation_line(found['best_evaluation'])}", markup=False)
    if found["metrics"]:
        from hermes_rl.config.metric_schema import METRICS

        console.print("\nLast training step:")
        table = Table.grid(padding=(0, 2))
        units = {metric.name: metric.unit for metric in METRICS if metric.kind == "train"}
        for name, value in found["metrics"].items():
            if name not in ("step", "time") and isinstance(value, int | float):
                counted = units.get(name) in ("groups", "sequences", "tokens")
                shown = f"{value:g}" if counted else number_text(float(value), 4)
                table.add_row(f"  {name}", shown, units.get(name, "").replace("-", ""))
        console.print(table, markup=False)
    for checkpoint in found["checkpoints"]:
        console.print(
            f"Checkpoint of step {checkpoint.get('step')}: {checkpoint.get('state_path')}", markup=False
        )
    console.print(
        f"\nMetrics: {found['files']['metrics']}\nConfiguration: {found['files']['config']}", markup=False
    )


@app.command()
def endpoints(
    run: RunArgument = "latest", as_json: JsonOption = False, workspace_dir: WorkspaceOption = None
) -> None:
    """Print the URLs of a running run's servers, for an environment that you start yourself.

    Whoever knows these URLs can use the servers: do not share them.

    Example:

        eval "$(hermes-rl run endpoints latest)"
    """
    from hermes_rl import runs
    from hermes_rl.runs.files import EXTERNAL_CONFIG

    workspace = _workspace(workspace_dir)
    run_id = runs.resolve_id(workspace, run)
    found = runs.endpoints(workspace, run_id)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    config = workspace.run_dir(run_id) / EXTERNAL_CONFIG
    typer.echo(f"# Any Atropos environment joins with: python FILE serve --config {shlex.quote(str(config))}")
