"""Environments and configuration, as an agent sees them. Runs in the caller's process."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hermes_rl.agent.arguments import EditConfig, GetCurrentConfig, ListEnvironments, SelectEnvironment
from hermes_rl.agent.session import AgentSession, default_of
from hermes_rl.config import CatalogueField, FieldInForce, without_secrets
from hermes_rl.config.catalogue import HIDDEN
from hermes_rl.config.policy import holds_secret
from hermes_rl.errors import HermesRLError


def list_environments(session: AgentSession, _: ListEnvironments) -> dict[str, Any]:
    """The environments found, by their syntax trees: none of their code is run."""
    policy = session.policy()
    found = session.discover(policy)
    default, problem = None, None
    try:
        default = default_of(found, policy)
    except HermesRLError as error:
        problem = f"The operator's policy selects an environment that cannot be used. {error.message}"
    entries: list[dict[str, Any]] = []
    for environment in found:
        entry: dict[str, Any] = {
            "name": environment.name,
            "class_name": environment.class_name,
            "file_path": str(environment.file_path),
            "description": environment.description or "",
            "default": environment is default,
        }
        if environment.error:
            entry["error"] = environment.error
        entries.append(entry)
    answer: dict[str, Any] = {"environments": entries, "count": len(entries)}
    if session.selected is not None:
        answer["selected"] = session.selected.name
    if problem is not None:
        answer["note"] = problem
    if not entries:
        answer["hint"] = f"Put an Atropos environment file into {session.workspace.environments}."
    return answer


def select_environment(session: AgentSession, request: SelectEnvironment) -> dict[str, Any]:
    """Select an environment and begin again from the defaults."""
    dropped = session.select(request.name, request.profile)
    policy = session.policy()
    environment, _ = session.environment(policy)
    answer: dict[str, Any] = {
        "environment": environment.name,
        "class_name": environment.class_name,
        "file_path": str(environment.file_path),
        "description": environment.description or "",
        "profile": session.profile(policy),
        "next": "rl_get_current_config shows what can be changed; rl_start_training starts a run.",
    }
    return answer | ({"dropped_edits": without_secrets(dropped)} if dropped else {})


def get_current_config(session: AgentSession, _: GetCurrentConfig) -> dict[str, Any]:
    """The configuration of the next run, tunable and locked apart."""
    policy = session.policy()
    environment, note = session.environment(policy)
    own_fields: list[CatalogueField] | None = None
    problem: HermesRLError | None = None
    try:
        own_fields = session.own_fields(environment)
    except HermesRLError as error:
        problem = error
    fields = session.fields(environment, policy, own_fields)
    answer: dict[str, Any] = {
        "environment": environment.name,
        "profile": session.profile(policy),
        "profiles": policy.allowed_profiles,
        "tunable": {
            name: _described(item, environment.name) for name, item in fields.items() if not item.field.locked
        },
        "locked": {
            name: {
                "value": HIDDEN if holds_secret(item.field) and item.value else item.value,
                "source": item.source,
                "description": item.field.description,
            }
            for name, item in fields.items()
            if item.field.locked
        },
        "next": "rl_edit_config(field, value) changes a tunable field; rl_start_training starts a run.",
    }
    if note is not None:
        answer["note"] = note
    if problem is not None:
        answer["own_fields_error"] = problem.message
    return answer


def _described(item: FieldInForce, environment: str) -> dict[str, Any]:
    field = item.field
    described: dict[str, Any] = {
        "value": HIDDEN if holds_secret(field) and item.value else item.value,
        "default": HIDDEN if holds_secret(field) and item.default else item.default,
        "source": item.source,
        "section": field.section,
        "type": field.type,
        "allowed": field.allowed(),
        "description": field.description,
    }
    for name in ("unit", "minimum", "maximum", "choices"):
        if getattr(field, name) is not None:
            described[name] = getattr(field, name)
    if field.name == "wandb_name" and item.value is None:
        described["automatic"] = f"{environment}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return described


def edit_config(session: AgentSession, request: EditConfig) -> dict[str, Any]:
    """Change one tunable field for the next run, once it is clear that the whole still holds together."""
    name, value, note = session.edit(request.field, request.value)
    answer: dict[str, Any] = {
        "field": name,
        "value": without_secrets({name: value})[name],
        "source": "edit",
        "next": "Edit another field, or rl_start_training starts a run with this configuration.",
    }
    return answer | ({"note": note} if note else {})
