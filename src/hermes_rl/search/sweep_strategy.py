"""A W&B sweep chooses the configurations: each parallel trial is one agent of the sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.search.chooser import Proposal
from hermes_rl.search.definition import SearchDefinition
from hermes_rl.search.sweep_service import Command, SweepService
from hermes_rl.search.trial import TrialRecord

BEAT_SECONDS = 5.0
"""Time between two heartbeats of an agent, as W&B's own agent keeps it."""


@dataclass
class _Agent:
    """One agent of the sweep: its id, the run it was given, and when it beat last."""

    agent_id: str
    run_id: str | None = None
    beat_at: float = float("-inf")


class SweepStrategy:
    """Takes configurations from a sweep, and the word to stop a run.

    The service learns what came of a run from the run's own metrics: its trainer logs to the sweep's run.

    Args:
        definition: the search.
        service: the sweep.
        path: ``ENTITY/PROJECT/ID`` of the sweep.
        default_params: the default configuration's values of the searched fields.
        clock: seconds, for the heartbeats.
    """

    def __init__(
        self,
        definition: SearchDefinition,
        service: SweepService,
        path: str,
        default_params: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._path = path
        self._names = definition.build_space().names
        self._default = dict(default_params)
        self._trials = definition.planned_trials()
        self._clock = clock
        self._agents = [_Agent(service.register()) for _ in range(definition.parallel)]
        self._ended = False
        self._stopped: set[str] = set()

    def adopt(self, records: Sequence[TrialRecord]) -> list[Proposal]:
        """New agents take over the runs that an interruption left; those go on under the same id."""
        left = [r for r in records if r.state in ("running", "stopped") and r.sweep_run]
        for agent, record in zip(self._agents, left, strict=False):
            agent.run_id = record.sweep_run
        return []

    def next(self, records: Sequence[TrialRecord]) -> Proposal | None:
        """The configuration that the service has for an idle agent; the default once the sweep is over."""
        if sum(r.sweep_run is not None for r in records) >= self._trials:
            self._ended = True
        if self._ended:
            # One that the sweep stopped says nothing of where the default would have come.
            known = any(
                r.stage == "default" or (r.is_default and r.state in ("completed", "running", "stopped"))
                for r in records
            )
            return None if known else Proposal(dict(self._default), "default", None)
        for agent in self._agents:
            if agent.run_id is not None:
                continue
            for command in self._beat(agent):
                if command.type == "run":
                    agent.run_id = command.run_id
                    given = command.params or {}
                    params = {name: given[name] for name in self._names if name in given}
                    return Proposal(params, "search", None, run_id=command.run_id, sweep=self._path)
        return None

    def _beat(self, agent: _Agent) -> list[Command]:
        """An agent's heartbeat, when one is due."""
        if self._clock() - agent.beat_at < BEAT_SECONDS:
            return []
        agent.beat_at = self._clock()
        commands = self._service.beat(agent.agent_id, [agent.run_id] if agent.run_id else [])
        for command in commands:
            if command.type == "stop":
                self._stopped.add(command.run_id)
            elif command.type == "exit":
                self._ended = True
        return commands

    def waiting(self) -> bool:
        """Whether the service may still have a configuration."""
        return not self._ended

    def report(self, record: TrialRecord, step: int, value: float) -> bool:
        """The service reads the curve from the run itself."""
        return False

    def stopped(self, record: TrialRecord) -> str | None:
        """Whether W&B wants the run stopped: early termination, or somebody at its page."""
        if record.sweep_run is None:
            return None
        agent = next((a for a in self._agents if a.run_id == record.sweep_run), None)
        if agent is not None:
            self._beat(agent)
        return "stopped by the W&B sweep" if record.sweep_run in self._stopped else None

    def tell(self, record: TrialRecord) -> None:
        """The agent of an ended run is idle again."""
        for agent in self._agents:
            if record.sweep_run is not None and agent.run_id == record.sweep_run:
                agent.run_id, agent.beat_at = None, float("-inf")

    def planned(self) -> int:
        """The sweep's runs, and the default configuration where the sweep does not try it."""
        return self._trials + 1
