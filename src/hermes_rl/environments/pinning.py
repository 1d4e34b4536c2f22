"""Sending the requests of an evaluation to the weights under evaluation.

While ``evaluate()`` runs, every inference request made from it, or from a task or thread it started, goes
to ``…/step/K/v1`` in place of ``…/v1``. The trainer serves that path with exactly the weights of step K,
so an evaluation is not blurred by updates that happen meanwhile. Which step it is travels in a context
variable, which tasks and ``asyncio.to_thread`` inherit.

Environments reach the model through httpx or its fork httpx2 (the ``openai`` package), aiohttp (Atropos's own
clients) or requests, so it is these that are taught to rewrite the address. Nothing in ``atroposlib`` is
touched.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

evaluated_step: ContextVar[int | None] = ContextVar("evaluated_step", default=None)
"""The step whose weights the current task evaluates; None outside evaluations."""


def pinned(url: str, root: str) -> str:
    """The address to use in place of ``url``.

    Args:
        url: where a request is about to go.
        root: the inference endpoint's URL without ``/v1``.
    """
    step = evaluated_step.get()
    if step is None or not url.startswith(root + "/") or url.startswith(f"{root}/step/"):
        return url
    return f"{root}/step/{step}{url[len(root) :]}"


def install(inference_url: str) -> None:
    """Teach this process's HTTP clients to pin requests to ``inference_url`` (ending in ``/v1``)."""
    import aiohttp

    root = inference_url.removesuffix("/v1").rstrip("/")
    send_aiohttp = aiohttp.ClientSession._request

    async def request(self: aiohttp.ClientSession, method: str, url: Any, **options: Any) -> Any:
        target = pinned(str(url), root)
        return await send_aiohttp(self, method, url if target == str(url) else target, **options)

    setattr(aiohttp.ClientSession, "_request", request)  # noqa: B010 - a method is replaced, on purpose
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            _pin_sender(module.Client, root, module.URL)
            _pin_async_sender(module.AsyncClient, root, module.URL)
    if importlib.util.find_spec("requests") is not None:
        _pin_sender(importlib.import_module("requests").Session, root, str)


def _pin_sender(client: Any, root: str, make_url: Callable[[str], Any]) -> None:
    original = client.send

    def send(self: Any, request: Any, **options: Any) -> Any:
        _pin(request, root, make_url)
        return original(self, request, **options)

    client.send = send


def _pin_async_sender(client: Any, root: str, make_url: Callable[[str], Any]) -> None:
    original = client.send

    async def send(self: Any, request: Any, **options: Any) -> Any:
        _pin(request, root, make_url)
        return await original(self, request, **options)

    client.send = send


def _pin(request: Any, root: str, make_url: Callable[[str], Any]) -> None:
    target = pinned(str(request.url), root)
    if target != str(request.url):
        request.url = make_url(target)
