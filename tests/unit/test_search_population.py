"""Population-based training: who copies whom, and what a copy changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hermes_rl.errors import SearchError
from hermes_rl.search.definition import define_search
from hermes_rl.search.population import Population, lineage, perturb, schedule, segment_ends
from hermes_rl.search.ranking import tuned
from hermes_rl.search.space import Choice, Int, LogUniform
from hermes_rl.search.trial import TrialRecord

SPACE: dict[str, Any] = {
    "learning_rate": "log:1e-5..2e-4",
    "loss_fn": ["importance_sampling", "ppo", "cispo"],
}
DEFAULT = {"learning_rate": 4e-5, "loss_fn": "importance_sampling"}


def population(members: int = 8, segments: int = 3) -> Population:
    definition = define_search({"space": SPACE, "strategy": "pbt", "trials": members, "segments": segments})
    return Population(definition, definition.build_space(), 30, DEFAULT, lambda _: None)


def train(chooser: Population, value: Any) -> list[TrialRecord]:
    """Every segment, as ``value(record)`` says it went; None is a failure."""
    records: list[TrialRecord] = []
    while (proposal := chooser.next(records)) is not None:
        parent = None if proposal.parent is None else records[proposal.parent]
        record = TrialRecord(
            trial=len(records),
            stage=proposal.stage,
            params=proposal.params,
            seed=0,
            member=proposal.member,
            segment=proposal.segment,
            parent=proposal.parent,
            from_step=0 if parent is None else parent.step,
            step=proposal.until or 30,
        )
        result = value(record)
        record.state = "failed" if result is None else "completed"
        record.values = None if result is None else [result]
        records.append(record)
    return records


def test_the_worst_quarter_copies_the_best_quarter_and_the_others_go_on() -> None:
    records = train(population(), lambda r: float(r.member or 0) / 10)
    assert records[0].stage == "default"
    assert records[1].params == DEFAULT  # the first member begins with the default
    parts = {(r.segment, r.member): r for r in records if r.stage == "segment"}
    assert len(parts) == 24
    for (segment, member), part in parts.items():
        if not segment:
            continue
        parent = records[part.parent or 0]
        assert parent.segment == segment - 1
        assert part.from_step == parent.step == 10 * segment
        if (member or 0) >= 2:
            assert parent.member == member
            assert part.params == parent.params
        else:
            assert parent.member in (6, 7)


def test_the_choice_depends_on_the_results_and_not_on_who_was_first() -> None:
    """What an interrupted population chooses anew is what it had chosen."""
    records = train(population(), lambda r: float(r.member or 0) / 10)
    chooser = population()
    for at in range(len(records)):
        proposal = chooser.next(records[:at])
        if proposal is not None:
            assert (proposal.params, proposal.parent) == (records[at].params, records[at].parent)


def test_members_wait_until_everybody_has_finished_the_segment() -> None:
    records = train(population(members=2), lambda r: 0.5)[:3]
    records[2] = records[2].model_copy(update={"state": "running", "values": None})
    assert population(members=2).next(records) is None


def test_a_member_that_failed_goes_on_as_a_copy_of_a_good_one() -> None:
    records = train(population(), lambda r: None if (r.segment, r.member) == (0, 5) else 0.5)
    again = next(r for r in records if (r.segment, r.member) == (1, 5))
    assert records[again.parent or 0].state == "completed"


def test_a_population_of_failures_ends() -> None:
    with pytest.raises(SearchError, match="No member"):
        train(population(), lambda r: None)


def test_the_schedule_follows_the_weights() -> None:
    records = train(population(), lambda r: float(r.member or 0) / 10)
    last = records[-8]  # member 0 is a copy each time
    line = lineage(last, records)
    assert [part.segment for part in line] == [0, 1, 2]
    assert line[1].member in (6, 7)
    rows = schedule(last, records)
    assert [(row["from_step"], row["to_step"]) for row in rows] == [(0, 10), (10, 20), (20, 30)]
    assert [row["learning_rate"] for row in rows] == [part.params["learning_rate"] for part in line]


def test_a_ranking_holds_each_member_once() -> None:
    records = train(population(), lambda r: 0.5)
    assert (
        sorted((r.stage, r.segment or 0) for r in tuned(records)) == [("default", 0)] + [("segment", 2)] * 8
    )


def test_a_change_is_small_and_stays_in_the_space() -> None:
    rng = random.Random(0)
    rate = LogUniform("learning_rate", 1e-5, 2e-4)
    assert {round(perturb(rate, 1e-4, rng), 9) for _ in range(50)} == {8e-5, 1.2e-4}
    assert all(perturb(rate, 2e-4, rng) <= 2e-4 for _ in range(50))
    choice = Choice("loss_fn", ("a", "b", "c"))
    assert {perturb(choice, "b", rng) for _ in range(50)} == {"a", "c"}
    whole = Int("max_batches_offpolicy", 1, 4)
    assert {perturb(whole, 1, rng) for _ in range(50)} == {1, 2}
    assert {perturb(Int("x", 4, 30, step=4), 12, rng) for _ in range(50)} <= {8, 12, 16}


def test_segments_are_as_equal_as_whole_steps_allow() -> None:
    assert segment_ends(50, 5) == [10, 20, 30, 40, 50]
    assert segment_ends(10, 3) == [3, 7, 10]
    assert segment_ends(2, 5)[-1] == 2
