"""The embedded model behind HTTP, sampled with transformers: SGLang's ``/generate`` and chat completions.

Runs in a thread of the test's process, so that a test of an environment needs none of our own server's code.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "models" / "embedded"


class EmbeddedServer:
    """Serves until ``close``; ``asked`` counts requests by path, ``rollouts`` the sampled answers."""

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.generator = torch.Generator().manual_seed(seed)
        self.asked: Counter[str] = Counter()
        self.rollouts = 0
        app = FastAPI()
        app.post("/generate")(self._generate)
        app.post("/v1/chat/completions")(self._chat)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    @torch.no_grad()
    def _sample(self, prompt: list[int], n: int, max_tokens: int, temperature: float) -> list[dict[str, Any]]:
        """Sample ``n`` answers: their ids, logprobs (nats) and finish reasons."""
        tokens = torch.tensor([prompt] * n)
        logprobs = torch.zeros(n, 0)
        for _ in range(max_tokens):
            row = self.model(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
            if temperature:
                chosen = torch.multinomial((row / temperature).softmax(-1), 1, generator=self.generator)
            else:
                chosen = row.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
            logprobs = torch.cat([logprobs, row.gather(1, chosen)], 1)
            if all(self.tokenizer.eos_token_id in answer for answer in tokens[:, len(prompt) :].tolist()):
                break
        self.rollouts += n
        answers = []
        for ids, values in zip(tokens[:, len(prompt) :].tolist(), logprobs.tolist(), strict=True):
            stopped = self.tokenizer.eos_token_id in ids
            length = ids.index(self.tokenizer.eos_token_id) + 1 if stopped else len(ids)
            answers.append(
                {"ids": ids[:length], "logprobs": values[:length], "reason": "stop" if stopped else "length"}
            )
        return answers

    async def _generate(self, request: Request) -> list[dict[str, Any]]:
        self.asked["/generate"] += 1
        body = await request.json()
        wanted = body["sampling_params"]
        answers = self._sample(
            body["input_ids"],
            wanted.get("n", 1),
            wanted.get("max_new_tokens", 16),
            wanted.get("temperature", 1.0),
        )
        return [
            {
                "text": self.tokenizer.decode(answer["ids"], skip_special_tokens=True),
                "meta_info": {
                    "finish_reason": {"type": answer["reason"]},
                    "output_token_logprobs": [
                        [logprob, token, None]
                        for logprob, token in zip(answer["logprobs"], answer["ids"], strict=True)
                    ],
                },
            }
            for answer in answers
        ]

    async def _chat(self, request: Request) -> dict[str, Any]:
        self.asked["/v1/chat/completions"] += 1
        body = await request.json()
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        answers = self._sample(
            prompt, body.get("n") or 1, body.get("max_tokens", 16), body.get("temperature", 1.0)
        )
        choices = [
            {
                "index": index,
                "finish_reason": answer["reason"],
                "message": {
                    "role": "assistant",
                    "content": self.tokenizer.decode(answer["ids"], skip_special_tokens=True),
                },
            }
            for index, answer in enumerate(answers)
        ]
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "choices": choices}
