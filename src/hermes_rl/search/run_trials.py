"""Trials as runs: each an ordinary run with overrides, tagged with its search."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from hermes_rl import runs
from hermes_rl.config import FIELDS, CatalogueField, RunConfig, Workspace, build_run_config
from hermes_rl.environments.discovery import find
from hermes_rl.environments.inspection import environment_fields
from hermes_rl.errors import ConfigError, TrialRefusedError, UnknownRunError, WorkspaceError
from hermes_rl.runs.run_status import RunStatus
from hermes_rl.search.objective import Curves, read_curves
from hermes_rl.search.runner import Observation, TrialRequest

_LEARNING_ONLY = frozenset(
    {
        "batch_size",
        "max_num_workers",
        "max_batches_offpolicy",
        "inference_weight",
        "steps_per_eval",
        "total_steps",
        "use_wandb",
        "wandb_name",
    }
)
"""Fields of the section ``env`` that change nothing about an evaluation before the first step."""


class RunTrials:
    """Tries configurations as runs of a workspace.

    Args:
        workspace: where the runs live.
        search_id: the search that the runs are tagged with; None while a search is only checked.
        environment: name of the environment.
        profile: model profile.
        overrides: fields set alike in all trials.
        poll_seconds: how often trials are looked at.

    Raises:
        UnknownEnvironmentError: there is no such environment, or its file cannot be used.
    """

    def __init__(
        self,
        workspace: Workspace,
        search_id: str | None,
        environment: str,
        profile: str,
        overrides: Mapping[str, Any],
        *,
        poll_seconds: float = 0.3,
    ) -> None:
        self._workspace = workspace
        self._search_id = search_id
        self._environment = find(workspace.environments_dirs, environment)
        self._profile = profile
        self._overrides = dict(overrides)
        self._poll_seconds = poll_seconds
        self._curves: dict[str, tuple[Any, Curves]] = {}
        self._own: list[CatalogueField] | None = None
        self._baselines: dict[str, str] = {}

    def _own_fields(self) -> list[CatalogueField]:
        if self._own is None:
            self._own = list(environment_fields(self._workspace, self._environment))
        return self._own

    def _config(self, params: Mapping[str, Any], seed: int, run_id: str | None = None) -> RunConfig:
        return build_run_config(
            self._environment,
            profile=self._profile,
            overrides={**self._overrides, **params},
            seed=seed,
            run_id=run_id,
            own_fields=self._own_fields,
        )

    def defaults(self, names: Iterable[str]) -> dict[str, Any]:
        """The default configuration's values of these fields, the overrides included."""
        config = self._config({}, 0)
        values: dict[str, Any] = {}
        for name in names:
            value = config.value(name)
            if value is None and name not in FIELDS:
                value = next((field.default for field in self._own_fields() if field.key == name), None)
            values[name] = value
        return values

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise ConfigError when a configuration is not allowed; start nothing."""
        self._config(params, 0)

    def start(self, request: TrialRequest) -> str:
        """Start a run; returns its id.

        Raises:
            TrialRefusedError: a value is not allowed, or the run to begin from is gone.
            HermesRLError: no run can be started now: a key is missing, the workspace cannot be written.
        """
        fields = dict(request.params)
        if request.until is not None:  # a part of a trial is evaluated at its end
            fields |= {"total_steps": request.until, "steps_per_eval": 0}
        if request.sweep is not None:
            fields["wandb_sweep"] = request.sweep
        try:
            config = self._config(fields, request.seed, request.run_id)
        except ConfigError as error:
            raise TrialRefusedError(error.message, allowed=error.allowed, hint=error.hint) from error
        if request.evaluation_steps is not None:
            config.run.evaluation_steps = list(request.evaluation_steps)
        if request.from_run is None:
            untrained = _untrained(config)
            config.run.baseline_run = self._baselines.get(untrained)
        else:
            self._check_beginning(request.from_run)
            untrained = None
        taken = request.run_id is not None and self._workspace.run_dir(request.run_id).exists()
        try:
            run_id = runs.start(
                self._workspace,
                config,
                search_id=self._search_id,
                trial=request.trial,
                overrides={**self._overrides, **request.params},
                from_checkpoint=request.from_run,
            )
        except WorkspaceError as error:
            if taken:
                raise TrialRefusedError(
                    f"There is a run {request.run_id} already, which cannot go on."
                ) from error
            raise
        except OSError as error:
            raise WorkspaceError(
                f"The files of run {config.run.run_id} cannot be written: {error.strerror or error}."
            ) from error
        if untrained is not None:
            self._baselines.setdefault(untrained, run_id)
        return run_id

    def _check_beginning(self, run_id: str) -> None:
        """Refuse the one trial whose weights are gone."""
        try:
            gone = not runs.results(self._workspace, run_id)["checkpoints"]
        except UnknownRunError:
            gone = True
        if gone:
            raise TrialRefusedError(f"Run {run_id}, which it begins with, has no checkpoint any more.")

    def resume(self, request: TrialRequest, run_id: str) -> str:
        """Go on with a run from its last checkpoint; one that cannot be resumed is run anew.

        Raises:
            TrialRefusedError, HermesRLError: as :meth:`start` does.
        """
        try:
            return runs.resume(self._workspace, run_id)
        except (ConfigError, UnknownRunError):
            return self.start(request)

    def find(self, trial: int) -> str | None:
        """The id of the run that was started for a trial of this search; None when there is none."""
        started = [
            run.run_id for run in runs.list_runs(self._workspace, self._search_id) if run.trial == trial
        ]
        return started[-1] if started else None

    def observe(self, run_id: str) -> Observation:
        """A run as it stands; one that is gone counts as stopped."""
        try:
            status = runs.glance(self._workspace, run_id)
        except UnknownRunError:
            return Observation("stopped", 0, None, 0.0, reason="the run is gone")
        curves = self._read(run_id, status)
        begun, ended = status.started_at or status.created_at, status.ended_at or datetime.now(UTC)
        return Observation(
            state=status.status if status.is_final else "running",  # type: ignore[arg-type]
            step=status.step,
            total_steps=status.total_steps,
            seconds=max(0.0, (ended - begun).total_seconds()),
            curves=curves,
            reason=status.reason,
        )

    def _read(self, run_id: str, status: RunStatus) -> Curves:
        """The run's curves, read again only when there is something new."""
        mark = (status.step, status.eval_percent_correct, status.is_final)
        known = self._curves.get(run_id)
        if known is None or known[0] != mark or status.is_final:
            known = (mark, read_curves(runs.read_metrics(self._workspace, run_id)))
            self._curves[run_id] = known
        if status.is_final:
            del self._curves[run_id]
        return known[1]

    def stop(self, run_ids: Iterable[str]) -> None:
        """Stop runs side by side and wait until nothing of them is left."""
        stopping = list(run_ids)
        for run_id in stopping:
            runs.stop(self._workspace, run_id, wait=False)
        for run_id in stopping:
            runs.stop(self._workspace, run_id, wait=True)

    def wait(self) -> None:
        """Let a little time pass before looking again."""
        time.sleep(self._poll_seconds)

    def now(self) -> float:
        """UNIX time."""
        return time.time()


def _untrained(config: RunConfig) -> str:
    """What decides an evaluation before the first step, when a fresh adapter of any rank changes nothing."""
    env = {
        name: value
        for name, value in config.env.model_dump(mode="json").items()
        if name not in _LEARNING_ONLY
    }
    openai = [server.model_dump(mode="json") for server in config.openai]
    model = (config.tinker.base_model, config.tinker.base_url)
    return json.dumps([config.run.environment_file, config.run.seed, env, openai, model], sort_keys=True)
