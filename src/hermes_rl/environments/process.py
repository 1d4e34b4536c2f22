"""The environment's process: ``python -m hermes_rl.environments.process --run-dir DIR``.

It runs one Atropos environment. It talks to the API server (``HERMES_RL_TRAJECTORIES_URL``) and, through
the environment, to the inference endpoint that the trainer serves (``HERMES_RL_INFERENCE_URL``,
``HERMES_RL_INFERENCE_KEY``). It ends with status 0 when the API server says that the run is finished or
when it is told to stop, and with status 1 and ``failure_env.json`` in the run's folder otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hermes_rl.config import RunConfig, write_private
from hermes_rl.environments.light_import import import_atroposlib
from hermes_rl.environments.redaction import SERVER_VARIABLES, own_secrets, redact, redact_output
from hermes_rl.environments.watchdog import Watchdog
from hermes_rl.errors import EnvironmentFailedError, HermesRLError, ServiceError

if TYPE_CHECKING:
    from hermes_rl.environments.loading import Endpoints

IMPORT_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 4.0

log = logging.getLogger("hermes_rl.environments")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the environment; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hermes_rl.environments.process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--import-timeout", type=float, default=IMPORT_TIMEOUT_S)
    parser.add_argument("--setup-timeout", type=float, default=1800.0)
    parser.add_argument("--silence-patience", type=float, default=30.0)
    arguments = parser.parse_args(argv)

    secrets = own_secrets()
    try:
        config = RunConfig.from_yaml(arguments.run_dir / "run.yaml")
    except HermesRLError as error:
        _write_failure(arguments.run_dir, error, secrets)
        print(redact(str(error), secrets), file=sys.stderr)
        return 1
    secrets = own_secrets(config)
    redact_output(secrets)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    def give_up(where: str, seconds: float) -> None:
        error = EnvironmentFailedError(f"The environment was stuck in {where} for {seconds:.0f} s.")
        _write_failure(arguments.run_dir, error, secrets)
        print(error, file=sys.stderr, flush=True)

    watchdog = Watchdog(give_up)
    stop = _Stop(watchdog)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        _run(arguments, config, secrets, watchdog, stop)
    except _Stopped:
        return 0
    except HermesRLError as error:
        log.error("%s", error)
        _write_failure(arguments.run_dir, error, secrets)
        return 1
    finally:
        watchdog.stop()
    return 0


def _run(
    arguments: argparse.Namespace,
    config: RunConfig,
    secrets: list[str],
    watchdog: Watchdog,
    stop: _Stop,
) -> None:
    endpoints = _endpoints()
    log.info("environment %s, process %s", config.run.environment, os.getpid())
    watchdog.busy(f"importing {config.run.environment_file}", arguments.import_timeout)
    # Seconds of work: not before the arguments are right.
    import_atroposlib(Path(config.run.environment_file))
    from hermes_rl.environments import loading, metric_capture, pinning
    from hermes_rl.environments.runner import Runner, RunnerSettings
    from hermes_rl.trajectories.client import TrajectoriesClient

    _quieten()
    runner: Runner | None = None

    def on_training(metrics: dict[str, float]) -> None:
        if runner is not None:
            runner.log_training(metrics)

    capture = metric_capture.MetricCapture(on_training)
    metric_capture.install(capture)
    pinning.install(endpoints.inference_url)
    settings = RunnerSettings(
        synchronous=config.env.max_batches_offpolicy == 0,
        failure_limit=config.tinker.max_environment_failures,
        timeout_limit=config.tinker.max_environment_timeouts,
        setup_timeout=arguments.setup_timeout,
        evaluation_timeout=config.tinker.max_evaluation_seconds,
        silence_patience=arguments.silence_patience,
        secrets=secrets,
    )

    async def live() -> None:
        nonlocal runner
        # Some environments start tasks in their constructor, so the loop runs already.
        env = loading.build(config, endpoints)
        async with TrajectoriesClient(endpoints.trajectories_url) as client:
            blocked = max(arguments.setup_timeout, config.env.worker_timeout)
            beat = asyncio.create_task(watchdog.beat(blocked))
            runner = Runner(env, client, capture, settings)
            task = asyncio.create_task(runner.run())
            stop.cancels(task)
            try:
                await task
            finally:
                beat.cancel()

    try:
        asyncio.run(live())
    except asyncio.CancelledError:
        raise _Stopped from None


class _Stopped(BaseException):
    """The process was told to stop."""


class _Stop:
    """Handler of SIGTERM and SIGINT: cancels the run, and sees to it that the process ends in time.

    A plain signal handler, because one on the event loop would not run while an environment blocks it.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def cancels(self, task: asyncio.Task[None]) -> None:
        """From now on the signal cancels ``task``."""
        self._task, self._loop = task, asyncio.get_running_loop()

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self._watchdog.exit_within(STOP_TIMEOUT_S)
        if self._task is None or self._loop is None:
            raise _Stopped
        self._loop.call_soon_threadsafe(self._task.cancel)


def _endpoints() -> Endpoints:
    from hermes_rl.environments.loading import Endpoints

    missing = [name for name in SERVER_VARIABLES[:2] if not os.environ.get(name)]
    if missing:
        raise ServiceError(
            f"{' and '.join(missing)} must be set to the URLs of the API server and the inference endpoint.",
            hint="`hermes-rl run start` does that.",
        )
    return Endpoints(
        trajectories_url=os.environ["HERMES_RL_TRAJECTORIES_URL"].rstrip("/"),
        inference_url=os.environ["HERMES_RL_INFERENCE_URL"].rstrip("/"),
        inference_key=os.environ.get("HERMES_RL_INFERENCE_KEY", ""),
    )


def _quieten() -> None:
    """BaseEnv logs several lines each time it looks around; the libraries under it log every request."""
    for name in ("atroposlib", "atroposlib.envs.base", "httpx", "httpx2", "httpcore", "openai", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Said for every such group; they are counted and shown as a metric.
    logging.getLogger("atroposlib.envs.base").addFilter(
        lambda record: "Scores are the same" not in record.getMessage()
    )


def _write_failure(run_dir: Path, error: HermesRLError, secrets: list[str]) -> None:
    record = {**error.as_dict(), "type": type(error).__name__}
    write_private(run_dir / "failure_env.json", redact(json.dumps(record), secrets))


if __name__ == "__main__":
    sys.exit(main())
