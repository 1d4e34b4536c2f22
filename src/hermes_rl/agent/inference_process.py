"""Entry of the process behind ``rl_test_inference``:
``python -m hermes_rl.agent.inference_process --workspace DIR --dir DIR``.

For each model in turn it starts what serves it (for the base model: an engine if need be, and a process that
serves inference) and a process that tries the environment on it. Keys reach those processes by their
environment only. The result is in ``DIR/result.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.agent.environment_trial import KEY_VARIABLE, URL_VARIABLE
from hermes_rl.config import RunConfig, Workspace, write_private
from hermes_rl.config.policy import ModelEndpoint
from hermes_rl.environments.redaction import own_secrets, redacted, secrets_in_environment
from hermes_rl.errors import HermesRLError, ServiceError
from hermes_rl.runs.files import read_json, tail
from hermes_rl.runs.launch import LaunchRequest, Process, spawn
from hermes_rl.runs.loopback import Endpoint, wait_until_healthy
from hermes_rl.runs.roles import ENVIRONMENT_KEYS, PRIVATE_KEYS, THREAD_LIMITS

REQUEST = "request.json"
RESULT = "result.json"
PROGRESS = "progress.json"
BASE = "base"
START_SECONDS = 300.0
TRIAL_SECONDS = 1800.0

logger = logging.getLogger(__name__)


class InferenceTest:
    """One test: an environment on some models.

    Args:
        workspace: whose engines are used.
        folder: the test's folder.
    """

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._workspace = workspace
        self._folder = folder
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        self._steps: int = request["num_steps"]
        self._models: dict[str, dict[str, Any] | None] = request["models"]
        self._config = RunConfig.from_yaml(folder / "run.yaml")
        # No process of the test gets a key that is not its own.
        hidden = (PRIVATE_KEYS - ENVIRONMENT_KEYS) | {
            model["api_key_env"] for model in self._models.values() if model
        }
        self._env = THREAD_LIMITS | {k: v for k, v in os.environ.items() if k not in hidden}

    async def run(self) -> None:
        """Try every model and write the result."""
        self._watched, self._held = os.pipe()
        began = time.monotonic()
        reports: dict[str, Any] = {}
        for name, model in self._models.items():
            write_private(self._folder / PROGRESS, json.dumps({"model": name, "done": list(reports)}))
            try:
                reports[name] = await self._try(name, model)
            except HermesRLError as error:
                reports[name] = {
                    "works": False,
                    "verdict": "The model could not be tried.",
                    **error.as_dict(),
                }
        result = {
            "environment": self._config.run.environment,
            "profile": self._config.run.profile,
            "group_size": self._config.env.group_size,
            "seconds": round(time.monotonic() - began, 2),
            "models": reports,
        }
        write_private(self._folder / RESULT, json.dumps(redacted(result, self._secrets())))

    def _secrets(self) -> list[str]:
        """What the environment was given, or might have seen, and no answer may say."""
        keys = [model["api_key_env"] for model in self._models.values() if model and model["api_key_env"]]
        return secrets_in_environment([*PRIVATE_KEYS, *keys]) + own_secrets(self._config)

    async def _try(self, name: str, model: dict[str, Any] | None) -> dict[str, Any]:
        if model is None:
            async with self._trial(self._folder) as trial, self._base_model() as url:
                return await trial.run({URL_VARIABLE: url, KEY_VARIABLE: "none"})
        endpoint = ModelEndpoint.model_validate(model)
        key = os.environ.get(endpoint.api_key_env, "") if endpoint.api_key_env else "none"
        if not key:
            raise ServiceError(
                f"The key of {name} is missing.",
                hint=f"Set the environment variable {endpoint.api_key_env} where this is run.",
            )
        server = self._config.openai[0].model_copy(
            update={"model_name": endpoint.model_name, "server_type": endpoint.server_type}
        )
        folder = self._folder / f"model-{len(list(self._folder.glob('model-*')))}"
        folder.mkdir(mode=0o700)
        self._config.model_copy(update={"openai": [server]}).to_yaml(folder / "run.yaml")
        variables = {URL_VARIABLE: endpoint.base_url, KEY_VARIABLE: key}
        if endpoint.server_type == "openai":
            # Atropos then takes text without token ids, which is enough for a trial.
            variables["ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"] = "1"
        async with self._trial(folder) as trial:
            return await trial.run(variables)

    @contextlib.asynccontextmanager
    async def _base_model(self) -> AsyncIterator[str]:
        """Serve the base model; gives the URL."""
        listening = Endpoint.bind()
        url = f"{listening.url}/v1"
        log = self._folder / "base_model.log"
        module = "hermes_rl.trainer.base_model"
        # Its imports overlap the start of the engine, which ends when nobody comes.
        process = self._spawn(
            module, ["--run-dir", str(self._folder)], log, ("tinker", module), listening.socket.fileno()
        )
        port, capability = listening.port, listening.capability
        listening.close()
        ready = asyncio.create_task(wait_until_healthy(port, capability))
        ended = asyncio.create_task(process.wait())
        try:
            process.release({URL_VARIABLE: url, **await self._tinker()})
            await asyncio.wait({ready, ended}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ServiceError(f"The base model is not served. {tail(log, 1)}".strip())
            yield url
        finally:
            ready.cancel()
            await _end(process, ended)

    async def _tinker(self) -> dict[str, str]:
        tinker = self._config.tinker
        if tinker.base_url != "local":
            key = os.environ.get("TINKER_API_KEY")
            if not key:
                raise ServiceError("TINKER_API_KEY is not set.", hint="Set it, or use the profile embedded.")
            return {"TINKER_API_KEY": key} | ({"TINKER_BASE_URL": tinker.base_url} if tinker.base_url else {})
        from hermes_rl.engine.registry import EngineSpec, ensure_engine

        spec = EngineSpec(model=tinker.base_model, device=tinker.device, lora_alpha=tinker.lora_alpha)
        address = await asyncio.to_thread(ensure_engine, self._workspace, spec)
        return {"TINKER_BASE_URL": address.base_url, "TINKER_API_KEY": address.api_key}

    @contextlib.asynccontextmanager
    async def _trial(self, folder: Path) -> AsyncIterator[Trial]:
        """A process that will try the environment, importing meanwhile; ended in any case."""
        output = folder / "trial.json"
        log = self._folder / f"{folder.name}.log"
        arguments = ["--run-dir", str(folder), "--steps", str(self._steps), "--output", str(output)]
        module = "hermes_rl.agent.environment_trial"
        process = self._spawn(module, arguments, log, ("atroposlib.envs.base", module))
        ended = asyncio.create_task(process.wait())
        try:
            yield Trial(process, ended, output, log)
        finally:
            await _end(process, ended)

    def _spawn(
        self,
        module: str,
        arguments: list[str],
        log: Path,
        preload: Sequence[str],
        socket_fd: int | None = None,
    ) -> Process:
        """Start a process that imports ``preload`` and then waits until it is released."""
        request = LaunchRequest(
            module=module,
            arguments=arguments,
            env={**self._env, "PYTHONUNBUFFERED": "1"},
            log=log,
            preload=preload,
            socket_fd=socket_fd,
        )
        return spawn(request, self._watched)


@dataclass(frozen=True)
class Trial:
    """A process that tries the environment once it is told on which model.

    Attributes:
        process: the process, waiting.
        ended: done at its end.
        output: where it writes its report.
        log: where it writes what happens.
    """

    process: Process
    ended: asyncio.Task[int]
    output: Path
    log: Path

    async def run(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Let it begin; gives its report.

        Raises:
            ServiceError: it ended without one, or did not end in time.
        """
        self.process.release(variables)
        await asyncio.wait({self.ended}, timeout=TRIAL_SECONDS)
        report = read_json(self.output)
        if report is None:
            what = "ended without an answer" if self.ended.done() else "did not end in time"
            raise ServiceError(f"The environment {what}. {tail(self.log, 1)}".strip())
        return report


async def _end(process: Process, ended: asyncio.Task[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if ended.done():
            return
        process.signal(number)
        await asyncio.wait({ended}, timeout=5.0)


def main(argv: list[str] | None = None) -> int:
    """Run the process; its exit status."""
    parser = argparse.ArgumentParser(prog="hermes_rl.agent.inference_process")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(InferenceTest(Workspace.resolve(options.workspace), options.dir).run())
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        logger.exception("The test failed.")
        said = redacted({"error": f"{type(error).__name__}: {error}"}, own_secrets())
        write_private(options.dir / RESULT, json.dumps(said))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
