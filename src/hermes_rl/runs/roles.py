"""The processes of a run: their order, their modules, what each may know."""

from __future__ import annotations

from dataclasses import dataclass

from hermes_rl.config import Role
from hermes_rl.config.workspace import STATE_URL_VARIABLE


@dataclass(frozen=True)
class RoleSpec:
    """One process of a run.

    Attributes:
        role: short name, as in the log file's.
        title: name in messages.
        module: module whose ``main()`` is the process.
        preload: modules that take long to import; imported while the process waits for its turn.
        ready_within: seconds from its turn until it must be ready.
        keys: names of secrets that this process may see; the other processes' are taken away.
    """

    role: Role
    title: str
    module: str
    preload: tuple[str, ...]
    ready_within: float
    keys: frozenset[str] = frozenset()


HUB_KEYS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
TRAINER_KEYS = frozenset({"TINKER_API_KEY", "WANDB_API_KEY"}) | HUB_KEYS
ENVIRONMENT_KEYS = HUB_KEYS | {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"}
"""An environment may ask another model to judge."""

ROLES: tuple[RoleSpec, ...] = (
    RoleSpec(
        "api", "API server", "hermes_rl.trajectories.process", ("hermes_rl.trajectories.process",), 60.0
    ),
    RoleSpec(
        "trainer",
        "trainer",
        "hermes_rl.trainer.process",
        ("tinker", "hermes_rl.trainer.process"),
        600.0,
        TRAINER_KEYS,
    ),
    RoleSpec(
        "env",
        "environment",
        "hermes_rl.environments.process",
        ("atroposlib.envs.base", "hermes_rl.environments.loading", "hermes_rl.environments.runner"),
        600.0,
        ENVIRONMENT_KEYS,
    ),
)
"""In the order in which they become ready; they are stopped in reverse."""

THREAD_LIMITS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Defaults for the processes of a run: the numerical work is the engine's."""

PRIVATE_KEYS = frozenset({STATE_URL_VARIABLE}).union(*(spec.keys for spec in ROLES))
"""A process gets of these what its role names; the store, whose URL can hold a password, none of them."""


def role_spec(role: str) -> RoleSpec:
    """The process of that role.

    Raises:
        KeyError: there is none.
    """
    for spec in ROLES:
        if spec.role == role:
            return spec
    raise KeyError(role)
