"""Which executor computes which partition."""

from __future__ import annotations

import pytest

from sparkdl.spark.executors import Executor, shared_out


def names(executors: list[Executor], partitions: int) -> str:
    return "".join(executor.name for executor in shared_out(executors, partitions))


TWO = [Executor("h", "b", 2), Executor("h", "a", 2)]


@pytest.mark.parametrize(
    ("partitions", "expected"), [(1, "a"), (2, "ab"), (3, "aab"), (4, "aabb"), (5, "")]
)
def test_side_by_side_on_as_many_executors_as_there_are(partitions, expected):
    assert names(TWO, partitions) == expected


def test_by_their_slots_and_hosts_together():
    uneven = [Executor("x", "c", 1), Executor("y", "a", 1), Executor("x", "b", 4)]
    assert names(uneven, 6) == "bbbbca"
    assert names(uneven, 3) == "bbc"


def test_a_host_that_cannot_be_named_gets_no_wish():
    """Spark takes apart executor_HOST_ID; but such an executor is one of those that are cleaned."""
    assert shared_out([Executor("h_1", "a", 1), Executor("h", "b", 1)], 2) == []
    assert Executor("h_1", "a", 1).place is None
    assert Executor("h", "b", 1).place == "executor_h_b"


def test_one_executor_needs_no_wish():
    assert shared_out([Executor("h", "a", 8)], 4) == []
    assert shared_out([], 1) == []
