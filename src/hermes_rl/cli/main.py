"""Entry of the command line: ``hermes-rl``. Runs in the user's shell; starts nothing that stays in it.

The commands of a part are imported when one of them is called, so that a heavy part does not slow the
others down and a part that cannot be imported breaks itself only.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hermes_rl import __version__
from hermes_rl.errors import HermesRLError

GROUPS: dict[str, tuple[str, str]] = {
    "run": ("hermes_rl.cli.run", "Start a training run, watch it, stop it, read what came of it."),
    "search": ("hermes_rl.cli.search", "Search for good hyperparameters: many runs, one ranked answer."),
    "environments": ("hermes_rl.cli.environments", "The environments that can be trained on."),
    "engine": ("hermes_rl.cli.engine", "The local Tinker engines that runs share."),
    "model": ("hermes_rl.cli.model", "The models that runs have trained: write them out."),
    "config": ("hermes_rl.cli.config", "Every field: its value, where that comes from, who may change it."),
    "doctor": ("hermes_rl.cli.doctor", "What this machine has, what is missing for which feature."),
    "mcp": ("hermes_rl.cli.mcp", "Serve the rl_* tools to an agent over the Model Context Protocol."),
}
"""Command group → module that holds its ``app``, one line of help."""


class LazyGroups(TyperGroup):
    """Command groups whose modules are imported when they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with, its module imported."""
        if args and args[0] in GROUPS:
            self.commands[args[0]] = _load_group(args[0])
        return super().resolve_command(ctx, args)


def _load_group(name: str) -> Any:
    module_name, summary = GROUPS[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise HermesRLError(f"This installation has no `{name}` commands.") from None
    group = typer.main.get_group(module.app)
    group.name, group.help = name, group.help or summary
    return group


app = typer.Typer(
    cls=LazyGroups,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
for _name, (_, _summary) in GROUPS.items():
    app.add_typer(typer.Typer(help=_summary), name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hermes-rl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning training of LLM agents, and the search for its hyperparameters.

    A first run on this machine, no account and no GPU needed:

        hermes-rl environments list

        hermes-rl run start ENVIRONMENT --follow

        hermes-rl run results latest
    """


def main() -> None:
    """Run the command line and end the process.

    Exit status: 0 all went well; 1 a run failed; 2 bad input; 124 a wait timed out; 130 interrupted.
    """
    try:
        app()
    except HermesRLError as error:
        from hermes_rl.cli.console import exit_status, print_error

        print_error(error)
        sys.exit(exit_status(error))
    except BrokenPipeError:  # `hermes-rl run list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
