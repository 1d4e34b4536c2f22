"""Batches are filled as Atropos fills them: its own functions, as installed, are the oracle."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.trajectories.packing import combine_to_size, take_batch, take_batch_with_minimums


@dataclass(frozen=True)
class Group:
    size: int
    env_id: int | None
    number: int


def _as_atropos(queue: Sequence[Group]) -> list[dict[str, Any]]:
    return [{"tokens": [[0]] * group.size, "env_id": group.env_id, "number": group.number} for group in queue]


def _numbers(found: tuple[list[Group], list[Group]] | None) -> tuple[list[int], list[int]] | None:
    return None if found is None else ([g.number for g in found[0]], [g.number for g in found[1]])


def _their_numbers(batch: list[Any] | None, rest: list[Any]) -> tuple[list[int], list[int]] | None:
    return None if batch is None else ([g["number"] for g in batch], [g["number"] for g in rest])


sizes = st.one_of(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 20))
queues = st.lists(st.tuples(sizes, st.sampled_from([None, 0, 1, 2])), max_size=40).map(
    lambda rows: [Group(size, env_id, number) for number, (size, env_id) in enumerate(rows)]
)


@settings(max_examples=150, deadline=None)
@given(queue=queues, batch_size=st.sampled_from([1, 2, 8, 16, 32, 37]))
def test_a_batch_is_the_one_that_atropos_would_form(queue: list[Group], batch_size: int) -> None:
    theirs = grab_exact_from_heterogeneous_queue(_as_atropos(queue), batch_size)
    assert _numbers(take_batch(queue, batch_size)) == _their_numbers(*theirs)


@settings(max_examples=150, deadline=None)
@given(
    queue=queues,
    batch_size=st.sampled_from([2, 8, 16, 32, 37]),
    minimums=st.dictionaries(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0]), max_size=3),
)
def test_minimum_allocations_are_those_of_atropos(
    queue: list[Group], batch_size: int, minimums: dict[int, float]
) -> None:
    configs = [
        {"registered_id": env_id, "connected": True, "min_batch_allocation": share}
        for env_id, share in minimums.items()
    ]
    theirs = grab_batch_with_minimum_allocations(_as_atropos(queue), batch_size, configs)
    assert _numbers(take_batch_with_minimums(queue, batch_size, minimums)) == _their_numbers(*theirs)


@settings(max_examples=150, deadline=None)
@given(waiting=st.lists(st.integers(1, 20), max_size=20), target=st.integers(1, 40))
def test_parts_are_combined_as_atropos_combines_them(waiting: list[int], target: int) -> None:
    theirs = find_groups_summing_to_target([{"tokens": [[0]] * size} for size in waiting], target)
    assert combine_to_size(waiting, target) == theirs


@pytest.mark.parametrize("minimums", [{}, {0: 0.5, 1: 0.25}])
def test_a_long_queue_costs_one_pass(minimums: dict[int, float]) -> None:
    reads = 0

    @dataclass(frozen=True)
    class Counted:
        length: int
        env_id: int

        @property
        def size(self) -> int:
            nonlocal reads
            reads += 1
            return self.length

    randomness = random.Random(0)
    queue = [Counted(randomness.choice([1, 2, 4, 8]), randomness.randrange(4)) for _ in range(20_000)]
    assert take_batch_with_minimums(queue, 4096, minimums) is not None
    assert reads < 10 * len(queue)
