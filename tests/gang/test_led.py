"""A gang of two whose rank 0 is this process and leads the other. No Spark."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from forked import forkserver
from pyspark import cloudpickle

from sparkdl.errors import SessionError, StalledError, StateLostError, TrainingError
from sparkdl.gang import channel, led
from sparkdl.gang.channel import Listener, connect
from sparkdl.gang.led import LedGang
from sparkdl.gang.rank_task import Introduction, RankContext, Rendezvous

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
CPU = torch.device("cpu")


def attend(meeting: Rendezvous) -> None:
    """The life of rank 1."""
    hello = Introduction(1, meeting.job, 0, 2, "there")
    driver = connect(meeting.host, meeting.port, meeting.key, hello)
    meeting.attend(driver, functools.partial(RankContext, 1, 2, "127.0.0.1", CPU, []))


def attend_late(meeting: Rendezvous) -> None:
    """The life of a rank 1 that pauses after its first read of what the driver sends."""
    read = channel._exactly

    def late(nbytes: int, connection: socket.socket) -> bytearray:
        content = read(nbytes, connection)
        time.sleep(1.0)
        return content

    channel._exactly = late
    attend(meeting)


@contextlib.contextmanager
def leading(
    timeout: float = 60.0, life: Callable[[Rendezvous], None] | None = attend
) -> Iterator[LedGang]:
    """``life`` is rank 1's, in a process of its own: a rank whose driver hangs up interrupts it."""
    start = forkserver()
    listener = Listener("127.0.0.1")
    meeting = Rendezvous("127.0.0.1", listener.port, listener.key, "cpu", False, led.JOB)
    process = start.Process(target=life, args=(meeting,))
    if life:
        process.start()
    with contextlib.ExitStack() as at_end:
        own = RankContext(0, 2, "127.0.0.1", CPU, [], at_end)
        gang = LedGang(listener, own, timeout)
        with contextlib.closing(gang):
            yield gang
    if life:
        process.join(20)
        process.kill()


def total(member: RankContext) -> tuple[int, float]:
    tensor = torch.tensor([member.rank + 1.0])
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def named(name: str, member: RankContext) -> tuple[int, str]:
    return member.rank, name


def test_rank_0_takes_part_in_this_process() -> None:
    with leading() as gang:
        gang.start()
        (own, first), (other, second) = gang.call(total, "summing")
        assert own == os.getpid() != other
        assert first == second == 3.0
        gang.leave()  # the ranks stay when their work is given up
        assert not gang.running
        gang.start()
        assert gang.call(total, "summing") == [(own, 3.0), (other, 3.0)]
        commands = [functools.partial(named, name) for name in ("first", "second")]
        assert gang.call_each(commands, "naming") == [(0, "first"), (1, "second")]
        with socket.create_server(("127.0.0.1", 0)) as door:
            closed = door.getsockname()
        knock = functools.partial(led._knock, [closed, ("127.0.0.1", gang._listener.port)])
        assert gang.call(knock, "knocking") == [[0], [0]]


@pytest.mark.parametrize(
    ("connects", "error", "text"),
    [
        (False, SessionError, "^rank 1 could not reach"),
        (True, StateLostError, "heard nothing from rank 1, though somebody connected"),
    ],
)
def test_who_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, connects: bool, error: type[Exception], text: str
) -> None:
    monkeypatch.setattr(led, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(channel, "HELLO_SECONDS", 0.6)
    with leading(life=None) as gang, contextlib.ExitStack() as block:
        if connects:
            address = "127.0.0.1", gang._listener.port
            block.enter_context(socket.create_connection(address))
        with pytest.raises(error, match=text):
            gang.start()


def test_who_connects_and_pauses_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a rank may take that cannot connect."""
    monkeypatch.setattr(led, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(led, "form_group", lambda joining, seconds: [])
    with leading(life=attend_late) as gang:
        gang.start()
        assert gang.call(functools.partial(named, "there"), "naming") == [
            (0, "there"),
            (1, "there"),
        ]


def fail(rank: int, member: RankContext) -> None:
    if member.rank == rank:
        raise ValueError("no luck")
    dist.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_fails_is_named(rank: int) -> None:
    with leading() as gang:
        gang.start()
        with pytest.raises(TrainingError, match=f"failing: rank {rank} on .*no luck"):
            gang.call(functools.partial(fail, rank), "failing")
        with pytest.raises(StateLostError, match="cannot start others"):
            gang.start()


def fail_afterwards(member: RankContext) -> int:
    def work() -> None:
        if member.rank == 0:
            raise ValueError("too late")

    member.defer(work)
    return member.rank


def test_what_fails_after_a_result_fails_the_next_command() -> None:
    with leading() as gang:
        gang.start()
        assert gang.call(fail_afterwards, "working") == [0, 1]
        with pytest.raises(TrainingError, match=r"summing: rank 0 on .*too late"):
            gang.call(named_nothing, "summing")


def named_nothing(member: RankContext) -> None:
    pass


def die(member: RankContext) -> None:
    if member.rank == 1:
        os._exit(1)


def test_a_lost_rank_is_named() -> None:
    with leading() as gang:
        gang.start()
        with pytest.raises(StateLostError, match="dying: rank 1 on there went away"):
            gang.call(die, "dying")


def sleep(member: RankContext) -> None:
    if member.rank == 0:
        time.sleep(30)


def test_rank_0_has_the_same_limit_as_the_others() -> None:
    with leading(timeout=5.0) as gang:
        gang.start()
        gang._ranks._timeout = 0.3  # type: ignore[union-attr]
        with pytest.raises(StalledError, match=r"sleeping: waited 0\.3 s for rank 0"):
            gang.call(sleep, "sleeping")
