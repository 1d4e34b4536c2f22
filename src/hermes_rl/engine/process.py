"""Runs in the engine's own process: the local Tinker server.

Clients (trainers, any program written for the ``tinker`` SDK) talk to it over HTTP on loopback. It ends
itself when no session has been alive for ``--idle-timeout`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

from hermes_rl.errors import EngineError, HermesRLError
from hermes_rl.process_identity import process_mark

logger = logging.getLogger("hermes_rl.engine")

SMALL_MODEL_PARAMETERS = 8_000_000


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped or idle. Returns the exit status."""
    options = _parse(argv)
    # read when torch is imported: threads that wait sleep instead of taking cores from other processes
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return asyncio.run(_serve(options))
    except HermesRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hermes_rl.engine.process", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub name of the base model")
    parser.add_argument("--lora-alpha", type=float, default=32.0, help="numerator of every adapter's scaling")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 chooses by model size")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--idle-timeout", type=float, default=30.0, help="seconds; 0 serves for ever")
    parser.add_argument("--session-timeout", type=float, default=60.0, help="seconds without a heartbeat")
    parser.add_argument("--address-file", type=Path, help="where to write URL and key, once ready")
    parser.add_argument("--cache-mb", type=int, default=0, help="room for keys and values; 0 chooses")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> int:
    import torch
    import uvicorn

    from hermes_rl.engine.architecture import read_architecture
    from hermes_rl.engine.base_model import load_base_model, resolve_model
    from hermes_rl.engine.checkpoints import CheckpointStore
    from hermes_rl.engine.server import EngineApp
    from hermes_rl.engine.service import Service

    device = choose_device(options.device)
    _, folder = resolve_model(options.model)
    dtype = choose_dtype(options.dtype, device, read_architecture(folder).linear_parameters)
    base = load_base_model(options.model, device, dtype)
    torch.set_num_threads(options.threads or choose_threads(base.linear_parameters))
    store = CheckpointStore(options.checkpoints)
    store.remove_partial()
    service = Service(
        base,
        store,
        lora_alpha=options.lora_alpha,
        session_timeout=options.session_timeout,
        cache_bytes=options.cache_mb * 2**20 or _cache_bytes(device),
    )
    api_key = os.environ.get("HERMES_RL_ENGINE_KEY") or "tml-" + secrets.token_hex(24)
    listener = listen(options.host, options.port)
    base_url = f"http://{options.host}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        EngineApp(service, api_key),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=120,
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(config)
    service.start(asyncio.get_running_loop())
    if options.address_file is not None:
        _write_address(options.address_file, base_url, api_key, options)
    logger.info(
        "serving %s on %s (%s, %s, %d threads)",
        base.name, base_url, device, str(dtype).removeprefix("torch."), torch.get_num_threads(),
    )  # fmt: skip
    if options.address_file is None:
        print(f"TINKER_BASE_URL={base_url} TINKER_API_KEY={api_key}", flush=True)
    watch = asyncio.create_task(_watch(service, server, options.idle_timeout))
    loop = asyncio.get_running_loop()
    # a closed terminal is ignored; the server ends in order on the other two, then raises them again
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: None)
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        service.close()
        if options.address_file is not None:
            _remove_address(options.address_file)
    return 0


async def _watch(service, server, idle_timeout: float) -> None:
    """End silent sessions, and the server when it is idle."""
    while True:
        await asyncio.sleep(1.0)
        service.expire()
        if idle_timeout and time.monotonic() - service.last_alive > idle_timeout:
            logger.info("no session for %.0f s; stopping", idle_timeout)
            server.should_exit = True
            return


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send small replies at once.

    asyncio sees to that (``TCP_NODELAY``) only where a socket names its protocol, which ``create_server``
    does not do; without it every reply waits 40 ms for the client's delayed acknowledgement.

    Raises:
        EngineError: the address is taken or not ours.
    """
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise EngineError(
            f"The engine cannot listen on {host}:{port}: {error.strerror}.",
            hint="Choose another port, or 0 for any free one.",
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def choose_device(device: str):
    """The torch device for ``--device``.

    Raises:
        EngineError: the device is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(
            f"Device {device!r} cannot be used: {error}.", allowed=["auto", "cpu", "cuda"]
        ) from error
    return chosen


def choose_dtype(dtype: str, device, linear_parameters: int):
    """The torch type of the base weights for ``--dtype``.

    On a CPU ``auto`` is bfloat16 where the processor multiplies it natively and the model is not small: a
    small model's time goes elsewhere, and conversions cost more than they save.
    """
    import torch

    if dtype != "auto":
        return getattr(torch, dtype)
    small = linear_parameters <= SMALL_MODEL_PARAMETERS
    if device.type == "cpu" and (small or not multiplies_bfloat16()):
        return torch.float32
    return torch.bfloat16


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively (AVX-512 BF16 or AMX)."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def choose_threads(linear_parameters: int) -> int:
    """Compute threads for a model of this size: all physical cores, or one when the model is small.

    The operations of a small model are over before a second thread has woken up, and the other cores are
    busy with trainers and environments: waiting for a thread that is not running costs many times the work.
    """
    import psutil

    if linear_parameters <= SMALL_MODEL_PARAMETERS:
        return 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available, psutil.cpu_count(logical=False) or available))


def _cache_bytes(device) -> int:
    import psutil
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.4)
    return int(min(psutil.virtual_memory().available * 0.25, 8 * 2**30))


def _write_address(path: Path, base_url: str, api_key: str, options: argparse.Namespace) -> None:
    record = {
        "base_url": base_url,
        "api_key": api_key,
        "pid": os.getpid(),
        "mark": process_mark(os.getpid()),
        "started": time.time(),
        "spec": {"model": options.model, "device": options.device, "lora_alpha": options.lora_alpha},
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(record, file)
    os.replace(partial, path)


def _remove_address(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())
