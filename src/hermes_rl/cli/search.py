"""``hermes-rl search``: find good hyperparameters. Drives the search in this process unless detached."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hermes_rl.cli.assignments import parse_assignments
from hermes_rl.cli.console import EXIT_INTERRUPTED, EXIT_RUN_FAILED, output
from hermes_rl.config import Workspace, without_secrets
from hermes_rl.errors import SearchError

app = typer.Typer(no_args_is_help=True, help="Search for good hyperparameters; every trial is a run.")

WorkspaceOption = Annotated[
    Path | None,
    typer.Option("--workspace", help="Workspace folder.", show_default="the checkout's tinker-atropos"),
]
SearchArgument = Annotated[str, typer.Argument(help="Id of the search, its beginning, or 'last'.")]


@app.command()
def start(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file that defines the search, or a W&B sweep file (YAML).")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="article-grid, article-random or article-bayes.")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", "-e", help="Environment to train on.")
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUES: 16,32,64 or log:1e-5..2e-4 or int:4..16:4 or 0.1..0.5. Repeatable."),
    ] = None,
    constraint: Annotated[
        list[str] | None, typer.Option(help="Condition such as 'batch_size % group_size == 0'. Repeatable.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="grid, random, tpe, gp, wandb or pbt.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Number of configurations; of members with pbt.", show_default="the grid, 24, or 8"
        ),
    ] = None,
    segments: Annotated[
        int | None, typer.Option(help="With pbt: parts of a trial, after which members are compared.")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option("--sweep", help="With wandb: join this sweep, [ENTITY/PROJECT/]ID, and take its space."),
    ] = None,
    sweep_method: Annotated[
        str | None, typer.Option(help="With wandb: grid, random or bayes.", show_default="bayes")
    ] = None,
    refine: Annotated[int | None, typer.Option(help="Then explore around the best K.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Trials at the same time.", show_default="2")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(help="METRIC[:last|best|mean-K|area|sum][:max|min]. Repeatable: Pareto front."),
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(help="Stop poor trials early: none, median, asha, promote, hyperband.")
    ] = None,
    replicate: Annotated[
        int | None,
        typer.Option(
            help="At the end, run the best and the default again on R fresh seeds; 0 does not.",
            show_default="3; with pbt or several objectives 0",
        ),
    ] = None,
    replicate_top: Annotated[
        int | None, typer.Option(help="How many of the best to run again.", show_default="2")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Model profile.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the strategy and of every trial.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE in every trial. Repeatable.")
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(help="End after this many optimizer steps in all; the replicates come on top."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="End after this many trained tokens in all; as --max-steps.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="End after this many minutes; as --max-steps.")
    ] = None,
    warm_start: Annotated[
        str | None, typer.Option(help="With tpe or gp: begin with the results of an earlier search.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print what would run; start nothing.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow/--detach", help="Stay until it ends, or leave it running.")
    ] = True,
    workspace: WorkspaceOption = None,
) -> None:
    """Start a search. It ends with a ranked table, a report and a ready-to-use configuration.

    Examples:

        hermes-rl search start --preset article-grid -e arithmetic_tinker

        hermes-rl search start --space learning_rate=log:1e-5..2e-4 --space lora_rank=16,32 --trials 12

        hermes-rl search start my-search.toml --detach
    """
    from hermes_rl.search.definition import define_search, read_definition_file
    from hermes_rl.search.orchestrator import create_search
    from hermes_rl.search.run_trials import RunTrials
    from hermes_rl.search.sweeps import read_sweep_file, sweep_notes

    fields: dict[str, Any] = {}
    assigned = parse_assignments(assign) if assign else {}
    if join is not None:
        if file is not None or preset is not None or space:
            raise SearchError("A sweep that is joined brings its own space.", hint="Leave out the others.")
        fields = _joined_sweep(join, assigned)
    elif file is not None:
        fields = read_sweep_file(file) if file.suffix in (".yaml", ".yml") else read_definition_file(file)
    given = {
        "preset": preset,
        "environment": environment,
        "strategy": strategy,
        "trials": trials,
        "segments": segments,
        "sweep_method": sweep_method,
        "refine": refine,
        "parallel": parallel,
        "objectives": objective or None,
        "pruner": pruner,
        "replicate": replicate,
        "replicate_top": replicate_top,
        "profile": profile,
        "seed": seed,
        "constraints": constraint or None,
        "warm_start": warm_start,
        "space": _read_space(space or []) or None,
    }
    fields.update({name: value for name, value in given.items() if value is not None})
    if objective:
        fields.pop("objective", None)
    if assigned:
        fields["set"] = {**fields.get("set", fields.pop("overrides", {})), **assigned}
    limits = {"steps": max_steps, "tokens": max_tokens, "minutes": max_minutes}
    if any(value is not None for value in limits.values()):
        fields["budget"] = {**fields.get("budget", {}), **{k: v for k, v in limits.items() if v is not None}}
    definition = define_search(fields)
    for note in sweep_notes(definition):
        output().print(note, markup=False, soft_wrap=True)
    chosen = Workspace.resolve(workspace)
    console = output()
    checker = RunTrials(chosen, None, definition.environment, definition.profile, definition.overrides)
    if dry_run:
        from hermes_rl.search.orchestrator import prepare_search

        definition = prepare_search(chosen, definition, checker)
        _print_plan(console, chosen, definition, checker)
        return
    store = create_search(chosen, definition, checker)
    definition = store.load().definition
    count = f"{definition.planned_trials()} trials"
    if definition.strategy == "pbt":
        count = f"{definition.population()} members in {definition.segments} segments"
    replicates = definition.planned_replicates(definition.planned_trials())
    if replicates:
        count += f", then up to {replicates} replicates"
    console.print(
        f"Search {store.search_id} on {definition.environment}: {definition.strategy}, "
        f"{count}, {definition.parallel} at a time.",
        markup=False,
    )
    if follow:
        _drive(console, chosen, store.search_id)
    else:
        _detach(console, chosen, store.search_id)


def _joined_sweep(text: str, assigned: dict[str, Any]) -> dict[str, Any]:
    """The fields of a search that joins a W&B sweep."""
    from hermes_rl.search.sweep_service import WandbSweep, full_path
    from hermes_rl.search.sweeps import from_sweep

    sweep = WandbSweep(full_path(text, str(assigned.get("wandb_project") or "hermes-rl")))
    return {**from_sweep(sweep.config()), "strategy": "wandb", "sweep": sweep.path}


def _read_space(texts: list[str]) -> dict[str, str]:
    space: dict[str, str] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not values.strip():
            from hermes_rl.search.space import SHORTHAND

            raise SearchError(
                f"--space {text!r} cannot be read.", allowed=f"NAME=VALUES, where VALUES is {SHORTHAND}"
            )
        space[name.strip()] = values.strip()
    return space


def _print_plan(console: Console, workspace: Workspace, definition: Any, runner: Any) -> None:
    from hermes_rl.cli.console import seconds_text
    from hermes_rl.search.estimate import estimate, measured_rates
    from hermes_rl.search.space import format_params

    space = definition.build_space()
    defaults = runner.defaults([*space.names, "total_steps", "batch_size", "max_token_length"])
    trials = definition.planned_trials()
    steps = int(defaults["total_steps"])
    console.print(
        f"Environment {definition.environment}, profile {definition.profile}, strategy {definition.strategy}"
    )
    for name, text in space.describe().items():
        console.print(f"  {name}: {text} (default {defaults[name]})", markup=False)
    if definition.overrides:
        shown = without_secrets(definition.overrides)
        console.print(f"Set in every trial: {format_params(shown)}", markup=False)
    if definition.strategy == "pbt":
        trials = definition.population() + 1
        console.print(
            f"{definition.population()} members, each in {definition.segments} segments, and the default:"
        )
    console.print(
        f"{trials} trials of {steps} steps: at most {trials * steps} optimizer steps, "
        f"{definition.parallel} trials at a time.",
        markup=False,
    )
    extra = definition.planned_replicates(definition.planned_trials())
    if extra:
        console.print(
            f"Then up to {extra} replicates on fresh seeds: {extra * steps} steps (--replicate 0 leaves them "
            "out).",
            markup=False,
            soft_wrap=True,
        )
        trials += extra
    batch_size = space.mean("batch_size", float(defaults["batch_size"]))
    rates = measured_rates(workspace, definition.environment, definition.profile, int(defaults["batch_size"]))
    tokens, seconds = estimate(rates, trials * steps, batch_size, definition.parallel)
    console.print(
        f"At most about {tokens:,} trained tokens and {seconds_text(seconds)} ({rates.source}).",
        markup=False,
        soft_wrap=True,
    )
    if definition.strategy == "grid":
        for number, params in enumerate(space.grid()):
            console.print(f"  {number + 1:>4}  {format_params(params)}", markup=False)


def _drive(console: Console, workspace: Workspace, search_id: str) -> None:
    """Run a search to its end in this process and print what it found."""
    from hermes_rl.cli.search_view import make_view
    from hermes_rl.config.invocation import command
    from hermes_rl.search.drive import drive

    for ending in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal stops the trials like Ctrl-C does
        signal.signal(ending, signal.default_int_handler)
    try:
        with make_view(console) as view:
            store = drive(workspace, search_id, view)
    except KeyboardInterrupt:
        again = command(workspace, "search", "resume", search_id)
        console.print(
            f"\nStopped; what is finished is kept. Go on with: {again}", markup=False, soft_wrap=True
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not _print_result(console, store):
        raise typer.Exit(EXIT_RUN_FAILED)


def _print_result(console: Console, store: Any) -> bool:
    """Print the ranking and what to do next; returns whether there is a result."""
    from hermes_rl.cli.search_view import ranked_table
    from hermes_rl.config.invocation import command
    from hermes_rl.search.report import sentences, write_report
    from hermes_rl.search.summary import summarize, train_command

    report = write_report(store)
    summary = summarize(store)
    console.print()
    console.print(ranked_table(summary))
    console.print()
    for sentence in sentences(summary):
        console.print(sentence, markup=False, soft_wrap=True)
    again = command(store.workspace, "search", "resume", store.search_id)
    if summary.state != "completed":
        reason = f": {summary.file.reason}" if summary.file.reason else ""
        console.print(
            f"The search is {summary.state}{reason}. Go on with: {again}", markup=False, soft_wrap=True
        )
    elif summary.file.reason:
        console.print(
            f"It ended because {summary.file.reason}. Go on with a larger one: {again} "
            "and --max-steps, --max-tokens or --max-minutes with N or +N",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"Report: {report}", markup=False, soft_wrap=True)
    best = store.folder / "best.yaml"
    if summary.recommended is not None:
        console.print("Train with the best configuration:", style="bold")
        console.print(f"  {train_command(summary, best)}", markup=False, soft_wrap=True)
    return summary.best is not None


def _detach(console: Console, workspace: Workspace, search_id: str) -> None:
    """Leave the search to a process of its own."""
    from hermes_rl.config.invocation import command
    from hermes_rl.search.drive import detach

    detach(workspace, search_id)
    look = command(workspace, "search", "status", search_id)
    console.print(f"It goes on by itself. Look at it with: {look}", markup=False, soft_wrap=True)


@app.command()
def resume(
    search_id: SearchArgument,
    trials: Annotated[
        str | None, typer.Option(help="New number of configurations, or +N for N more.")
    ] = None,
    replicate: Annotated[
        str | None, typer.Option(help="New number of fresh seeds, or +N for N more.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(help="Trials at the same time.")] = None,
    max_steps: Annotated[
        str | None, typer.Option(help="New budget of optimizer steps in all, or +N for N more.")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="New budget of trained tokens in all, or +N for N more.")
    ] = None,
    max_minutes: Annotated[
        str | None, typer.Option(help="New budget of minutes in all, or +N for N more.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--detach", help="Stay until it ends, or leave it running.")
    ] = True,
    workspace: WorkspaceOption = None,
) -> None:
    """Go on with a search that was interrupted or stopped, or extend one that is done.

    Examples:

        hermes-rl search resume last

        hermes-rl search resume last --replicate 3
    """
    from hermes_rl.search.drive import extend
    from hermes_rl.search.store import SearchStore

    chosen = Workspace.resolve(workspace)
    store = SearchStore.open(chosen, search_id)
    extend(
        store,
        trials=trials,
        replicate=replicate,
        parallel=parallel,
        max_steps=max_steps,
        max_tokens=max_tokens,
        max_minutes=max_minutes,
    )
    console = output()
    (_drive if follow else _detach)(console, chosen, store.search_id)


@app.command()
def stop(search_id: SearchArgument, workspace: WorkspaceOption = None) -> None:
    """Stop a search and its running trials; finished ones are kept.

    Example:

        hermes-rl search stop last
    """
    from hermes_rl.search.drive import stop_search
    from hermes_rl.search.store import SearchStore

    store = SearchStore.open(Workspace.resolve(workspace), search_id)
    state = stop_search(store)
    output().print(f"Search {store.search_id} is {state}.", markup=False)


@app.command()
def status(
    search_id: SearchArgument = "last",
    limit: Annotated[int, typer.Option(help="The best N trials; 0 shows all.", min=0)] = 30,
    workspace: WorkspaceOption = None,
) -> None:
    """Show how a search stands: its running trials and the ranking so far.

    Example:

        hermes-rl search status last --limit 10
    """
    from hermes_rl.cli.search_view import ranked_table
    from hermes_rl.search.report import sentences
    from hermes_rl.search.store import SearchStore
    from hermes_rl.search.summary import progress_sentence, summarize

    store = SearchStore.open(Workspace.resolve(workspace), search_id)
    summary = summarize(store)
    console = output()
    reason = f" ({summary.file.reason})" if summary.file.reason else ""
    console.print(
        f"Search {store.search_id}: {summary.state}{reason}, "
        f"{progress_sentence(summary.records, summary.planned)}"
    )
    for record in summary.records:
        if record.state == "running":
            console.print(f"  trial {record.trial} runs as {record.run_id}", markup=False)
    console.print(ranked_table(summary, limit or None))
    if limit and len(summary.ranked) > limit:
        console.print(f"{len(summary.ranked) - limit} more trials: --limit 0 shows them.", markup=False)
    for sentence in sentences(summary):
        console.print(sentence, markup=False, soft_wrap=True)


@app.command("list")
def list_searches(workspace: WorkspaceOption = None) -> None:
    """List the workspace's searches, the newest last.

    Example:

        hermes-rl search list
    """
    from rich.table import Table

    from hermes_rl.cli.console import number_text
    from hermes_rl.search.store import SearchStore, list_search_ids
    from hermes_rl.search.summary import format_error, progress_sentence, summarize

    chosen = Workspace.resolve(workspace)
    ids = list_search_ids(chosen)
    console = output()
    if not ids:
        from hermes_rl.config.invocation import command

        start = command(chosen, "search", "start", "--preset", "article-grid")
        console.print(f"There are no searches yet. Start one with: {start}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("search", "environment", "strategy", "state", "trials", "best"):
        table.add_column(heading)
    for search_id in ids:
        summary = summarize(SearchStore(chosen, search_id))
        definition = summary.file.definition
        best = number_text(summary.best.value if summary.best else None)
        best += f" {format_error(summary.best)}" if summary.best else ""
        progress = progress_sentence(summary.records, summary.planned)
        table.add_row(search_id, definition.environment, definition.strategy, summary.state, progress, best)
    console.print(table)


@app.command()
def report(
    search_id: SearchArgument = "last",
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Write the report (HTML, Markdown, JSON, CSV); also while the search runs.

    Example:

        hermes-rl search report last --open
    """
    from hermes_rl.search.report import write_report
    from hermes_rl.search.store import SearchStore

    path = write_report(SearchStore.open(Workspace.resolve(workspace), search_id))
    output().print(str(path), markup=False, soft_wrap=True)
    if open_:
        typer.launch(str(path))


@app.command()
def results(
    search_id: SearchArgument = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Print what a search found.

    Example:

        hermes-rl search results last --json
    """
    from hermes_rl.search.report import as_json as results_as_json
    from hermes_rl.search.store import SearchStore
    from hermes_rl.search.summary import summarize

    store = SearchStore.open(Workspace.resolve(workspace), search_id)
    if as_json:
        typer.echo(results_as_json(store, summarize(store)))
    else:
        _print_result(output(), store)


@app.command()
def sweep(search_id: SearchArgument = "last", workspace: WorkspaceOption = None) -> None:
    """Print a search as a W&B sweep file.

    Example:

        hermes-rl search sweep last > sweep.yaml
    """
    import yaml

    from hermes_rl.search.store import SearchStore
    from hermes_rl.search.sweeps import sweep_differences, to_sweep

    definition = SearchStore.open(Workspace.resolve(workspace), search_id).load().definition
    text = yaml.safe_dump(to_sweep(definition), sort_keys=False)
    typer.echo("".join(f"# {line}\n" for line in sweep_differences(definition)) + text, nl=False)
