"""A real engine process on a small random model, and the real SDK against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker

os.environ["TINKER_TELEMETRY"] = "0"


@dataclass
class RunningEngine:
    """An engine process and how to reach it."""

    process: subprocess.Popen[bytes]
    base_url: str
    api_key: str
    model: str
    log: Path

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)

    def request(self, method: str, path: str, **options) -> httpx.Response:
        headers = {"X-API-Key": self.api_key, **options.pop("headers", {})}
        return httpx.request(method, f"{self.base_url}{path}", headers=headers, timeout=60, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=120)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Qwen3 model of a few layers with a byte-level tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {mark: 3 + i for i, mark in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    fast.save_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start_engine(model_folder, tmp_path_factory) -> Iterator[Callable[..., RunningEngine]]:
    """A function that starts an engine; all are ended with the file, before one could end by itself, idle."""
    started: list[RunningEngine] = []

    def start(checkpoints: Path | None = None, *arguments: str) -> RunningEngine:
        folder = tmp_path_factory.mktemp("engine")
        address, log = folder / "address.json", folder / "log"
        command = [sys.executable, "-m", "hermes_rl.engine.process", "--model", str(model_folder)]
        command += ["--lora-alpha", "16", "--threads", "1", "--address-file", str(address)]
        command += ["--checkpoints", str(checkpoints or folder / "checkpoints"), *arguments]
        if "--idle-timeout" not in arguments:
            command += ["--idle-timeout", "600"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + 400
        while not address.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        record = json.loads(address.read_text())
        engine = RunningEngine(process, record["base_url"], record["api_key"], str(model_folder), log)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        if engine.process.poll() is None:
            engine.stop()


@pytest.fixture(scope="module")
def engine(start_engine) -> RunningEngine:
    """An engine that the tests of a file share."""
    return start_engine()


@pytest.fixture
def service(engine) -> Iterator[tinker.ServiceClient]:
    client = engine.service()
    yield client
    client.close("success").result()
