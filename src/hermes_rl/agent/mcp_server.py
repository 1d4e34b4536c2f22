"""The MCP server: the ``rl_*`` tools for any client of the Model Context Protocol.

Runs in the process of ``hermes-rl mcp``. Talks to its clients over standard input and output (one client), or
over HTTP on the loopback interface with a bearer token (any number, each with a selection of its own). Logs
go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hermes_rl import __version__
from hermes_rl.agent.session import AgentSession
from hermes_rl.agent.toolset import TOOLS, call
from hermes_rl.config import Workspace

PATH = "/mcp"
INSTRUCTIONS = (
    "Post-train a language model with reinforcement learning. Order of work: rl_list_environments, "
    "rl_select_environment, rl_get_current_config, rl_edit_config for each change, rl_start_training, then "
    "rl_check_status after the suggested number of seconds until the run has ended, rl_get_results. To look "
    "for good hyperparameters: rl_start_search, rl_check_search, rl_get_search_results."
)
_IDLE_SECONDS = 24 * 3600.0
_MOST_SESSIONS = 1000


class ClientSessions:
    """One :class:`AgentSession` a client.

    Args:
        workspace: where all of them work.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._sessions: dict[str, AgentSession] = {}
        self._lock = threading.Lock()

    def session(self, client_id: str) -> AgentSession:
        """The session of a client; those that were not used for longest make room for new ones."""
        with self._lock:
            found = self._sessions.pop(client_id, None) or AgentSession(self._workspace, patience=0)
            self._sessions[client_id] = found
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            return found


def build_server(workspace: Workspace) -> Server[Any]:
    """The MCP server over a workspace, without a transport."""
    sessions = ClientSessions(workspace)

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.parameters,
                    annotations=types.ToolAnnotations(read_only_hint=tool.read_only),
                )
                for tool in TOOLS.values()
            ]
        )

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        request = context.request
        client_id = request.headers.get("mcp-session-id", "") if request is not None else ""
        session = sessions.session(client_id)
        answer = await anyio.to_thread.run_sync(call, session, params.name, params.arguments or {})
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))],
            structured_content=answer,
            is_error="error" in answer,
        )

    return Server(
        "hermes-rl",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(workspace: Workspace) -> None:
    """Serve one client over standard input and output until it closes them."""
    server = build_server(workspace)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


class _Guard:
    """Lets through what carries the token and speaks a protocol version with sessions.

    The versions without sessions give a server nothing to tell its clients apart by. A client that begins
    with one of them is told which are served, and goes on with one of those.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if not secrets.compare_digest(given, self._expected):
            response = JSONResponse(
                {"error": "A bearer token is needed."}, 401, headers={"WWW-Authenticate": "Bearer"}
            )
            await response(scope, receive, send)
            return
        version = headers.get("mcp-protocol-version")
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            data = types.UnsupportedProtocolVersionErrorData(
                supported=list(HANDSHAKE_PROTOCOL_VERSIONS), requested=version
            )
            error = types.ErrorData(
                code=types.UNSUPPORTED_PROTOCOL_VERSION,
                message="Unsupported protocol version",
                data=data.model_dump(mode="json"),
            )
            body = {"jsonrpc": "2.0", "id": None, "error": error.model_dump(mode="json", exclude_none=True)}
            await JSONResponse(body, 400)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def build_app(workspace: Workspace, token: str) -> ASGIApp:
    """The web application that serves MCP below :data:`PATH`."""
    manager = StreamableHTTPSessionManager(
        build_server(workspace),
        json_response=True,
        security_settings=TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=["127.0.0.1:*", "localhost:*"],
            allowed_origins=["http://127.0.0.1:*", "http://localhost:*"],
        ),
        session_idle_timeout=_IDLE_SECONDS,
        max_sessions=_MOST_SESSIONS,
    )

    class Endpoint:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await manager.handle_request(scope, receive, send)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with manager.run():
            yield

    app = Starlette(routes=[Route(PATH, Endpoint())], lifespan=lifespan)
    return _Guard(app, token)


def new_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


async def serve_http(workspace: Workspace, listening: socket.socket, token: str) -> None:
    """Serve clients over HTTP on a socket that already listens, until the process is told to stop."""
    config = uvicorn.Config(build_app(workspace, token), log_level="warning", access_log=False)
    await uvicorn.Server(config).serve(sockets=[listening])
