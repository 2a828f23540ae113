"""A rank, in a process of its own, and what its driver is told. No Spark."""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forkserver
from pyspark import cloudpickle

from sparkdl.errors import StateLostError, TrainingError
from sparkdl.gang import channel
from sparkdl.gang.channel import Listener
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks
from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
HELLO = Introduction(0, 1, 0, 1, "here")
END_SECONDS = 1.5
"""Shorter than in use, and longer than what a test waits for outside of Python."""


def attend(meeting: Rendezvous, afterwards: float) -> None:
    """The life of a rank, whose process then has other work."""
    channel.END_SECONDS = END_SECONDS
    meeting.serve(HELLO, functools.partial(RankContext, 0, 1, "127.0.0.1", torch.device("cpu"), []))
    time.sleep(afterwards)


Begin = Callable[..., tuple[ConnectedRanks, Any]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """A team of one, and the rank's process."""
    start = forkserver()
    listener, begun = Listener("127.0.0.1"), []

    def make(output: bool = False, afterwards: float = 0.0, timeout: float = 60.0) -> Any:
        meeting = Rendezvous("127.0.0.1", listener.port, listener.key, "cpu", output, HELLO.job)
        process = start.Process(target=attend, args=(meeting, afterwards))
        process.start()
        arrivals = ArrivedRanks(HELLO.job, 1)
        found = listener.accept(60)
        assert found is not None
        arrivals.admit(*found)
        begun.append((ConnectedRanks(arrivals, timeout), process))
        return begun[-1]

    yield make
    for team, process in begun:
        team.close()
        process.join(20)
        process.kill()
    listener.close()


def with_a_child(member: RankContext) -> int:
    child = os.fork()
    if not child:
        print("of the child")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("of the rank")
    print("the end", end="")
    return status


def test_what_is_printed_arrives_but_not_from_forked_processes(begin, capsys):
    """Such as those of a DataLoader: there is one who speaks at each end."""
    team, _ = begin(output=True)
    assert team.call(with_a_child, "speaking") == [0]
    assert team.call(len_of_name, "asking") == [4]
    assert capsys.readouterr().out == "[rank 0] of the rank\n[rank 0] the end\n"


def len_of_name(member: RankContext) -> int:
    return len("name")


class Untold(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


def leave(member: RankContext) -> None:
    sys.exit(3)


def interrupt(member: RankContext) -> None:
    raise KeyboardInterrupt


def fail_untold(member: RankContext) -> None:
    raise Untold


def need_nccl(member: RankContext) -> None:
    raise RuntimeError("Distributed package doesn't have NCCL built in")


MISTAKES = {
    leave: "SystemExit: sys.exit(3) ends a rank without a result: return instead.",
    interrupt: "KeyboardInterrupt: ",
    fail_untold: "Untold: (it has no text: its __str__ fails)",
    need_nccl: "RuntimeError: Distributed package doesn't have NCCL built in",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_told_and_not_taken_for_a_lost_rank(begin, mistake):
    """Which a fit would begin anew."""
    team, _ = begin()
    with pytest.raises(TrainingError) as caught:
        team.call(mistake, "trying")
    assert not isinstance(caught.value, StateLostError)
    first, *trace = str(caught.value).splitlines()
    assert first == f"trying: rank 0 on here failed. {MISTAKES[mistake]}"
    assert any(f"in {mistake.__name__}" in line for line in trace)


def mistaken_with_work_left(folder: str, member: RankContext) -> None:
    def wait() -> None:
        until = time.monotonic() + 60
        while not Path(folder, "told").exists() and time.monotonic() < until:
            time.sleep(0.01)

    member.at_end.callback(wait)
    raise ValueError("its own")


def test_a_mistake_is_told_before_what_is_to_happen_at_the_end(begin, tmp_path):
    """To leave a process group may take long, where another rank is awaited."""
    team, process = begin(timeout=20.0)
    with pytest.raises(TrainingError, match="ValueError: its own"):
        team.call(functools.partial(mistaken_with_work_left, str(tmp_path)), "trying")
    assert process.is_alive()
    (tmp_path / "told").touch()
    process.join(20)
    assert process.exitcode == 0


def wait_outside_python(member: RankContext) -> None:
    dist.HashStore().wait(["never"], datetime.timedelta(seconds=1))


def test_an_interrupt_that_comes_late_ends_nothing_else(begin):
    """The driver hangs up while the rank waits; its process goes on to another task."""
    team, process = begin(afterwards=END_SECONDS + 1.0)
    team.send([wait_outside_python])
    time.sleep(0.3)
    team.close()
    process.join(60)
    assert process.exitcode == 0


class Unreadable:
    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


def test_a_message_that_cannot_be_read_is_told(begin):
    """It does not fit into the memory, say; and the rank ends with the driver."""
    team, process = begin()
    (channel,) = team._channels.values()
    channel.send(Unreadable())
    with pytest.raises(TrainingError, match="ZeroDivisionError"):
        team.answers("reading")
    process.join(20)
    assert process.exitcode == 0


def test_a_timeout_may_be_longer_than_the_system_waits(begin):
    team, _ = begin(timeout=1e9)
    assert team.call(len_of_name, "asking") == [4]
