"""The engine beside its peers: sampling, training, a whole GRPO step, eight adapters at once.

``python -m benchmarks.engine [--size small|medium] [--threads N] [--peers PYTHON] [--device cpu|cuda]``. The
peers (transformers, PEFT, TRL) run in an environment of their own; without ``--peers`` one is made under
``~/.cache/hermes-rl``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measuring import REPOSITORY
from benchmarks.reporting import Report
from hermes_rl.config import Workspace
from hermes_rl.engine.registry import EngineSpec, ensure_engine, stop_engine

GROUPS, COPIES, PROMPT, COMPLETION, RANK = 8, 8, 40, 32, 16
SEQUENCES = GROUPS * COPIES
PEERS = (
    "trl==1.16.0", "peft==0.21.2", "transformers==5.5.4", "datasets==5.2.0", "accelerate==1.15.0",
    "optuna==5.0.0",
)  # fmt: skip
"""What the peers' environment holds, beside the torch that the engine runs on; optuna is for a search's."""

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
    "medium": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64,
               "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192},
    "large": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
              "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip
"""About 1 M, 30 M and 600 M parameters; the last one is for a GPU."""

REPEATS = {"small": 5, "medium": 3, "large": 3}


@dataclass(frozen=True)
class Setting:
    """What is measured: a model size on a device.

    Attributes:
        threads: 0 is what the engine chooses for the size.
        peers: python of the peers' environment, None leaves them out.
    """

    size: str
    device: str = "cpu"
    threads: int = 0
    repeats: int = 0
    peers: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=(*SHAPES, "both"), default="both", help="both: small and medium")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: what the engine chooses for the size")
    parser.add_argument("--repeats", type=int, default=0, help="0: enough for the size")
    parser.add_argument("--peers", help="python of an environment with trl; 'none' leaves the peers out")
    options = parser.parse_args()
    report = Report()
    peers = None if options.peers == "none" else options.peers or peers_python()
    for size in ("small", "medium") if options.size == "both" else (options.size,):
        measure(report, Setting(size, options.device, options.threads, options.repeats, peers))
    report.close()


def peers_python() -> str:
    """The python of an environment with the peers, made when it is missing."""
    environment = Path.home() / ".cache" / "hermes-rl" / "bench-peers"
    python, marker = environment / "bin" / "python", environment / "ready"
    torch = importlib.metadata.version("torch").partition("+")[0]
    wanted = " ".join((*PEERS, f"torch=={torch}"))
    if not marker.exists() or marker.read_text() != wanted:
        print(f"installing the peers into {environment}: some minutes, once", file=sys.stderr)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(environment)],
            install + wanted.split(),
        ):
            if subprocess.run(command).returncode:
                raise SystemExit(
                    "The peers could not be installed. --peers PYTHON names an environment that has them, "
                    "--peers none measures the engine alone."
                )
        marker.write_text(wanted)
    return str(python)


def make_model(size: str, folder: Path) -> Path:
    """Random weights, with the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[size], max_position_embeddings=512, tie_word_embeddings=True)
    target = folder / "model"
    Qwen3ForCausalLM(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(REPOSITORY / "models" / "embedded").save_pretrained(target)
    return target


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Client:
    """One adapter's GRPO steps through the SDK."""

    def __init__(self, service: Any, model: Path, seed: int, prompts: np.ndarray) -> None:
        self.training = service.create_lora_training_client(
            str(model), rank=RANK, seed=seed, train_unembed=False
        ).result()
        self.prompts = prompts
        self.publish()

    def publish(self) -> None:
        self.sampler = self.training.save_weights_and_get_sampling_client().result()

    def sample(self) -> list[Any]:
        from tinker import types

        params = types.SamplingParams(max_tokens=COMPLETION, stop=[], seed=0)
        futures = [
            self.sampler.sample(types.ModelInput.from_ints(prompt.tolist()), COPIES, params)
            for prompt in self.prompts
        ]
        self.responses = [future.result() for future in futures]
        return self.responses

    def data(self) -> list[Any]:
        from tinker import types

        data = []
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            for number, sequence in enumerate(response.sequences):
                tokens = np.concatenate([prompt, sequence.tokens_np])
                logprobs = np.zeros(len(tokens) - 1, np.float32)
                logprobs[PROMPT - 1 :] = sequence.logprobs_np
                advantages = np.zeros_like(logprobs)
                advantages[PROMPT - 1 :] = 1.0 if number % 2 else -1.0
                inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs
                    )
                )
        return data

    def train(self) -> None:
        from tinker import types

        forward = self.training.forward_backward(self.data(), "importance_sampling")
        self.training.optim_step(types.AdamParams(learning_rate=1e-5)).result()
        forward.result()

    def step(self) -> None:
        self.sample()
        self.train()
        self.publish()


def measure(report: Report, setting: Setting) -> None:
    """All figures of one model size."""
    os.environ["TINKER_TELEMETRY"] = "0"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        _measure(report, setting, Path(folder))


def _measure(report: Report, setting: Setting, folder: Path) -> None:
    import tinker
    import torch

    from hermes_rl.engine.architecture import read_architecture
    from hermes_rl.engine.process import choose_device, choose_dtype, choose_threads

    size, repeats = setting.size, setting.repeats or REPEATS[setting.size]
    model = make_model(size, folder)
    parameters = read_architecture(model).linear_parameters
    device = choose_device(setting.device)
    dtype = choose_dtype("auto", device, parameters)
    direct = Direct(model, device, dtype)
    threads = setting.threads or choose_threads(parameters)
    torch.set_num_threads(threads)
    ws = Workspace.resolve(folder / "workspace")
    spec = EngineSpec(str(model), device=setting.device, threads=threads)
    address = ensure_engine(ws, spec)
    process = psutil.Process(address.pid)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, (GROUPS, PROMPT)) for _ in range(8)]
    service = tinker.ServiceClient(base_url=address.base_url, api_key=address.api_key)
    try:
        client = Client(service, model, 0, prompts[0])
        client.step()
        calls = {
            "sample": client.sample, "train": client.train, "step": client.step,
            "direct sample": direct.sample, "direct train": direct.train,
        }  # fmt: skip
        took: dict[str, float] = {}
        spent: dict[str, float] = {}
        for number in range(repeats + 1):
            # each round measures everything once, so that a busy moment does not fall on one figure alone;
            # the first one warms up
            for name, call in calls.items():
                before = cpu_seconds(process) + time.process_time()
                seconds = timed(call)
                cpu = cpu_seconds(process) + time.process_time() - before
                if number:
                    took[name] = min(seconds, took.get(name, math.inf))
                    spent[name] = min(cpu, spent.get(name, math.inf))
        one_memory = memory_bytes(process)
        clients = [client] + [Client(service, model, n, prompts[n]) for n in range(1, 8)]

        def together() -> None:
            with ThreadPoolExecutor(len(clients)) as pool:
                for step in [pool.submit(each.step) for each in clients]:
                    step.result()

        # one adapter alone is measured again, beside eight: what else the machine does changes with time
        alone, eight = math.inf, math.inf
        for _ in range(max(1, repeats // 2)):
            alone = min(alone, timed(client.step))
            eight = min(eight, timed(together))
        memory = memory_bytes(process) / one_memory
    finally:
        service.close("success").result()
        stop_engine(ws, spec.key)
    step, sample, train = min(took["step"], alone), took["sample"], took["train"]
    share = max(0.0, 1 - (took["direct sample"] + took["direct train"]) / step)
    computed = spent["direct sample"] + spent["direct train"]
    rate = matmul_rate(device, dtype)
    operations = training_operations(direct)
    report.note(f"{size} threads", threads)
    report.note(f"{size} engine step", step, " s")
    report.note(f"{size} engine sampled tokens", SEQUENCES * COMPLETION / sample, "/s")
    report.note(f"{size} engine trained tokens", SEQUENCES * (PROMPT + COMPLETION) / train, "/s")
    report.note(f"{size} engine memory", one_memory / 2**20, " MB")
    report.note(f"{size} matmul rate", rate / 1e9, " GFLOP/s")
    report.note(f"{size} training share of matmul rate", operations / took["direct train"] / rate)
    if device.type == "cpu":
        report.note(f"{size} share of processor time not computing", 1 - computed / spent["step"])
    if size == "small" and device.type == "cpu":
        report.at_most(f"{size} share not computing", share, 0.2)
    else:
        report.note(f"{size} share not computing", share)
    if size == "medium" and device.type == "cpu":
        report.at_most(f"{size} 8 adapters memory", memory, 1.3, "x")
    else:
        report.note(f"{size} 8 adapters memory", memory, "x")
    report.at_least(f"{size} 8 adapters throughput", 8 * alone / eight, 1.0, "x")
    del direct
    gc.collect()
    if setting.peers is not None:
        other = measure_peers(setting, model, threads, repeats, str(dtype).removeprefix("torch."))
        report.at_least(f"{size} step against TRL", other["trl"] / step, 2.0, "x")
        report.at_least(f"{size} sampling against generate", other["generate"] / sample, 1.5, "x")
        report.at_least(f"{size} training against PEFT", other["peft"] / train, 2.0, "x")


def measure_peers(setting: Setting, model: Path, threads: int, repeats: int, dtype: str) -> dict[str, float]:
    """Seconds of the peers with the same threads and type, in a process of their own environment."""
    assert setting.peers is not None
    script = str(Path(__file__).parent / "engine_peers" / "measure.py")
    command = [setting.peers, script, str(model), str(threads), str(repeats), setting.device, dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(command, capture_output=True, text=True, env=environment)
    if output.returncode:
        raise SystemExit(f"the peers' measurement failed:\n{output.stderr[-4000:]}")
    return json.loads(output.stdout.strip().splitlines()[-1])


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time that a process has had."""
    times = process.cpu_times()
    return times.user + times.system


def memory_bytes(process: psutil.Process) -> float:
    """The most memory a process has had so far (what it has now, where that is not told)."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return process.memory_info().rss


class Direct:
    """The same work in process, without protocol and scheduling."""

    def __init__(self, model: Path, device: Any, dtype: Any) -> None:
        import torch

        from hermes_rl.engine.adapter import Adapter, AdapterSpec
        from hermes_rl.engine.adapter_table import AdapterTable
        from hermes_rl.engine.base_model import load_base_model
        from hermes_rl.engine.decoding import DecodeBatch
        from hermes_rl.engine.losses import make_loss
        from hermes_rl.engine.optimizer import Adam
        from hermes_rl.engine.training import TrainingSequence

        self.base = load_base_model(str(model), device, dtype)
        self.adapter = Adapter.create(self.base.architecture, AdapterSpec(RANK, 32.0), 0, device)
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(3, 250, (GROUPS, PROMPT))
        self.batch = DecodeBatch(self.base, AdapterTable(self.base), cache_bytes=2**30)
        self.keys = itertools.count()
        self.items = []
        for prompt in np.repeat(self.prompts, COPIES, axis=0):
            tokens = np.concatenate([prompt, rng.integers(3, 250, COMPLETION)])
            advantages = np.ones(len(tokens) - 1, np.float32)
            advantages[: PROMPT - 1] = 0
            inputs = {"logprobs": np.full(len(advantages), -5.0, np.float32), "advantages": advantages}
            positions = np.arange(len(advantages))
            self.items.append(
                TrainingSequence(tokens[:-1].copy(), positions, tokens[1:].copy(), inputs, advantages.shape)
            )
        self.adam, self.gradient = Adam(self.adapter.flat), torch.zeros_like(self.adapter.flat)
        self.loss = make_loss("importance_sampling", {})

    def sample(self) -> None:
        from hermes_rl.engine.decoding import SampleJob

        key = next(self.keys)
        self.batch.waiting.extend(
            SampleJob(
                key=key, adapter=self.adapter, prompt=prompt, count=COPIES, max_tokens=COMPLETION, seed=0,
                temperature=1.0, top_k=-1, top_p=1.0, stop_tokens=(), finished=lambda *_: None,
            )
            for prompt in self.prompts
        )  # fmt: skip
        while self.batch.busy:
            self.batch.advance()

    def train(self) -> None:
        from hermes_rl.engine.optimizer import AdamSettings
        from hermes_rl.engine.training import run_pass

        list(run_pass(self.base, self.adapter, self.items, self.loss, lambda: self.gradient))
        self.adam.step(self.gradient, AdamSettings(1e-5))
        self.gradient.zero_()


def training_operations(direct: Direct) -> float:
    """Multiplications and additions of the matrix products of one training pass; attention's are left out.

    Base weights get no gradient (but where an adapter is trained by way of its merged matrices), nor does the
    input of the first layer.
    """
    from hermes_rl.engine.linears import MergedLinears, adapter_linears

    architecture = direct.base.architecture
    rows = GROUPS * (PROMPT + COPIES * (COMPLETION - 1))
    # the first tokens of all completions of a prompt are predicted by one row
    taught = GROUPS * (1 + COPIES * (COMPLETION - 1))
    first = next(group for group in architecture.layer_groups if group.name == "qkv")
    forward = architecture.linear_parameters
    linear = adapter_linears(direct.base, direct.adapter, trainable=True)
    if isinstance(linear, MergedLinears):
        own = 2 * forward
    else:
        own = (4 if linear._merged else 6) * direct.adapter.flat.numel()
    inputs = forward - first.in_features * first.out_features
    head = architecture.head_group.in_features * architecture.head_group.out_features
    return rows * (2 * forward + 2 * inputs + own) + 2 * head * (rows + taught)


def matmul_rate(device: Any, dtype: Any) -> float:
    """Operations a second of a large matrix product."""
    import torch

    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def multiply() -> None:
        _ = a @ a
        wait()

    multiply()
    return 2 * size**3 / min(timed(multiply) for _ in range(10))


if __name__ == "__main__":
    main()
