"""A run without its trainer: the real API server, the real runner, a stand-in for inference.

The test itself plays the trainer through ``TrajectoriesClient``.
"""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.config import EnvSection, OpenAISection, RunConfig, RunSection, TinkerSection
from hermes_rl.trajectories.client import TrajectoriesClient

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "data" / "environments"
PATIENCE_S = 240.0


async def until(
    condition: Callable[[], Any], what: str, patience: float = PATIENCE_S, pause: float = 0.02
) -> Any:
    """Wait for a condition (plain or awaitable), and return what it gave."""
    deadline = time.monotonic() + patience
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience} s for {what}")
        await asyncio.sleep(pause)


def _listen() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.set_inheritable(True)
    return sock


@dataclass
class RunBench:
    """The processes of one run, started by ``start_*`` and ended by ``close``."""

    folder: Path
    tokenizer: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sockets = {"api": _listen(), "inference": _listen()}
        self._capability = f"r-{secrets.token_hex(16)}"
        self.url = self._url("api")
        self.inference = self._url("inference")
        self.environment = {
            **os.environ,
            "HERMES_RL_TRAJECTORIES_URL": self.url,
            "HERMES_RL_INFERENCE_URL": f"{self.inference}/v1",
            "HERMES_RL_INFERENCE_KEY": f"key-{secrets.token_hex(16)}",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.client = TrajectoriesClient(self.url)

    def _url(self, role: str) -> str:
        return f"http://127.0.0.1:{self._sockets[role].getsockname()[1]}/{self._capability}"

    def log(self, role: str) -> str:
        path = self.folder / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def spawn(self, role: str, *command: str) -> subprocess.Popen[bytes]:
        # Each server alone keeps its socket, so that connections are refused once it is gone.
        sock = self._sockets.get(role)
        fds = [] if sock is None else [sock.fileno()]
        with (self.folder / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                pass_fds=fds,
                cwd=self.folder,
            )
        if sock is not None:
            self._sockets.pop(role).close()
        self.processes[role] = process
        return process

    async def start_api(self) -> None:
        fd = str(self._sockets["api"].fileno())
        self.spawn("api", "-m", "hermes_rl.trajectories.process", "--run-dir", str(self.folder), "--fd", fd)
        await until(self._healthy, "the API server")

    async def _healthy(self) -> bool:
        try:
            await self.client.health()
        except Exception:  # noqa: BLE001 - not there yet
            return False
        return True

    def start_inference(self) -> None:
        fd = str(self._sockets["inference"].fileno())
        self.spawn("inference", str(HERE / "inference_server.py"), fd, self._capability)

    def configure(
        self, file: Path, class_name: str, tinker: dict[str, Any] | None = None, **env: Any
    ) -> RunConfig:
        values = {
            "group_size": 4,
            "batch_size": 8,
            "max_token_length": 64,
            "total_steps": 1000,
            "tokenizer_name": str(self.tokenizer),
            "wandb_name": "test",
            "worker_timeout": 60.0,
            **env,
        }
        config = RunConfig(
            run=RunSection(
                run_id="test", environment="test", environment_file=str(file), environment_class=class_name
            ),
            env=EnvSection(**values),
            openai=[OpenAISection(model_name=str(self.tokenizer))],
            tinker=TinkerSection(**tinker or {}),
        )
        config.to_yaml(self.folder / "run.yaml")
        return config

    def start_runner(self, *options: str) -> subprocess.Popen[bytes]:
        return self.spawn(
            "env", "-m", "hermes_rl.environments.process", "--run-dir", str(self.folder), *options
        )

    async def register(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "batch_size": 8,
            "max_token_len": 64,
            "checkpoint_dir": str(self.folder / "checkpoints"),
            "save_checkpoint_interval": 5,
            "starting_step": 0,
            "num_steps": 1000,
            **changes,
        }
        await self.client.register(**values)
        await self.client.publish(values["starting_step"], evaluate=True)

    async def exit_status(self, role: str, patience: float = PATIENCE_S) -> int:
        process = self.processes[role]
        await until(lambda: process.poll() is not None, f"the end of {role}", patience)
        return process.returncode

    async def close(self) -> None:
        await self.client.close()
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for sock in self._sockets.values():
            sock.close()
