"""``hermes-rl mcp``: the server for agents. Runs until its client leaves or it is stopped."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from hermes_rl.cli.run import WorkspaceOption
from hermes_rl.errors import HermesRLError

TOKEN_VARIABLE = "HERMES_RL_MCP_TOKEN"

app = typer.Typer(rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def serve(
    http: Annotated[
        bool, typer.Option("--http", help="Serve HTTP on the loopback interface instead of stdin and stdout.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port for --http; 0 picks a free one.", min=0, max=65535)] = 0,
    workspace_dir: WorkspaceOption = None,
) -> None:
    """Serve the rl_* tools to an agent over the Model Context Protocol.

    A client that starts the server itself (stdio) is configured with the command:

        hermes-rl mcp

    With --http the URL and where the token lies are printed. The token is $HERMES_RL_MCP_TOKEN, or a
    fresh one in the file mcp-token of the workspace, which only you can read.
    """
    import anyio

    from hermes_rl.config import Workspace

    try:
        from hermes_rl.agent import mcp_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise HermesRLError(
            "The package mcp is not installed.", hint="pip install 'hermes-rl[mcp]' installs it."
        ) from None
    workspace = Workspace.resolve(workspace_dir)
    if not http:
        anyio.run(mcp_server.serve_stdio, workspace)
        return
    listening = _listen(port)
    token = os.environ.get(TOKEN_VARIABLE)
    typer.echo(f"http://127.0.0.1:{listening.getsockname()[1]}{mcp_server.PATH}")
    if token:
        typer.echo(f"Token: the value of ${TOKEN_VARIABLE}")
    else:
        from hermes_rl.config import write_private

        token = mcp_server.new_token()
        path = workspace.root / "mcp-token"
        write_private(path, token + "\n")
        typer.echo(f"Token: in {path}; send it as 'Authorization: Bearer TOKEN'")
    anyio.run(mcp_server.serve_http, workspace, listening, token)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise HermesRLError(
            f"Port {port} cannot be used: {os.strerror(error.errno) if error.errno else error}.",
            hint="Choose another with --port, or leave it out: then a free one is picked.",
        ) from error
