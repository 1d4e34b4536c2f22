"""How a search's agents speak with the service of a W&B sweep."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hermes_rl.errors import SearchError
from hermes_rl.search.definition import define_search
from hermes_rl.search.sweep_service import Command, read_command, split_path
from hermes_rl.search.sweep_strategy import BEAT_SECONDS, SweepStrategy
from hermes_rl.search.trial import TrialRecord

PATH = "somebody/tuning/abc"


class Script:
    """A service that says what it was given to say, one list of commands a heartbeat."""

    def __init__(self, *answers: list[Command]) -> None:
        self.answers = list(answers)
        self.beats: list[tuple[str, list[str]]] = []
        self.agents = 0

    def register(self) -> str:
        self.agents += 1
        return f"agent{self.agents}"

    def beat(self, agent: str, running: Iterable[str]) -> list[Command]:
        self.beats.append((agent, list(running)))
        return self.answers.pop(0) if self.answers else []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def strategy(script: Script, clock: Clock, parallel: int = 1, trials: int = 20) -> SweepStrategy:
    definition = define_search(
        {"space": {"lora_rank": [8, 16]}, "strategy": "wandb", "parallel": parallel, "trials": trials}
    )
    return SweepStrategy(definition, script, PATH, {"lora_rank": 32}, clock)


def record(run_id: str, trial: int = 0) -> TrialRecord:
    return TrialRecord(
        trial=trial,
        stage="search",
        params={"lora_rank": 8},
        seed=0,
        run_id=run_id,
        sweep=PATH,
        sweep_run=run_id,
    )


def test_a_service_without_an_answer_is_asked_again_and_the_search_waits_for_it() -> None:
    script, clock = Script([], [Command("run", "one", {"lora_rank": 8, "total_steps": 4})]), Clock()
    chooser = strategy(script, clock)
    assert chooser.next([]) is None
    assert chooser.waiting()
    assert chooser.next([]) is None
    assert len(script.beats) == 1  # not more often than W&B's own agent
    clock.now += BEAT_SECONDS
    proposal = chooser.next([])
    assert proposal is not None
    assert (proposal.params, proposal.run_id, proposal.sweep) == ({"lora_rank": 8}, "one", PATH)


def test_a_stop_reaches_the_run_that_is_meant_and_its_agent_asks_for_the_next_at_once() -> None:
    script = Script([Command("run", "one", {})], [Command("stop", "one")], [Command("run", "two", {})])
    clock = Clock()
    chooser = strategy(script, clock)
    assert chooser.next([]) is not None
    assert chooser.stopped(record("one")) is None
    clock.now += BEAT_SECONDS
    assert chooser.stopped(record("one")) is not None
    assert script.beats[-1] == ("agent1", ["one"])
    chooser.tell(record("one"))
    proposal = chooser.next([record("one")])
    assert proposal is not None
    assert proposal.run_id == "two"
    assert script.beats[-1] == ("agent1", [])


def test_after_the_sweep_the_default_is_tried_once() -> None:
    script, clock = Script([Command("exit")]), Clock()
    chooser = strategy(script, clock)
    assert chooser.next([]) is None
    assert not chooser.waiting()
    proposal = chooser.next([])
    assert proposal is not None
    assert (proposal.params, proposal.stage, proposal.sweep) == ({"lora_rank": 32}, "default", None)
    default = TrialRecord(trial=0, stage="default", params=proposal.params, seed=0, is_default=True)
    assert chooser.next([default]) is None


def test_no_more_configurations_are_taken_than_were_asked_for() -> None:
    script, clock = Script([Command("run", "one", {})], [Command("run", "two", {})]), Clock()
    chooser = strategy(script, clock, trials=1)
    assert chooser.next([]) is not None
    chooser.tell(record("one"))
    proposal = chooser.next([record("one")])
    assert proposal is not None
    assert proposal.stage == "default"
    assert len(script.beats) == 1


def test_new_agents_take_over_the_runs_of_an_interrupted_search() -> None:
    script, clock = Script(), Clock()
    chooser = strategy(script, clock, parallel=2)
    chooser.adopt([record("one").model_copy(update={"state": "stopped"})])
    assert chooser.next([record("one")]) is None
    assert script.beats == [("agent2", [])]  # the first agent has a run
    chooser.stopped(record("one"))
    assert script.beats[-1] == ("agent1", ["one"])


def test_commands_are_read_as_the_service_writes_them() -> None:
    told = {"type": "run", "run_id": "one", "args": {"lora_rank": {"value": 8}}}
    assert read_command(told) == Command("run", "one", {"lora_rank": 8})
    assert read_command({"type": "exit"}) == Command("exit")
    assert read_command({"type": "something-new"}) is None
    assert split_path(PATH) == ("somebody", "tuning", "abc")
    with pytest.raises(SearchError, match="ENTITY/PROJECT/ID"):
        split_path("abc")


def test_a_default_that_the_sweep_stopped_is_run_to_its_end_outside_it() -> None:
    for state, again in (("completed", False), ("pruned", True), ("failed", True)):
        chooser = strategy(Script([Command("exit")]), Clock())
        tried = record("one").model_copy(update={"is_default": True, "state": state})
        assert chooser.next([tried]) is None  # hears that the sweep is over
        proposal = chooser.next([tried])
        assert (proposal is not None) == again
        if proposal is not None:
            assert (proposal.stage, proposal.params, proposal.sweep) == ("default", {"lora_rank": 32}, None)
            outside = record("", 1).model_copy(
                update={"is_default": True, "state": state, "stage": "default"}
            )
            assert chooser.next([tried, outside]) is None  # once, whatever becomes of it
