"""``hermes-rl doctor``: what this machine has, what is missing for which feature, and how to get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode="rich")

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


@app.callback(invoke_without_command=True)
def doctor(
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also import torch and ask it for devices (seconds).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of lines.")] = False,
    workspace: Annotated[Path | None, typer.Option("--workspace", help="Workspace folder.")] = None,
) -> None:
    """Say what this machine has, what is missing for which feature, and how to get it.

    Exit status 1 only when the default path, a run on the embedded model, cannot work.
    """
    from hermes_rl.cli.console import output
    from hermes_rl.config import Workspace
    from hermes_rl.config.invocation import command
    from hermes_rl.runs.diagnosis import diagnose

    console = output()
    findings = []
    for finding in diagnose(workspace, thorough=thorough):
        findings.append(finding)
        if as_json:
            continue
        style = _STYLES[finding.state]
        console.print(f"[{style}]{finding.state:5}[/] {finding.name:18} ", end="")
        console.print(finding.found, markup=False, soft_wrap=True)
        if finding.needed_for:
            console.print(f"{'':25}needed for: {finding.needed_for}", markup=False, soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':25}to get it: {finding.remedy}", markup=False, soft_wrap=True)
    wrong = [finding.name for finding in findings if finding.state == "wrong"]
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in findings], indent=1))
    elif wrong:
        console.print(f"The default path cannot work: {', '.join(wrong)}.", markup=False, soft_wrap=True)
    else:
        start = command(workspace or Workspace.usual_root(), "run", "start", "arithmetic_tinker", "--follow")
        console.print(f"The default path works: {start}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if wrong else 0)
