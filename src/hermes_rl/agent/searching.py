"""Searches, as an agent sees them. Runs in the caller's process; a search has a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_rl.agent.arguments import CheckSearch, GetSearchResults, StartSearch, StopSearch
from hermes_rl.agent.pacing import SHORTEST_SECONDS, bounded
from hermes_rl.agent.patience import within
from hermes_rl.agent.session import AgentSession
from hermes_rl.config import CatalogueField, check_value, find_profile, without_secrets
from hermes_rl.errors import ConfigError

if TYPE_CHECKING:
    from hermes_rl.search.space import Range

DEFAULT_PRESET = "article-grid"
_FIELDS = (
    "preset",
    "space",
    "strategy",
    "trials",
    "parallel",
    "refine",
    "replicate",
    "pruner",
    "objective",
    "constraints",
)


def start_search(session: AgentSession, request: StartSearch) -> dict[str, Any]:
    """Check a search against the policy, leave it to a process of its own and return at once."""
    from hermes_rl.search.definition import define_search
    from hermes_rl.search.drive import detach
    from hermes_rl.search.orchestrator import create_search
    from hermes_rl.search.run_trials import RunTrials

    planned = session.next_run()
    environment, profile = planned.config.run.environment, planned.config.run.profile
    fields = {name: getattr(request, name) for name in _FIELDS}
    if request.space is None and request.preset is None:
        fields["preset"] = DEFAULT_PRESET
    fields |= {"environment": environment, "profile": profile, "seed": planned.config.run.seed}
    searched = set(define_search(fields).space)
    fields["overrides"] = {
        name: value for name, value in planned.overrides.items() if name not in searched and name != "seed"
    }
    fields["budget"] = {
        name: value
        for name, value in (("minutes", request.max_minutes), ("steps", request.max_steps))
        if value is not None
    }
    definition = define_search(fields)
    _check_policy(session, definition)
    runner = RunTrials(session.workspace, None, environment, profile, definition.overrides)
    store = create_search(session.workspace, definition, runner)
    definition = store.load().definition  # with what was found out on the way
    detach(session.workspace, store.search_id)
    session.latest_search = store.search_id
    answer: dict[str, Any] = {
        "search_id": store.search_id,
        "environment": environment,
        "profile": profile,
        "strategy": definition.strategy,
        "space": definition.build_space().describe(),
        "planned_trials": definition.planned_trials(),
        "planned_replicates": definition.planned_replicates(definition.planned_trials()),
        "parallel": definition.parallel,
        "set_in_every_trial": without_secrets(definition.overrides),
        "check_again_in_seconds": 30,
        "next": f"rl_check_search({store.search_id!r})",
    }
    if planned.note is not None:
        answer["note"] = planned.note
    if find_profile(profile).costs_money:
        answer["warning"] = "Every trial is billed by the Tinker service."
    return answer


def _check_policy(session: AgentSession, definition: Any) -> None:
    """A search may only set what its caller could set by hand."""
    from hermes_rl.search.space import Choice

    policy = session.policy()
    environment, _ = session.environment(policy)
    for parameter in definition.build_space().parameters:
        field = policy.field(session.find_field(parameter.name, environment), environment.name)
        if field.locked:
            raise ConfigError(
                f"{field.name} is locked: it cannot be searched.",
                hint="rl_get_current_config lists the tunable fields.",
            )
        for value in parameter.edges():
            check_value(field, value)
        if field.choices is not None and not isinstance(parameter, Choice):
            _check_choices(field, parameter)


def _check_choices(field: CatalogueField, parameter: Range) -> None:
    """A range may only hold values that the field can be given one by one."""
    allowed = f"a list of {', '.join(map(str, field.choices or ()))}"
    if not parameter.whole:
        raise ConfigError(
            f"{field.name} takes a few values only: it cannot be searched over a continuous range.",
            allowed=allowed,
        )
    step = 1 if parameter.log else parameter.step
    for value in range(int(parameter.low), int(parameter.high) + 1, step):
        if value not in (field.choices or ()):  # reached soon: there are few choices
            raise ConfigError(
                f"The range {parameter.describe()} of {field.name} holds {value}.", allowed=allowed
            )


def check_search(session: AgentSession, request: CheckSearch) -> dict[str, Any]:
    """How a search stands."""
    from hermes_rl.search.report import sentences
    from hermes_rl.search.summary import progress_sentence, summarize
    from hermes_rl.search.trial import FINISHED

    store = _open(session, request.search_id)
    summary = summarize(store)
    definition = summary.file.definition
    finished = [record for record in summary.records if record.state in FINISHED]
    running = [record for record in summary.records if record.state == "running"]
    answer: dict[str, Any] = {
        "search_id": store.search_id,
        "environment": definition.environment,
        "state": summary.state,
        "reason": summary.file.reason,
        "progress": progress_sentence(summary.records, summary.planned),
        "finished_trials": len(finished),
        "planned_trials": summary.planned,
        "running": [
            {"trial": r.trial, "run_id": r.run_id, "params": r.params, "step": r.step} for r in running
        ],
        "best": _trial(summary.best),
        "default": _trial(summary.default),
        "summary": sentences(summary),
        "check_again_in_seconds": None,
    }
    if summary.state == "running":
        if store.stop_file.exists():
            answer["state"] = "stopping"
        seconds = [record.seconds for record in finished if record.seconds > 0]
        answer["check_again_in_seconds"] = bounded(sum(seconds) / len(seconds) if seconds else 30)
    else:
        answer["next"] = f"rl_get_search_results({store.search_id!r})"
    return answer


def stop_search(session: AgentSession, request: StopSearch) -> dict[str, Any]:
    """Stop a search; returns when it and its trials have ended, or when the caller waits no longer."""
    from hermes_rl.search import drive

    store = _open(session, request.search_id)
    seconds = session.patience if request.wait_seconds is None else request.wait_seconds
    if store.is_driven():
        store.stop_file.touch()  # asked for, even if this process ends with its thread
    state = within(seconds, lambda: drive.stop_search(store), f"stop-{store.search_id}")
    if state is not None:
        return {"search_id": store.search_id, "state": state}
    return {
        "search_id": store.search_id,
        "state": "stopping",
        "check_again_in_seconds": SHORTEST_SECONDS,
        "next": f"rl_check_search({store.search_id!r})",
    }


def get_search_results(session: AgentSession, request: GetSearchResults) -> dict[str, Any]:
    """The ranked trials, the best configuration and the files, which are written anew."""
    from hermes_rl.search.report import sentences, write_report
    from hermes_rl.search.summary import summarize

    store = _open(session, request.search_id)
    summary = summarize(store)
    report = write_report(store) if summary.records else None
    best_file = store.folder / "best.yaml"
    answer: dict[str, Any] = {
        "search_id": store.search_id,
        "environment": summary.file.definition.environment,
        "state": summary.state,
        "reason": summary.file.reason,
        "objective": str(summary.objectives[0]),
        "summary": sentences(summary),
        "best": _trial(summary.best),
        "default": _trial(summary.default),
        "default_rank": summary.default_rank,
        "trials": [
            {"rank": item.rank, **(_trial(item.record) or {})} for item in summary.ranked[: request.limit]
        ],
        "trial_count": len(summary.records),
        "optimizer_steps": summary.steps,
        "seconds": summary.seconds,
        "report": report,
        "best_config": best_file if best_file.exists() else None,
    }
    if summary.best is not None:
        answer["next"] = "Set the fields of best.params with rl_edit_config, then rl_start_training."
    return answer


def _open(session: AgentSession, given: str | None) -> Any:
    from hermes_rl.search.store import SearchStore

    return SearchStore.open(session.workspace, given or session.latest_search or "last")


def _trial(record: Any) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "trial": record.trial,
        "run_id": record.run_id,
        "state": record.state,
        "params": record.params,
        "value": record.value,
        "standard_error": record.standard_error,
        "step": record.step,
        "seconds": record.seconds,
        "is_default": record.is_default,
        "reason": record.reason,
    }
