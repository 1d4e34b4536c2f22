"""Entry of a process that serves a base model, without training it:
``python -m hermes_rl.trainer.base_model --run-dir DIR --fd N``.

Talks to the Tinker server (``$TINKER_BASE_URL``, ``$TINKER_API_KEY``), through the SDK only. Serves inference
on the socket it is given, below the capability path of ``$HERMES_RL_INFERENCE_URL``, until told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tinker
import uvicorn
from transformers import AutoTokenizer

from hermes_rl.config import RunConfig
from hermes_rl.parent_watch import watch_parent
from hermes_rl.trainer.inference import InferenceEndpoint, build_app
from hermes_rl.trainer.ledger import SamplingLedger
from hermes_rl.trainer.sampling import Sampler

logger = logging.getLogger(__name__)


async def serve(run_dir: Path, listening: socket.socket) -> None:
    """Serve the base model of ``run_dir/run.yaml`` until SIGTERM."""
    config = RunConfig.from_yaml(run_dir / "run.yaml")
    endpoint: InferenceEndpoint | None = None
    path = urlsplit(os.environ.get("HERMES_RL_INFERENCE_URL", "")).path.removesuffix("/v1").rstrip("/")
    app = build_app(path, lambda: endpoint)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="inference")
    # First the session: the engine ends when it has had none for a while.
    service = await asyncio.to_thread(tinker.ServiceClient)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(config.env.tokenizer_name)
        client = await service.create_sampling_client_async(base_model=config.tinker.base_model)
        sampler = Sampler(config.run.seed, [tokenizer.eos_token], SamplingLedger())
        sampler.use(0, client)
        endpoint = InferenceEndpoint(
            sampler,
            tokenizer,
            model_name=config.openai[0].model_name,
            max_length=config.env.max_token_length,
            vocabulary_size=len(tokenizer),
        )
        await serving
    finally:
        server.should_exit = True
        await asyncio.to_thread(service.close, "success")


def main(argv: list[str] | None = None) -> int:
    """Run the process; its exit status."""
    parser = argparse.ArgumentParser(prog="hermes_rl.trainer.base_model", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder that holds run.yaml")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the listening socket")
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "tinker"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    watch_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve(options.run_dir, socket.socket(fileno=options.fd)))
    except KeyboardInterrupt:
        logger.info("Stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
