"""A client of the API server, for the trainer and the environment runner: httpx and nothing else."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import httpx

from hermes_rl.errors import ServiceError
from hermes_rl.trajectories.wire import TRAINER_KEY_HEADER

_PATIENCE_S = 15.0
_LATENESS_S = 10.0


class TrajectoriesClient:
    """Speaks to one API server.

    Args:
        url: base URL with the capability, ``http://127.0.0.1:PORT/<capability>``.

    Every method raises ServiceError when the server is gone, refuses, or answers nonsense. Messages never
    hold the URL, since its path is a secret.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            timeout=httpx.Timeout(_PATIENCE_S),
            headers={"accept-encoding": "identity"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )
        self._batches = 0
        self._trainer_key = secrets.token_hex(16)

    async def __aenter__(self) -> TrajectoriesClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # Trainer's side

    async def health(self) -> None:
        """Return when the server is well, raise otherwise."""
        await self._get("health")

    async def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        checkpoint_dir: str,
        save_checkpoint_interval: int,
        starting_step: int,
        num_steps: int,
        wandb_group: str | None = None,
        wandb_project: str | None = None,
        max_batches_offpolicy: int | None = None,
    ) -> int:
        """Register the trainer. From then on batches, publications, logs and the end are this client's alone.

        Args:
            batch_size: sequences in a batch.
            max_token_len: longest sequence in tokens.
            checkpoint_dir: folder below which environments keep ``env_checkpoints``.
            save_checkpoint_interval: steps between checkpoints, -1 for none.
            starting_step: 0, or the step resumed from.
            num_steps: steps of the whole run.
            wandb_group: W&B group.
            wandb_project: W&B project.
            max_batches_offpolicy: sizes the queue.

        Returns:
            The id that Atropos gives a trainer (a UUID as an integer).
        """
        self._http.headers[TRAINER_KEY_HEADER] = self._trainer_key
        answer = await self._post(
            "register",
            {
                "wandb_group": wandb_group,
                "wandb_project": wandb_project,
                "batch_size": batch_size,
                "max_token_len": max_token_len,
                "checkpoint_dir": checkpoint_dir,
                "save_checkpoint_interval": save_checkpoint_interval,
                "starting_step": starting_step,
                "num_steps": num_steps,
                "max_batches_offpolicy": max_batches_offpolicy,
            },
        )
        return int(answer["uuid"])

    async def batch(self, wait: float = 0.0) -> list[dict[str, Any]] | None:
        """The next batch: a list of scored groups, or None after ``wait`` seconds (at most 60) without one.

        A batch whose answer was lost on the way is sent again by the next call.
        """
        answer = await self._get("batch", wait=wait, after=self._batches)
        if "number" not in answer:
            raise ServiceError(f"the API server gives no batch: {answer.get('message', 'no reason given')}")
        if answer["batch"] is not None:
            self._batches = int(answer["number"])
        return answer["batch"]

    async def publish(self, weights_step: int, *, evaluate: bool = False) -> None:
        """Say that the weights of ``weights_step`` are served now, and whether to evaluate them."""
        await self._post("publish", {"weights_step": weights_step, "evaluate": evaluate})

    async def evaluation(self, step: int, wait: float = 0.0) -> dict[str, Any]:
        """The evaluation of ``step``: the record, ``{"pending": bool}`` or ``{"evaluator": False}``."""
        return await self._get("evaluation", step=step, wait=wait)

    async def drain_environment_log(self, after: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Log records from number ``after`` on, and the number to ask for next."""
        answer = await self._get("environment-log", after=after)
        return answer["records"], int(answer["next"])

    async def finish(self, reason: str = "completed") -> None:
        """Say that the run is over."""
        await self._post("finish", {"reason": reason})

    # Everyone

    async def state(self, revision: int | None = None, wait: float = 0.0) -> dict[str, Any]:
        """The server's state; with ``revision``, waits up to ``wait`` seconds (at most 60) for another."""
        if revision is None:
            return await self._get("state")
        return await self._get("state", revision=revision, wait=wait)

    # Environment's side

    async def evaluator(self, env_id: int) -> None:
        """Say that environment ``env_id`` answers evaluations."""
        await self._post("evaluator", {"env_id": env_id})

    async def post_evaluation(
        self, env_id: int, step: int, metrics: dict[str, float], seconds: float, error: str | None = None
    ) -> None:
        """Report an evaluation of the weights of ``step`` that took ``seconds``."""
        await self._post(
            "evaluation",
            {"env_id": env_id, "step": step, "metrics": metrics, "seconds": seconds, "error": error},
        )

    async def environment_log(
        self,
        env_id: int,
        step: int,
        metrics: dict[str, float] | None = None,
        counts: dict[str, float] | None = None,
    ) -> None:
        """Report metrics, and counts since the last report."""
        await self._post(
            "environment-log",
            {"env_id": env_id, "step": step, "metrics": metrics or {}, "counts": counts or {}},
        )

    async def post_scored(self, path: str, body: bytes, key: str) -> dict[str, Any]:
        """Post scored groups, again if the connection breaks; the server takes them once.

        Args:
            path: ``scored_data`` or ``scored_data_list``.
            body: the JSON.
            key: unique to these groups.
        """
        headers = {"content-type": "application/json", "idempotency-key": key}
        for pause in (0.1, 0.5, 2.0, None):
            try:
                response = await self._http.post(path, content=body, headers=headers, timeout=120.0)
                return _answer(path, response)
            except httpx.HTTPError as error:
                if pause is None:
                    raise _gone(path, error) from None
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def environment_failure(self, env_id: int | None, where: str, error: str, count: int = 1) -> None:
        """Report that something went wrong in ``where`` (setup, collect_trajectories, evaluate, …)."""
        await self._post(
            "environment-failure",
            {"env_id": env_id, "where": where, "error": error[:20_000], "count": count},
        )

    async def disconnect_env(self, env_id: int) -> None:
        """Leave."""
        await self._post("disconnect-env", {"env_id": env_id})

    async def _get(self, path: str, **query: float | int) -> Any:
        # A long poll is answered on time or not at all; anything else may meet a busy machine.
        read = float(query["wait"]) + _LATENESS_S if query.get("wait") else _PATIENCE_S
        timeout = httpx.Timeout(_PATIENCE_S, read=read)
        try:
            response = await self._http.get(path, params=query, timeout=timeout)
        except httpx.HTTPError as error:
            raise _gone(path, error) from None
        return _answer(path, response)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise _gone(path, error) from None
        return _answer(path, response)


def _gone(path: str, error: httpx.HTTPError) -> ServiceError:
    return ServiceError(f"the API server does not answer /{path} ({type(error).__name__})")


def _answer(path: str, response: httpx.Response) -> Any:
    if response.status_code >= 400:
        raise ServiceError(
            f"the API server refused /{path} with status {response.status_code}: {response.text[:500]}"
        )
    try:
        return response.json()
    except json.JSONDecodeError:
        raise ServiceError(f"the API server answered /{path} with something that is not JSON") from None
