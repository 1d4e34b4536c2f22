"""A small stand-in for the W&B service: as much of it as the real client asks when it runs a sweep.

The client speaks GraphQL to ``/graphql`` and streams a run's history to ``/files/…/file_stream``. Sweeps are
searched by a fixed list of configurations, so that a test knows what is to come.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

ENTITY = "somebody"
_OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


class SweepService:
    """The service's state, and the server that answers for it.

    Args:
        configurations: what agents are told to run, in this order; then they are told to exit.

    Attributes:
        sweeps: sweep id → its configuration.
        runs: run id → ``sweep``, ``config``, ``history`` (rows as logged) and ``exit_code``.
        agents: agent id → the run it was given last.
        stop: runs whose agents are told to stop them.
        operations: names of the GraphQL operations that were asked for, in order.
    """

    def __init__(self, configurations: list[dict[str, Any]]) -> None:
        self.configurations = list(configurations)
        self.sweeps: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.agents: dict[str, str | None] = {}
        self.stop: set[str] = set()
        self.operations: list[str] = []
        self.unknown: list[str] = []
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.startswith("/graphql"):
                    request = json.loads(body)
                    with service._lock:
                        answer = service.answer(request["query"], request.get("variables") or {})
                elif "/file_stream" in self.path:
                    with service._lock:
                        answer = service.stream(self.path.split("/")[-2], json.loads(body or b"{}"))
                else:
                    service.unknown.append(self.path)
                    answer = {}
                self._send(answer)

            do_PUT = do_POST

            def do_GET(self) -> None:
                self._send({})

            def _send(self, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """What ``WANDB_BASE_URL`` is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SweepService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """One GraphQL operation."""
        found = _OPERATION.search(query)
        name = found.group(1) if found else "?"
        self.operations.append(name)
        method = getattr(self, f"_on_{name.lower()}", None)
        if method is None:
            self.unknown.append(f"{name}: {' '.join(query.split())[:300]}")
            return {"errors": [{"message": f"the stand-in does not know {name}"}], "data": None}
        return {"data": method(variables)}

    def stream(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Rows of a run's history, and its end."""
        run = self.runs[run_id]
        content = (body.get("files") or {}).get("wandb-history.jsonl") or {}
        run["history"] += [json.loads(line) for line in content.get("content", [])]
        if body.get("complete"):
            run["exit_code"] = body.get("exitcode")
        return {"exitcode": None, "limits": {}}

    def _on_viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {
                "id": "viewer",
                "entity": ENTITY,
                "username": ENTITY,
                "email": "somebody@example.org",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }

    def _on_getdefaultentity(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "viewer", "entity": ENTITY}}

    def _on_upsertsweep(self, variables: dict[str, Any]) -> dict[str, Any]:
        sweep_id = f"sweep{len(self.sweeps)}"
        self.sweeps[sweep_id] = yaml.safe_load(variables["config"])
        entity = {"id": "entity", "name": ENTITY}
        project = {"id": "project", "name": variables["projectName"], "entity": entity}
        return {
            "upsertSweep": {"sweep": {"name": sweep_id, "project": project}, "configValidationWarnings": []}
        }

    def _on_createagent(self, variables: dict[str, Any]) -> dict[str, Any]:
        assert variables["sweep"] in self.sweeps, variables
        agent_id = f"agent{len(self.agents)}"
        self.agents[agent_id] = None
        return {"createAgent": {"agent": {"id": agent_id}}}

    def _on_heartbeat(self, variables: dict[str, Any]) -> dict[str, Any]:
        agent_id, running = variables["id"], json.loads(variables["runState"])
        commands: list[dict[str, Any]] = []
        if running:
            commands = [{"type": "stop", "run_id": run} for run in running if run in self.stop]
        elif self.configurations:
            run_id = f"swept{uuid.uuid4().hex[:8]}"
            config = self.configurations.pop(0)
            args = {name: {"value": value} for name, value in config.items()}
            sweep_id = list(self.sweeps)[-1]
            self.runs[run_id] = {"sweep": sweep_id, "config": config, "history": [], "exit_code": None}
            self.agents[agent_id] = run_id
            commands = [{"type": "run", "run_id": run_id, "args": args}]
        else:
            commands = [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": agent_id}, "commands": json.dumps(commands)}}

    def _on_runresumestatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        bucket = None
        if run is not None:  # the service made it when it gave it to an agent; it has not begun
            bucket = {
                "id": f"bucket-{variables['name']}",
                "name": variables["name"],
                "displayName": variables["name"],
                "summaryMetrics": "{}",
                "logLineCount": 0,
                "historyLineCount": len(run["history"]),
                "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(row) for row in run["history"][-1:]]),
                "eventsTail": "[]",
                "config": "{}",
                "tags": [],
                "wandbConfig": json.dumps({"t": 1} if run["history"] else {}),
            }
        entity = {"id": "entity", "name": ENTITY}
        return {"model": {"id": "project", "name": variables["project"], "entity": entity, "bucket": bucket}}

    def _on_upsertbucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"]
        run = self.runs.setdefault(
            run_id, {"sweep": variables.get("sweep"), "config": {}, "history": [], "exit_code": None}
        )
        if variables.get("sweep"):
            run["joined"] = variables["sweep"]
        if variables.get("config"):
            run["logged_config"] = json.loads(variables["config"])
        project = {
            "id": "project",
            "name": variables.get("project") or "p",
            "entity": {"id": "entity", "name": ENTITY},
        }
        bucket = {
            "id": f"bucket-{run_id}",
            "name": run_id,
            "displayName": variables.get("displayName") or run_id,
            "description": None,
            "config": "{}",
            "sweepName": variables.get("sweep"),
            "project": project,
            "historyLineCount": len(run["history"]),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": False}}

    def _on_organizationcoreweaveorganizationid(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _on_getsweep(self, variables: dict[str, Any]) -> dict[str, Any]:
        config = self.sweeps[variables["name"]]
        sweep = {
            "__typename": "Sweep",
            "id": f"id-{variables['name']}",
            "name": variables["name"],
            "displayName": None,
            "method": config["method"],
            "state": "RUNNING",
            "description": None,
            "bestLoss": None,
            "config": yaml.safe_dump(config),
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            "runCount": len(self.runs),
            "runCountExpected": None,
        }
        return {"project": {"sweep": sweep}}
