"""A language model that follows a script, behind an OpenAI-compatible endpoint on loopback.

It stands for the paid model that an agent would talk to; everything else in the tests is real.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = Callable[[list[dict[str, Any]]], "tuple[str, dict[str, Any]] | str"]
"""Given the answers of the tools so far, the next tool call (name, arguments) or the closing text."""


class ScriptedModel:
    """The model: one turn of the script for each tool answer that the conversation holds.

    Args:
        turns: the script.

    Attributes:
        tools: names of the tools that the agent offered.
        answers: what its tool calls returned, in the last request.
        keys: the bearer tokens that requests carried.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self.tools: dict[str, Any] = {}
        self.answers: list[dict[str, Any]] = []
        self.keys: set[str] = set()

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The assistant's message."""
        if "tools" not in body:  # Hermes asks for a title and the like, beside the conversation
            return {"role": "assistant", "content": "A training run."}
        self.tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        answers = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        self.answers = [json.loads(text) for text in answers]
        turn = self._turns[min(len(answers), len(self._turns) - 1)](self.answers)
        if isinstance(turn, str):
            return {"role": "assistant", "content": turn}
        name, arguments = turn
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{len(answers)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class ScriptedCompletions:
    """A model without tools: the same texts again and again, as many as are asked for."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.keys: set[str] = set()
        self.requests = 0

    def texts(self, n: int) -> list[str]:
        self.requests += 1
        return [self._texts[place % len(self._texts)] for place in range(n)]


@contextmanager
def served(model: ScriptedModel | ScriptedCompletions) -> Iterator[str]:
    """Serve a model; gives the base URL, ending in ``/v1``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.keys.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
            if isinstance(model, ScriptedCompletions):
                messages = [
                    {"role": "assistant", "content": text} for text in model.texts(body.get("n") or 1)
                ]
            else:
                messages = [model.reply(body)]
            if body.get("stream"):
                self._stream(messages[0])
            else:
                self._send(_completion(messages))

        def _send(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, message: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", []))]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            finish = "tool_calls" if calls else "stop"
            for part in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}):
                chunk = {**_envelope("chat.completion.chunk"), "choices": [{"index": 0, **part}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": "scripted"}


def _completion(messages: list[dict[str, Any]]) -> dict[str, Any]:
    choices = [
        {
            "index": place,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        for place, message in enumerate(messages)
    ]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {**_envelope("chat.completion"), "choices": choices, "usage": usage}
