"""What a user of any MCP client loses if these fail: the rl_* tools over stdio and over HTTP."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from tests.integration.short_runs import SHORT, end_everything, short_workspace

from hermes_rl import runs
from hermes_rl.agent.toolset import TOOLS
from hermes_rl.config import RunConfig, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = short_workspace(tmp_path)
    yield found
    end_everything(found)


def command(workspace: Workspace, *options: str) -> list[str]:
    return ["-P", "-m", "hermes_rl", "mcp", "--workspace", str(workspace.root), *options]


async def ask(client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
    """Call a tool; both forms of its answer must say the same."""
    result = await client.call_tool(tool, arguments)
    assert result.structured_content is not None
    assert json.loads(result.content[0].text) == result.structured_content  # type: ignore[union-attr]
    assert result.is_error == ("error" in result.structured_content)
    return result.structured_content


@asynccontextmanager
async def over_stdio(workspace: Workspace) -> AsyncIterator[Client]:
    server = StdioServerParameters(command=sys.executable, args=command(workspace), env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        yield client


@asynccontextmanager
async def over_http(url: str, token: str, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


@contextmanager
def http_server(workspace: Workspace, token: str | None = None) -> Iterator[tuple[str, str]]:
    """``hermes-rl mcp --http``; gives the URL and the token."""
    environment = {name: value for name, value in os.environ.items() if name != "HERMES_RL_MCP_TOKEN"}
    if token is not None:
        environment["HERMES_RL_MCP_TOKEN"] = token
    server = subprocess.Popen(
        [sys.executable, *command(workspace, "--http")],
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url, said = server.stdout.readline().strip(), server.stdout.readline()
        if token is None:
            path = workspace.root / "mcp-token"
            assert str(path) in said
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            token = path.read_text().strip()
        assert token not in url + said
        yield url, token
    finally:
        server.terminate()
        server.wait(timeout=240)


async def test_over_stdio_a_client_lists_edits_starts_and_checks(workspace: Workspace) -> None:
    async with over_stdio(workspace) as client:
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == set(TOOLS)
        assert all(tool.description and tool.input_schema["type"] == "object" for tool in listed)
        found = await ask(client, "rl_list_environments")
        name = next(entry["name"] for entry in found["environments"] if entry["default"])
        assert (await ask(client, "rl_select_environment", name=name))["environment"] == name
        await ask(client, "rl_edit_config", field="learning_rate", value=6e-5)
        refused = await ask(client, "rl_edit_config", field="learning_rate", value="fast")
        assert "learning_rate" in refused["error"]
        started = await ask(client, "rl_start_training")
        run_id = started["run_id"]
        assert (await ask(client, "rl_check_status", run_id=run_id))["run_id"] == run_id
    # The server is gone with its client; the run goes on.
    assert RunConfig.from_yaml(workspace.run_dir(run_id) / "run.yaml").tinker.learning_rate == 6e-5
    assert runs.wait(workspace, run_id, timeout=240).status == "completed"


async def test_over_http_two_clients_keep_their_own_selections(workspace: Workspace) -> None:
    long = SHORT.replace("value = 4", "value = 400")  # the run is stopped, not awaited
    (workspace.root / "policy.toml").write_text(long, encoding="utf-8")
    with http_server(workspace) as (url, token):
        async with over_http(url, token) as one, over_http(url, token, mode="legacy") as two:
            await ask(one, "rl_edit_config", field="batch_size", value=32)
            await ask(two, "rl_edit_config", field="batch_size", value=64)
            await ask(two, "rl_select_environment", name="gsm8k_tinker")
            await ask(two, "rl_edit_config", field="lora_rank", value=8)
            first = await ask(one, "rl_get_current_config")
            second = await ask(two, "rl_get_current_config")
            assert first["environment"] != second["environment"] == "gsm8k_tinker"
            assert first["tunable"]["batch_size"]["value"] == 32
            assert first["tunable"]["lora_rank"]["source"] == "default"
            assert second["tunable"]["batch_size"]["value"] == 16
            assert second["tunable"]["lora_rank"]["value"] == 8
            started = await ask(one, "rl_start_training")
            status = await ask(two, "rl_check_status", run_id=started["run_id"])
            assert status["overrides"]["batch_size"] == 32
            asked = await ask(two, "rl_stop_training", run_id=started["run_id"])
            assert asked["status"] in ("stopping", "stopped")
            stopped = await ask(two, "rl_stop_training", run_id=started["run_id"], wait_seconds=120)
            assert stopped["status"] == "stopped"


def test_over_http_nothing_answers_without_the_token(workspace: Workspace) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accept = {"Accept": "application/json, text/event-stream"}
    with http_server(workspace, token="a-token-of-the-operator") as (url, token):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
            assert httpx.post(url, json=body, headers=accept | headers).status_code == 401
        rebound = {"Authorization": f"Bearer {token}", "Host": "evil.example"}
        assert httpx.post(url, json=body, headers=accept | rebound).status_code in (400, 403, 421)


async def test_a_long_test_returns_at_once_with_an_id(workspace: Workspace) -> None:
    async with over_stdio(workspace) as client:
        answer = await ask(client, "rl_test_inference", num_steps=1, group_size=4)
        assert answer["state"] == "running"
        again = await ask(client, "rl_test_inference", test_id=answer["test_id"], wait_seconds=240)
        assert again["state"] == "completed"
        assert again["models"]["base"]["works"], again
        assert again["models"]["base"]["rollouts"] == 4
