"""Entry of the TRAINER process of a run: ``python -m hermes_rl.trainer.process --run-dir DIR --fd N``.

Talks to the Tinker server (``$TINKER_BASE_URL``, ``$TINKER_API_KEY``), through the SDK only, and to the run's
API server (``$HERMES_RL_TRAJECTORIES_URL``). Serves inference to the environment on the socket it is
given, below the capability path of ``$HERMES_RL_INFERENCE_URL``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import tinker
import uvicorn
from transformers import AutoTokenizer

from hermes_rl.config import RunConfig, write_private
from hermes_rl.errors import ConfigError, HermesRLError, RunFailedError, ServiceError
from hermes_rl.parent_watch import watch_parent
from hermes_rl.trainer.batches import BatchSource
from hermes_rl.trainer.checkpoints import Checkpoints, read_checkpoints
from hermes_rl.trainer.evaluations import Evaluations
from hermes_rl.trainer.inference import InferenceEndpoint, build_app
from hermes_rl.trainer.ledger import SamplingLedger
from hermes_rl.trainer.loop import Training, train
from hermes_rl.trainer.sampling import Sampler
from hermes_rl.trainer.tracking import METRICS_FILE, Tracker
from hermes_rl.trainer.watchdogs import Watchdogs
from hermes_rl.trajectories.client import TrajectoriesClient

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 4.0
_STOP_SECONDS = 4.5
"""From SIGTERM to the end, at most."""
_STEP_SECONDS = 1.5
"""From SIGTERM to the end of the step that is under way, at most."""


def _training_client(
    service: tinker.ServiceClient, config: RunConfig, run_dir: Path
) -> tuple[tinker.TrainingClient, int]:
    """The run's state to begin with, and its step.

    That is the last checkpoint of a run that is resumed, else the checkpoint it was started from, else a
    fresh adapter.
    """
    saved = read_checkpoints(run_dir)
    section = config.tinker
    if saved:
        last = saved[-1]
        logger.info("Resuming from the checkpoint of step %d.", last.step)
        client = service.create_training_client_from_state_with_optimizer(last.state_path)
        return client.result(), last.step
    if config.run.from_checkpoint is not None:
        logger.info("Beginning at step %d with %s.", config.run.from_step, config.run.from_checkpoint)
        client = service.create_training_client_from_state_with_optimizer(config.run.from_checkpoint)
        return client.result(), config.run.from_step
    client = service.create_lora_training_client(
        section.base_model,
        rank=section.lora_rank,
        seed=config.run.seed,
        train_unembed=section.train_unembed,
    )
    return client.result(), 0


def _evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Step → record of the evaluations of a run."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return {}
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line that is being written
            records.append(json.loads(line))
    return {record["step"]: record for record in records if record.get("kind") == "eval"}


def _take_over_baseline(tracker: Tracker, run_dir: Path, baseline_run: str) -> bool:
    """Record another run's evaluation of the untrained weights as this run's; False when it has none."""
    found = _evaluations(run_dir.parent / baseline_run).get(0)
    if found is None:
        return False
    figures = {name: value for name, value in found.items() if name.startswith("eval")}
    tracker.record("eval", 0, figures, baseline_run=baseline_run)
    return True


async def _register(api: TrajectoriesClient, config: RunConfig, run_dir: Path, step: int) -> None:
    await api.register(
        wandb_group=config.tinker.wandb_group or config.run.run_id,
        wandb_project=config.tinker.wandb_project or "hermes-rl",
        batch_size=config.env.batch_size,
        max_token_len=config.tinker.max_token_trainer_length,
        checkpoint_dir=str(run_dir),
        save_checkpoint_interval=config.tinker.save_checkpoint_interval,
        starting_step=step,
        num_steps=config.env.total_steps,
        max_batches_offpolicy=config.env.max_batches_offpolicy,
    )


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: this process handles SIGTERM itself."""

    def install_signal_handlers(self) -> None:
        return

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def run(run_dir: Path, listening: socket.socket, stop: _Stop) -> None:
    """Serve inference and train until the run is over or told to stop."""
    config = RunConfig.from_yaml(run_dir / "run.yaml")
    inference_path = urlsplit(os.environ.get("HERMES_RL_INFERENCE_URL", "")).path
    endpoint: InferenceEndpoint | None = None
    app = build_app(inference_path.removesuffix("/v1").rstrip("/"), lambda: endpoint)
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="inference")
    api = TrajectoriesClient(os.environ["HERMES_RL_TRAJECTORIES_URL"])
    tokenizer: Any = AutoTokenizer.from_pretrained(config.env.tokenizer_name)
    if config.tinker.base_url == "local":
        # The SDK's usage reports are for the cloud service; an engine has no use for them.
        os.environ.setdefault("TINKER_TELEMETRY", "0")
    service = await asyncio.to_thread(tinker.ServiceClient)
    # In a thread: the SDK's methods block while they try to reach the server, the asynchronous ones too.
    client, step = await asyncio.to_thread(_training_client, service, config, run_dir)
    ledger = SamplingLedger()
    sampler = Sampler(config.run.seed, [tokenizer.eos_token], ledger)
    tracker = Tracker(run_dir, config, resume_step=step if step else None)
    endpoint = InferenceEndpoint(
        sampler,
        tokenizer,
        model_name=config.openai[0].model_name,
        max_length=config.env.max_token_length,
        vocabulary_size=len(tokenizer),
    )
    evaluations = Evaluations(api, sampler, tracker, config)
    evaluations.already_done({at for at in _evaluations(run_dir) if at <= step})
    if (
        step == 0
        and config.run.baseline_run
        and _take_over_baseline(tracker, run_dir, config.run.baseline_run)
    ):
        evaluations.already_done({0})
    checkpoints = Checkpoints(run_dir, client, config, tinker.RestClient(), tracker.evaluated)
    watchdogs = Watchdogs(config, run_dir, checkpoints)
    training = Training(
        config=config,
        client=client,
        sampler=sampler,
        ledger=ledger,
        batches=BatchSource(api, evaluations, watchdogs, config),
        evaluations=evaluations,
        checkpoints=checkpoints,
        tracker=tracker,
        watchdogs=watchdogs,
    )
    stop.training = training
    await _register(api, config, run_dir, step)
    logger.info("Training %s from step %d to %d.", config.run.environment, step, config.env.total_steps)
    outcome: Literal["success", "errored"] = "errored"
    try:
        await train(training, step)
        await api.finish("completed")
        tracker.phase = "completed"
        outcome = "success"
    except asyncio.CancelledError:
        tracker.phase = "stopped"
        await training.save_where_it_stopped()
        raise
    except BaseException:
        tracker.phase = "failed"
        raise
    finally:
        await evaluations.cancel()
        if not await asyncio.to_thread(tracker.close):
            # W&B would go on waiting at the interpreter's exit.
            _exit_within(_STOP_SECONDS, 0 if outcome == "success" else 1)
        await api.close()
        server.should_exit = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(serving, _SHUTDOWN_SECONDS)
        await asyncio.to_thread(service.close, outcome)


def _as_known_error(error: BaseException) -> HermesRLError | None:
    """The error as one that a user can act on, when it is of a kind that is understood."""
    if isinstance(error, HermesRLError):
        return error
    if isinstance(error, tinker.AuthenticationError):
        return ServiceError(
            f"The Tinker server refused the key: {error}",
            hint="Set TINKER_API_KEY to a valid key, or use a profile that trains on this machine.",
        )
    if isinstance(error, tinker.APIConnectionError | tinker.APITimeoutError):
        return ServiceError(f"The Tinker server does not answer: {error}", hint="Look at the engine's log.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunFailedError(
            f"The disk is full: {error}.", hint="Free some space, then `hermes-rl run resume` goes on."
        )
    if isinstance(error, tinker.TinkerError) and "not finite" in str(error):
        return RunFailedError(
            f"Training has diverged; the Tinker server reported: {error}",
            hint="Lower learning_rate, set grad_clip_norm, or look at the environment's advantages.",
        )
    if isinstance(error, tinker.TinkerError):
        return ServiceError(f"The Tinker server reported: {error}")
    return None


class _Stop:
    """What SIGTERM and SIGINT do: end the run at once between two steps, else after the step under way.

    A step that takes longer than :data:`_STEP_SECONDS` is broken off.

    Args:
        main: the task that trains.
    """

    def __init__(self, main: asyncio.Task[None]) -> None:
        self._main = main
        self.training: Training | None = None

    def __call__(self) -> None:
        _exit_within(_STOP_SECONDS)
        if self.training is None or self.training.at_rest is not None:
            self._main.cancel()
            return
        self.training.is_stopping = True
        self._main.get_loop().call_later(_STEP_SECONDS, self._break_off, self.training)

    def _break_off(self, training: Training) -> None:
        if training.at_rest is None:
            self._main.cancel()


async def _run_until_signal(run_dir: Path, listening: socket.socket) -> None:
    main = asyncio.current_task()
    assert main is not None
    stop = _Stop(main)
    for number in (signal.SIGTERM, signal.SIGINT):
        main.get_loop().add_signal_handler(number, stop)
    await run(run_dir, listening, stop)


def _exit_within(seconds: float, status: int = 0) -> None:
    """End the process with ``status`` after ``seconds`` whatever it does until then.

    The SDK tries for minutes to reach a Tinker server that is gone, in threads that cannot be cancelled and
    that the interpreter waits for.
    """

    def leave() -> None:
        logger.warning("Stopped without waiting for what was still going on.")
        os._exit(status)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def main(argv: list[str] | None = None) -> int:
    """Run the process.

    Returns:
        0 when the run is complete or was asked to stop, 1 when it failed (the reason is in
        ``failure_trainer.json``).
    """
    parser = argparse.ArgumentParser(prog="hermes_rl.trainer.process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the listening socket")
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "tinker", "wandb"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    watch_parent()
    run_dir: Path = options.run_dir
    try:
        asyncio.run(_run_until_signal(run_dir, socket.socket(fileno=options.fd)))
    except (asyncio.CancelledError, KeyboardInterrupt):
        logger.info("Stopped.")
    except Exception as error:
        logger.exception("The trainer failed.")
        known = _as_known_error(error) or ConfigError(f"{type(error).__name__}: {error}")
        report = {"type": type(error).__name__, **known.as_dict()}
        try:
            write_private(run_dir / "failure_trainer.json", json.dumps(report, indent=1, default=str))
        except OSError as full:
            logger.error("The reason could not be written (%s): %s", full, known)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
