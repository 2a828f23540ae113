"""Which ranks a gang consists of: those of its own job, the latest of each, and all of them."""

from __future__ import annotations

import socket

import pytest

from sparkdl.errors import TrainingError
from sparkdl.gang.channel import Channel
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks
from sparkdl.gang.rank_task import ERROR, Failure, Introduction

KEY = b"key"


def connected() -> tuple[socket.socket, socket.socket]:
    """The driver's end of a connection, and the rank's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        return listening.accept()[0], there


@pytest.fixture
def come():
    """Makes a rank's arrival: the driver's channel to it, and what it says first."""
    ends = []

    def arrival(
        rank: int, job: int = 1, task: int = 0, ranks: int = 2
    ) -> tuple[Channel, Introduction]:
        here, there = connected()
        ends.append(there)
        return Channel(here, KEY, b"nonce", driver=True), Introduction(
            rank, job, task, ranks, "node"
        )

    yield arrival
    for end in ends:
        end.close()


def is_open(channel: Channel) -> bool:
    return channel.fileno() >= 0


def test_all_come(come):
    arrivals = ArrivedRanks(1, 2)
    arrivals.admit(*come(1))
    assert arrivals.missing == [0]
    arrivals.admit(*come(0))
    assert arrivals.missing == []
    assert not arrivals.too_few


def test_rank_of_an_earlier_job_is_hung_up_on(come):
    arrivals = ArrivedRanks(2, 2)
    late = come(0, job=1, task=99)
    arrivals.admit(*late)
    assert arrivals.missing == [0, 1]
    assert not is_open(late[0])


@pytest.mark.parametrize("later_first", [False, True])
def test_of_a_rank_that_comes_twice_the_later_task_counts(come, later_first):
    arrivals = ArrivedRanks(1, 2)
    first, second = come(0, task=5), come(0, task=7)
    for arrived in [second, first] if later_first else [first, second]:
        arrivals.admit(*arrived)
    assert arrivals.come[0] == second
    assert is_open(second[0])
    assert not is_open(first[0])


def test_a_stage_that_spark_runs_in_part_is_too_few(come):
    arrivals = ArrivedRanks(1, 2)
    arrivals.admit(*come(1, ranks=1))
    assert arrivals.too_few


def test_hanging_up_ends_all(come):
    arrivals = ArrivedRanks(1, 2)
    found = [come(0), come(1)]
    for arrived in found:
        arrivals.admit(*arrived)
    arrivals.disconnect()
    assert not any(is_open(channel) for channel, _ in found)


def test_a_rank_that_ended_with_an_error_is_heard_where_it_cannot_be_told_anything():
    """Its update failed when it had sent its result: what it said of it is there to be read."""
    arrivals, ranks = ArrivedRanks(1, 2), []
    for rank in range(2):
        here, there = connected()
        ranks.append(Channel(there, KEY, b"nonce", driver=False))
        hello = Introduction(rank, 1, 0, 2, "node")
        arrivals.admit(Channel(here, KEY, b"nonce", driver=True), hello)
    team = ConnectedRanks(arrivals, timeout=20.0)
    ranks[0].send((ERROR, Failure("MemoryError", "no room for the state", "its trace", False)))
    ranks[0].close()
    with pytest.raises(
        TrainingError, match=r"rank 0 on node failed\. MemoryError: no room for the"
    ):
        team.call(len, "iteration 2")
