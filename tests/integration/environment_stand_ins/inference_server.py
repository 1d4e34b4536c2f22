"""An inference endpoint over HTTP that answers with random digits, and remembers which path was asked.

It speaks what Atropos's clients ask for (``/v1/chat/completions``, ``/v1/completions``, ``/generate``), also
below ``/step/K``. Run: ``python inference_server.py FD CAPABILITY``; ``GET /asked`` tells the paths.
"""

import random
import socket
import sys
from collections import Counter

import uvicorn
from fastapi import FastAPI, Request

CAPABILITY = sys.argv[2]
app = FastAPI()
asked: Counter[str] = Counter()
digits = random.Random(0)


def _digit() -> str:
    return str(digits.randrange(4))


@app.get("/asked")
async def tell() -> dict[str, int]:
    return dict(asked)


@app.post(f"/{CAPABILITY}/{{path:path}}")
async def answer(path: str, request: Request):
    asked[path] += 1
    body = await request.json()
    if path.endswith("chat/completions"):
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": _digit()}}
            for i in range(body.get("n") or 1)
        ]
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "choices": choices}
    if path.endswith("completions"):
        choices = [
            {"index": i, "finish_reason": "stop", "logprobs": None, "text": _digit()}
            for i in range(body.get("n") or 1)
        ]
        return {"id": "x", "object": "text_completion", "created": 0, "model": "x", "choices": choices}
    count = body["sampling_params"].get("n", 1)
    return [
        {
            "text": "",
            "meta_info": {
                "output_token_logprobs": [[-1.5, ord(_digit()), None]],
                "finish_reason": {"type": "stop"},
            },
        }
        for _ in range(count)
    ]


if __name__ == "__main__":
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    sock = socket.socket(fileno=int(sys.argv[1]))
    import asyncio

    asyncio.run(server.serve(sockets=[sock]))
