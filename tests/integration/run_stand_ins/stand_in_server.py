"""The server and environment ends of a run, made of the standard library alone.

The supervisor's tests use them where the real ones would only add minutes: they take the same arguments,
answer the same readiness questions and misbehave on request (``$STAND_IN_<ROLE>``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

STATE = {"revision": 0, "envs": [], "finished": False}
CHANGED = threading.Condition()


class Handler(BaseHTTPRequestHandler):
    """``/<capability>/health``, ``/<capability>/state`` and two posts."""

    capability = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == f"/{self.capability}/health":
            return self._answer(200, {"status": "ok"})
        if path == f"/{self.capability}/state":
            asked = parse_qs(urlsplit(self.path).query)
            if "wait" in asked:
                with CHANGED:
                    known = int(asked["revision"][0])
                    CHANGED.wait_for(lambda: STATE["revision"] != known, timeout=5)
            return self._answer(200, STATE)
        return self._answer(404, {})

    def do_POST(self) -> None:
        with CHANGED:
            if self.path.endswith("/register-env"):
                STATE["envs"].append({"env_id": 0})
            if self.path.endswith("/finish"):
                STATE["finished"] = True
            STATE["revision"] += 1
            CHANGED.notify_all()
        self._answer(200, {})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class InheritedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, descriptor: int, url: str) -> None:
        handler = type("Bound", (Handler,), {"capability": urlsplit(url).path.split("/")[1]})
        super().__init__(("127.0.0.1", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=descriptor)


def arguments() -> dict[str, str]:
    return dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))


def serve(url: str) -> None:
    server = InheritedServer(int(arguments()["--fd"]), url)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST"), timeout=60).read()


def get(url: str) -> dict:
    return json.loads(urllib.request.urlopen(url, timeout=60).read())


def misbehave(role: str) -> None:
    wish = os.environ.get(f"STAND_IN_{role.upper()}", "")
    print(f"{role} stand-in begins", flush=True)
    if wish == "fail":
        (Path(arguments()["--run-dir"]) / f"failure_{role}.json").write_text(
            json.dumps({"type": "ServiceError", "error": f"{role} has a reason", "hint": "Do better."})
        )
        sys.exit(1)
    if wish == "crash":
        raise RuntimeError(f"{role} crashed for no reason")
    if wish == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if wish == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if wish == "hang":
        wait_for_ever()
    if wish == "breed":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


def wait_for_ever() -> None:
    while True:
        time.sleep(1000)
