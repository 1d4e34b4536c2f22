"""A pytest plugin under which atroposlib's own API tests meet our server instead of theirs.

They start ``atroposlib.cli.run_api`` and talk to ``localhost:8000``. Here the start is replaced by ours and
the address by a socket of our own, behind a capability, so that nothing depends on port 8000.
"""

import os
import secrets
import socket
import subprocess
import sys
from typing import Any

import requests

_url: str | None = None
_theirs = "http://localhost:8000"

_popen = subprocess.Popen
_request = requests.Session.request


class _OurServer(_popen):  # type: ignore[misc, valid-type]
    def __init__(self, command: Any, **options: Any) -> None:
        global _url
        if not isinstance(command, list) or "atroposlib.cli.run_api" not in command:
            super().__init__(command, **options)
            return
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            _url = f"http://127.0.0.1:{listener.getsockname()[1]}/r-{secrets.token_hex(16)}"
            command = [sys.executable, "-m", "hermes_rl.trajectories.process", "--fd", str(listener.fileno())]
            options["pass_fds"] = [listener.fileno()]
            options["env"] = {**os.environ, "HERMES_RL_TRAJECTORIES_URL": _url}
            # The server alone keeps the socket: once it is gone, connections are refused.
            super().__init__(command, **options)


def _to_ours(self: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
    if url.startswith(_theirs):
        if _url is None:
            raise requests.exceptions.ConnectionError("not started yet")
        url = url.replace(_theirs, _url, 1)
    return _request(self, method, url, **options)


subprocess.Popen = _OurServer  # type: ignore[misc, assignment]
requests.Session.request = _to_ours  # type: ignore[method-assign]
