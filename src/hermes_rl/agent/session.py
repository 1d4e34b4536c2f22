"""What one caller has selected and edited, and the configuration that follows from it.

Runs in the caller's process. Everything raises :class:`~hermes_rl.errors.HermesRLError` for what a caller
can put right; :mod:`hermes_rl.agent.toolset` turns that into an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_rl.config import (
    DEFAULT_ENVIRONMENT,
    CatalogueField,
    FieldInForce,
    Policy,
    RunConfig,
    Workspace,
    build_run_config,
    check_value,
    fields_in_force,
    find_field,
    load_policy,
)
from hermes_rl.config.catalogue import own_key
from hermes_rl.errors import ConfigError, EnvironmentFailedError, HermesRLError, UnknownEnvironmentError

if TYPE_CHECKING:
    from hermes_rl.environments.discovery import DiscoveredEnvironment


@dataclass(frozen=True)
class NextRun:
    """What a run started now would be.

    Attributes:
        config: all of it.
        overrides: what differs from the profile: the policy's values and the edits.
        note: what was decided for the caller, or None.
    """

    config: RunConfig
    overrides: dict[str, Any]
    note: str | None


class AgentSession:
    """One caller's selection, profile and edits, over a workspace.

    Args:
        workspace: where runs live; None resolves it at the first use.
        patience: longest time, in seconds, that a call which could take long waits for its result before
            it returns an id to ask with again; None waits until it is there.

    Attributes:
        patience: as given.
        latest_run, latest_search: what this caller started last.
    """

    def __init__(self, workspace: Workspace | None = None, *, patience: float | None = None) -> None:
        self.patience = patience
        self._workspace = workspace
        self._lock = threading.RLock()
        self._environment: DiscoveredEnvironment | None = None
        self._profile: str | None = None
        self._edits: dict[str, Any] = {}
        self.latest_run: str | None = None
        self.latest_search: str | None = None

    def fork(self) -> AgentSession:
        """A session that begins as this one stands."""
        other = AgentSession(self._workspace, patience=self.patience)
        with self._lock:
            other._environment, other._profile = self._environment, self._profile
            other._edits = dict(self._edits)
            other.latest_run, other.latest_search = self.latest_run, self.latest_search
        return other

    @property
    def workspace(self) -> Workspace:
        """The workspace.

        Raises:
            WorkspaceError: it cannot be made or written to.
        """
        if self._workspace is None:
            self._workspace = Workspace.resolve()
        return self._workspace

    def policy(self) -> Policy:
        """The operator's policy as it is now.

        Raises:
            ConfigError: its file is wrong.
        """
        return load_policy(self.workspace)

    def secret_variables(self) -> set[str]:
        """The environment variables that hold keys of the operator's models, whatever their names."""
        try:
            models = self.policy().models.values()
        except HermesRLError:  # whoever needs the policy says what is wrong with it
            return set()
        return {model.api_key_env for model in models if model.api_key_env is not None}

    def profile(self, policy: Policy) -> str:
        """The profile of the next run; one that the policy no longer allows gives way to its default."""
        chosen = self._profile
        return chosen if chosen in policy.allowed_profiles else policy.profile

    @property
    def selected(self) -> DiscoveredEnvironment | None:
        """The environment that is selected, if any is."""
        return self._environment

    def discover(self, policy: Policy) -> list[DiscoveredEnvironment]:
        """The environments that the policy lets this caller see, broken ones included."""
        return [e for e in self._discover_all() if policy.allows_environment(e.name)]

    def _discover_all(self) -> list[DiscoveredEnvironment]:
        from hermes_rl.environments.discovery import discover

        return discover(self.workspace.environments_dirs)

    def select(self, name: str, profile: str | None = None) -> dict[str, Any]:
        """Select an environment and begin again from the defaults.

        Returns:
            The edits that were dropped.

        Raises:
            UnknownEnvironmentError: there is none of that name, or its file cannot be used.
            ConfigError: the policy does not allow the profile, or does not fit the environment.
        """
        policy = self.policy()
        environment = _named(name, self.discover(policy))
        if profile is not None and profile not in policy.allowed_profiles:
            raise ConfigError(
                f"The profile {profile[:80]!r} is not allowed.",
                allowed=policy.allowed_profiles,
                hint="The operator allows profiles in the policy file.",
            )
        chosen = profile or self.profile(policy)
        self._check_policy(environment, policy, chosen, {})
        with self._lock:
            dropped = self._edits
            self._environment, self._profile, self._edits = environment, profile or self._profile, {}
        return dropped

    def environment(self, policy: Policy) -> tuple[DiscoveredEnvironment, str | None]:
        """The selected environment; the default one is selected when there is none yet.

        Returns:
            The environment, and a note for the caller when it was not the caller who selected it.

        Raises:
            UnknownEnvironmentError: there is nothing to select.
            ConfigError: the policy selects an environment that there is not.
        """
        with self._lock:
            if self._environment is not None and policy.allows_environment(self._environment.name):
                return self._environment, None
            if policy.environment is not None:
                policy.check_environments(environment.name for environment in self._discover_all())
            default = default_of(self.discover(policy), policy)
            if default is None:
                raise UnknownEnvironmentError(
                    "There is no environment to train on.",
                    hint=f"Put an Atropos environment file into {self.workspace.environments}.",
                )
            self._environment, self._edits = default, {}
            return default, f"No environment was selected, so the default one is now: {default.name!r}."

    def own_fields(self, environment: DiscoveredEnvironment) -> list[CatalogueField]:
        """The environment's own fields, read in a child process and remembered on disk.

        Raises:
            EnvironmentFailedError: its file cannot be imported.
        """
        from hermes_rl.environments.inspection import environment_fields

        return list(environment_fields(self.workspace, environment))

    def find_field(self, name: str, environment: DiscoveredEnvironment) -> CatalogueField:
        """A field of the catalogue, else one of the environment's own.

        Raises:
            ConfigError: there is no such field.
        """
        try:
            return find_field(name)
        except ConfigError as unknown:
            try:
                own = {field.name: field for field in self.own_fields(environment)}
            except EnvironmentFailedError as failed:
                raise ConfigError(
                    unknown.message,
                    allowed=unknown.allowed,
                    hint=f"The fields of {environment.name} itself are not known: {failed.message}",
                ) from failed
            return find_field(name, own)

    def fields(
        self,
        environment: DiscoveredEnvironment,
        policy: Policy,
        own_fields: Sequence[CatalogueField] | None = None,
    ) -> dict[str, FieldInForce]:
        """Every field as it stands for the next run, the environment's own where they are given."""
        with self._lock:
            edits = dict(self._edits)
        return fields_in_force(
            self.profile(policy), policy, environment=environment.name, own_fields=own_fields, edits=edits
        )

    def edit(self, name: str, value: Any) -> tuple[str, Any, str | None]:
        """Change one tunable field for the next run.

        Returns:
            What the field is set by, the value taken, and the note of :meth:`environment`.

        Raises:
            ConfigError: there is no such field, it is locked, or the value is not allowed, alone or beside
                the others. Nothing has changed then.
        """
        policy = self.policy()
        with self._lock:
            environment, note = self.environment(policy)
            field = policy.field(self.find_field(name, environment), environment.name)
            if field.locked:
                raise ConfigError(
                    f"{field.name} is locked: only the operator can change it.",
                    allowed=[
                        name
                        for name, item in self.fields(environment, policy).items()
                        if not item.field.locked
                    ],
                    hint="Change one of these, or ask the operator to unlock it in the policy file.",
                )
            checked = check_value(field, value)
            edits = {**self._edits, field.key: checked}
            self._build(environment, policy, edits)
            self._edits = edits
            return field.key, checked, note

    def next_run(self) -> NextRun:
        """The configuration of a run that is started now.

        Raises:
            HermesRLError: there is no environment, or policy and edits do not fit together.
        """
        policy = self.policy()
        with self._lock:
            environment, note = self.environment(policy)
            overrides = self._overrides(environment, policy, self._edits)
            return NextRun(self._build(environment, policy, self._edits), overrides, note)

    def _overrides(
        self, environment: DiscoveredEnvironment, policy: Policy, edits: Mapping[str, Any]
    ) -> dict[str, Any]:
        own_rules = policy.own_fields.get(environment.name, {})
        rules = {**policy.fields, **{own_key(name): rule for name, rule in own_rules.items()}}
        for name, value in edits.items():
            # The operator may have changed the policy since the edit was made.
            field = policy.field(self.find_field(name, environment), environment.name)
            if field.locked:
                raise ConfigError(
                    f"{name} was edited, and the operator has locked it since.",
                    hint="rl_select_environment begins again from the defaults.",
                )
            check_value(field, value)
        return {**{name: rule.value for name, rule in rules.items() if rule.fixes}, **edits}

    def _check_policy(
        self, environment: DiscoveredEnvironment, policy: Policy, profile: str, edits: Mapping[str, Any]
    ) -> None:
        """Check the policy as a whole against the environment, so that no rule of it is passed over.

        Raises:
            HermesRLError: it names what there is not, or leaves a default outside its bounds.
        """
        own_fields: list[CatalogueField] | None = None
        if policy.own_fields:
            policy.check_environments(found.name for found in self._discover_all())
        if environment.name in policy.own_fields:
            own_fields = self.own_fields(environment)
        fields_in_force(profile, policy, environment=environment.name, own_fields=own_fields, edits=edits)

    def _build(
        self, environment: DiscoveredEnvironment, policy: Policy, edits: Mapping[str, Any]
    ) -> RunConfig:
        self._check_policy(environment, policy, self.profile(policy), edits)
        overrides = self._overrides(environment, policy, edits)
        seed = overrides.pop("seed", 0)
        return build_run_config(
            environment,
            profile=self.profile(policy),
            overrides=overrides,
            seed=seed,
            own_fields=lambda: self.own_fields(environment),
        )


def default_of(found: Sequence[DiscoveredEnvironment], policy: Policy) -> DiscoveredEnvironment | None:
    """The environment that is selected when nobody selects one: the operator's, else ours or the first.

    Raises:
        UnknownEnvironmentError: the operator's choice cannot be used.
    """
    if policy.environment is not None:
        return _named(policy.environment, found)
    usable = [environment for environment in found if not environment.error]
    for environment in usable:
        if environment.name == DEFAULT_ENVIRONMENT:
            return environment
    return usable[0] if usable else None


def _named(name: str, found: Sequence[DiscoveredEnvironment]) -> DiscoveredEnvironment:
    usable = [environment.name for environment in found if not environment.error]
    for environment in found:
        if environment.name == name and not environment.error:
            return environment
    broken = next((environment for environment in found if environment.name == name), None)
    raise UnknownEnvironmentError(
        f"The environment {name} cannot be used: {broken.error}"
        if broken
        else f"There is no environment called {name[:80]!r}.",
        allowed=usable,
        hint="Select one of these with rl_select_environment; without a selection the default one is used.",
    )
