"""Commands that are sent before those before have ended, and what is told of them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdl.errors import StalledError, TrainingError
from sparkdl.gang.channel import HOLD_SECONDS, MOST_HELD, Listener
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks
from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous

pytestmark = pytest.mark.gang

RANKS = 2
forked = multiprocessing.get_context("fork")
gates = [forked.Event() for _ in range(RANKS)]


@contextlib.contextmanager
def together(timeout: float = 20.0) -> Iterator[ConnectedRanks]:
    """A team of ranks that are processes of their own."""
    for gate in gates:
        gate.clear()
    listener = Listener("127.0.0.1")
    meeting = Rendezvous("127.0.0.1", listener.port, listener.key, "cpu", job=1)
    device = torch.device("cpu")
    processes = [
        forked.Process(
            target=meeting.serve,
            args=(
                Introduction(rank, 1, rank, RANKS, "node"),
                functools.partial(RankContext, rank, RANKS, "127.0.0.1", device, []),
            ),
            daemon=True,
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    arrivals = ArrivedRanks(1, RANKS)
    while arrivals.missing:
        arrived = listener.accept(5)
        assert arrived is not None
        arrivals.admit(*arrived)
    team = ConnectedRanks(arrivals, timeout)
    try:
        yield team
    finally:
        team.close()
        for process in processes:
            process.join(10)
            assert process.exitcode is not None
        listener.close()


def count(member: RankContext) -> tuple[int, int]:
    member.kept["count"] = member.kept.get("count", 0) + 1
    return member.rank, member.kept["count"]


def nap(member: RankContext) -> None:
    """On rank 1, until all that was sent has come, and rank 0 has told its own."""
    if member.rank == 1:
        time.sleep(1.0)


def wait(which: int, member: RankContext) -> str:
    """For the test, on one rank."""
    if member.rank == which:
        gates[which].wait(20)
    return "waited"


def fail(which: int, member: RankContext) -> None:
    """On one rank; the other waits for it in vain."""
    if member.rank == which:
        raise ValueError("a mistake")
    gates[member.rank].wait(20)


def answers(team: ConnectedRanks) -> list[Any]:
    return team.answers("counting")[0]


def test_results_come_in_the_order_of_commands() -> None:
    many = 2 * MOST_HELD + 1
    with together() as team:
        team.send([count] * many)
        found = [answers(team) for _ in range(3)]
        team.send([count] * 2)
        found += [answers(team) for _ in range(many - 1)]
    assert found == [[(0, n), (1, n)] for n in range(1, many + 3)]


def test_it_is_known_when_a_command_ended_though_it_was_told_later() -> None:
    with together() as team:
        began = time.monotonic()
        team.send([nap, functools.partial(wait, 1)])
        ended = team.answers("a nap")[1]
        told = time.monotonic()
        gates[1].set()
        last = team.answers("waiting")[1]
    assert began < ended < told < last
    assert told - ended > 0.8 * HOLD_SECONDS  # rank 1 held it, as it had another command


def test_a_rank_that_fails_has_told_what_came_before() -> None:
    with together() as team:
        team.send([count, functools.partial(fail, 0)])
        assert answers(team) == [(0, 1), (1, 1)]
        with pytest.raises(TrainingError, match=r"(?s)rank 0 on node failed\. ValueError: a mis"):
            answers(team)


def test_a_rank_that_waits_for_one_that_stands_still_is_not_late_itself() -> None:
    """Its result before is told, though it has begun the next command."""
    with together(timeout=5.0) as team:
        team.send([count, functools.partial(wait, 0)])
        assert answers(team) == [(0, 1), (1, 1)]
        with pytest.raises(StalledError, match=r"waited 5 s for rank 0 on node\."):
            answers(team)


def note(path: str, member: RankContext) -> None:
    """That it has begun, for whoever reads the file."""
    with open(f"{path}/{member.rank}", "a") as file:
        file.write("begun\n")
    time.sleep(2.5)  # what ends no earlier than END_SECONDS would be killed


def test_what_was_sent_is_not_begun_any_more_when_the_driver_hangs_up(tmp_path: Path) -> None:
    """Else each would begin some, until it cannot tell their results."""
    begun = [tmp_path / str(rank) for rank in range(RANKS)]
    with together() as team:
        team.send([count] + [functools.partial(note, str(tmp_path))] * 50)
        answers(team)
        deadline = time.monotonic() + 20
        while not all(path.exists() for path in begun):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        team.close()
    assert all(len(path.read_text().splitlines()) < 3 for path in begun)
