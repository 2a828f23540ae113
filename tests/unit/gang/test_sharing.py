"""How many replicas there are where nobody says it, which task hosts which ranks, and on which GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import SessionError
from sparkdl.gang import slots
from sparkdl.gang.oversubscribe import TaskLocation, assign_ranks, gpus_shared_out

NODES = st.text("abc", max_size=12).map(list)


@pytest.mark.parametrize(
    ("ranks", "tasks", "expected"),
    [
        ("aaaa", "aa", [[0, 1], [2, 3]]),
        ("aaaaa", "aa", [[0, 1, 2], [3, 4]]),
        ("abab", "ba", [[1, 3], [0, 2]]),
        ("aaab", "aab", [[0, 1], [2], [3]]),
        ("a", "aaa", [[0], [], []]),
        ("aacc", "ab", [[0, 1], [2, 3]]),  # c is no task's
        ("aaa ", "ab", [[0, 1, 2], [3]]),  # a rank without samples
    ],
)
def test_each_rank_where_its_samples_are(ranks, tasks, expected):
    assert assign_ranks(ranks, tasks) == expected


@given(NODES, NODES.filter(bool))
def test_every_rank_once_and_evenly(ranks, tasks):
    shares = assign_ranks(ranks, tasks)
    assert sorted(rank for share in shares for rank in share) == list(range(len(ranks)))
    known = [rank for rank, node in enumerate(ranks) if node in tasks]
    for task, share in zip(tasks, shares, strict=True):
        assert all(ranks[rank] == task for rank in share if rank in known)
    for node in set(tasks):
        sizes = [
            sum(rank in known for rank in share)
            for task, share in zip(tasks, shares, strict=True)
            if task == node
        ]
        assert max(sizes) - min(sizes) <= 1


def test_without_gpus_ranks_are_on_the_cpu():
    assert gpus_shared_out([TaskLocation("a", "h"), TaskLocation("b", "h")], [[0, 1], [2]]) == {
        0: None,
        1: None,
        2: None,
    }


def test_of_its_own_gpus_a_task_gives_one_to_each_rank():
    places = [TaskLocation("a", "h", (4, 6), True), TaskLocation("a", "h", (1, 2), True)]
    assert gpus_shared_out(places, [[0, 1], [2]]) == {0: 4, 1: 6, 2: 1}


def test_gpus_that_nobody_assigned_are_shared_out_by_node():
    places = [
        TaskLocation("a", "h", (0, 1, 2)),
        TaskLocation("b", "k", (0,)),
        TaskLocation("a", "h", (0, 1, 2)),
    ]
    assert gpus_shared_out(places, [[0, 1], [2], [3]]) == {0: 0, 1: 1, 2: 0, 3: 2}


@pytest.mark.parametrize(
    "places",
    [
        [TaskLocation("a", "h", (5,), True), TaskLocation("a", "h", (6,), True)],
        [TaskLocation("a", "h", (0, 1)), TaskLocation("a", "h", (0, 1))],
    ],
)
def test_two_ranks_on_one_gpu_are_an_error(places):
    with pytest.raises(SessionError, match="2 task slots are too few for 3 ranks on GPUs: on h "):
        gpus_shared_out(places, [[0, 1], [2]])


@pytest.mark.parametrize(
    ("settings", "replicas", "told"),
    [
        ({}, 4, []),
        ({"default.parallelism": "2"}, 2, []),
        ({"default.parallelism": "2000"}, 4, ["parallelism=2000 is for queries"]),
        ({"dynamicAllocation.enabled": "true"}, 4, ["with 4 replicas, as many as tasks run at"]),
        ({"dynamicAllocation.enabled": "true", "default.parallelism": "2"}, 2, ["with 2 replicas"]),
    ],
)
def test_as_many_as_tasks_run_at_once(
    settings: dict[str, str], replicas: int, told: list[str], monkeypatch: Any, caplog: Any
) -> None:
    conf = {f"spark.{key}": value for key, value in settings.items()}
    monkeypatch.setattr(slots, "task_slots", lambda context, seconds: 4)
    assert slots.default_replicas(SimpleNamespace(_conf=conf)) == replicas  # type: ignore[arg-type]
    assert len(caplog.messages) == len(told)
    assert all(text in message for text, message in zip(told, caplog.messages, strict=True))
