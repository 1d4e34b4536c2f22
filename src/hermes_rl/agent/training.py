"""Runs, as an agent sees them. Runs in the caller's process; the runs have processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hermes_rl import runs
from hermes_rl.agent.arguments import CheckStatus, GetResults, ListRuns, StartTraining, StopTraining
from hermes_rl.agent.pacing import SHORTEST_SECONDS, next_look
from hermes_rl.agent.patience import within
from hermes_rl.agent.session import AgentSession
from hermes_rl.config import find_profile, without_secrets

if TYPE_CHECKING:
    from hermes_rl.runs import RunStatus

SHOWN_CURVES = ("reward_mean", "percent_correct", "eval_percent_correct", "loss")


def start_training(session: AgentSession, _: StartTraining) -> dict[str, Any]:
    """Start a run with the current configuration and return at once."""
    planned = session.next_run()
    config = planned.config
    run_id = runs.start(session.workspace, config, overrides=planned.overrides)
    session.latest_run = run_id
    status = runs.glance(session.workspace, run_id)
    answer: dict[str, Any] = {
        "run_id": run_id,
        "status": status.status,
        "environment": config.run.environment,
        "profile": config.run.profile,
        "total_steps": config.env.total_steps,
        "wandb_name": config.env.wandb_name,
        "overrides": without_secrets(planned.overrides),
        "config": str(session.workspace.run_dir(run_id) / "run.yaml"),
        "logs": status.logs,
        "check_again_in_seconds": next_look(status),
        "next": f"rl_check_status({run_id!r})",
    }
    if planned.note is not None:
        answer["note"] = planned.note
    if find_profile(config.run.profile).costs_money:
        answer["warning"] = "This run is billed by the Tinker service."
    return answer


def run_id_of(session: AgentSession, given: str | None) -> str:
    """The full id of a run: as given, else the latest of this caller, else the latest of the workspace.

    Raises:
        UnknownRunError: there is none.
    """
    return runs.resolve_id(session.workspace, given or session.latest_run or "latest")


def check_status(session: AgentSession, request: CheckStatus) -> dict[str, Any]:
    """How a run stands."""
    status = runs.status(session.workspace, run_id_of(session, request.run_id))
    answer = _described(status)
    answer["processes"] = [process.model_dump() for process in status.processes]
    answer |= {"logs": status.logs, "run_dir": status.run_dir}
    if status.log_tail and status.status == "failed":
        answer["log_tail"] = status.log_tail
    answer["check_again_in_seconds"] = next_look(status)
    if status.is_final:
        answer["next"] = f"rl_get_results({status.run_id!r})"
    return answer


def stop_training(session: AgentSession, request: StopTraining) -> dict[str, Any]:
    """Stop a run; returns when its processes have ended, or when the caller waits no longer."""
    workspace = session.workspace
    run_id = run_id_of(session, request.run_id)
    before = runs.glance(workspace, run_id)
    if before.is_final:
        return _described(before) | {"note": "It had ended already."}
    seconds = session.patience if request.wait_seconds is None else request.wait_seconds
    now = runs.stop(workspace, run_id, wait=False)
    if not now.is_final:
        # In the background it goes on to the end, by force where that is needed.
        ended = within(seconds, lambda: runs.stop(workspace, run_id), f"stop-{run_id}")
        now = ended or runs.glance(workspace, run_id)
    if now.is_final:
        return _described(now)
    return _described(now) | {
        "status": "stopping",
        "check_again_in_seconds": SHORTEST_SECONDS,
        "next": f"rl_check_status({run_id!r})",
    }


def get_results(session: AgentSession, request: GetResults) -> dict[str, Any]:
    """What came of a run, its curves thinned out."""
    found = runs.results(session.workspace, run_id_of(session, request.run_id))
    curves = found["curves"]
    found["curves"] = {
        name: thinned(curves["step"], curves[name], request.max_points)
        for name in SHOWN_CURVES
        if name in curves
    }
    if found["status"] not in ("completed", "stopped", "failed"):
        found["note"] = "The run goes on; these are its results so far."
    return found


def list_runs(session: AgentSession, request: ListRuns) -> dict[str, Any]:
    """The runs of the workspace, the newest first."""
    found = runs.list_runs(session.workspace)
    shown = found[::-1][: request.limit]
    return {"runs": [_described(status) for status in shown], "count": len(found)}


def thinned(steps: Sequence[int], values: Sequence[float | None], most: int) -> dict[str, list[Any]]:
    """The measured points of a curve, at most ``most`` of them, the first and the last kept."""
    points = [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]
    if len(points) > most:
        last = len(points) - 1
        points = [points[round(place * last / (most - 1))] for place in range(most)]
    return {"step": [step for step, _ in points], "value": [value for _, value in points]}


_SHOWN = (
    "run_id",
    "environment",
    "profile",
    "status",
    "phase",
    "step",
    "total_steps",
    "reward_mean",
    "percent_correct",
    "eval_percent_correct",
    "loss",
    "overrides",
    "created_at",
    "started_at",
    "ended_at",
)
_SHOWN_WHEN_SET = ("reason", "guilty_role", "search_id", "trial")


def _described(status: RunStatus) -> dict[str, Any]:
    described = {name: getattr(status, name) for name in _SHOWN}
    extra = {name: getattr(status, name) for name in _SHOWN_WHEN_SET}
    return described | {name: value for name, value in extra.items() if value is not None}
