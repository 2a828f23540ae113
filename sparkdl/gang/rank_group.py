"""Ranks that have connected, and commands for all of them at once."""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pyspark import cloudpickle

from sparkdl.errors import StalledError, StateLostError, TrainingError
from sparkdl.gang.channel import OUTPUT, RESULT, Channel, ChannelError
from sparkdl.gang.rank_task import ERROR, Command, Failure, Introduction
from sparkdl.process.system import print_escaped
from sparkdl.spark.failures import deleted, limit_hint

LOST = "lost"
"""The kind that stands for a message if the rank is gone."""
DAY_SECONDS = 86400.0
"""The longest single wait. Longer waits are repeated, because a system call accepts at most 24 days."""
GRACE_SECONDS = 2.0
"""The time that the other ranks have to report their failures after the first one."""


class RankGroup(ABC):
    """Ranks that run commands, each command on all of them at once."""

    size: int

    @abstractmethod
    def send_pickled(self, contents: Sequence[list[bytes]]) -> None:
        """Send some pickled commands to each rank, in rank order."""

    def send_each(self, commands: Iterable[Command]) -> None:
        """Send one command to each rank, in rank order. :meth:`answers` returns the results."""
        self.send_pickled([[cloudpickle.dumps(command)] for command in commands])

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, which every rank runs in order, after earlier ones.

        Each call of :meth:`answers` returns the results of one command.
        """
        self.send_pickled([[cloudpickle.dumps(command) for command in commands]] * self.size)

    @abstractmethod
    def answers(self, doing: str) -> tuple[list[Any], float]:
        """Wait for the results, in rank order, of the oldest command whose results are still due.

        The second value is the time at which the last one was ready (``time.monotonic``). Raise
        StateLostError if a rank is lost or finds slabs deleted, StalledError if one takes too long,
        else a TrainingError with the traceback of the first rank that fails.
        """

    def call(self, command: Command, doing: str = "a command") -> list[Any]:
        """Call ``command(member)`` on each rank at once, and return the results in rank order.

        Raises what :meth:`answers` raises.
        """
        self.send([command])
        return self.answers(doing)[0]

    def call_each(self, commands: Iterable[Command], doing: str) -> list[Any]:
        """Run one command for each rank and return the results. See :meth:`call`."""
        self.send_each(commands)
        return self.answers(doing)[0]


class StartableGroup(RankGroup):
    """Ranks that are started when they are needed."""

    tasks: int  # the number of tasks that they are
    ahead: bool  # commands may be sent before earlier results are there
    _ranks: RankGroup | None
    """The ranks, once they have been started."""

    def send_pickled(self, contents: Sequence[list[bytes]]) -> None:
        assert self._ranks is not None
        self._ranks.send_pickled(contents)

    @property
    @abstractmethod
    def running(self) -> bool:
        """Return whether the ranks have been started, and nobody has left them since."""

    @abstractmethod
    def start(self) -> None:
        """Start the ranks, or start them again if some were lost."""

    @abstractmethod
    def leave(self) -> None:
        """Give up what the ranks have done. The next :meth:`start` begins anew."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks."""


class ConnectedRanks(RankGroup):
    """All ranks of a gang, once connected. After an error their connections are closed."""

    def __init__(self, arrivals: ArrivedRanks, timeout: float | None, noun: str = "rank") -> None:
        self.size, self._timeout, self._noun = len(arrivals.come), timeout, noun
        come = sorted(arrivals.come.items())
        self._channels: dict[int, Channel] = {rank: channel for rank, (channel, _) in come}
        self._hosts = {rank: hello.host for rank, (_, hello) in come}
        self._told: dict[int, deque[tuple[bytes, float]]] = {rank: deque() for rank, _ in come}
        for channel in self._channels.values():
            if timeout is not None:
                channel.bound_sends(timeout)

    def answers(self, doing: str) -> tuple[list[Any], float]:
        self._await(doing)
        contents, ended = zip(*(told.popleft() for told in self._told.values()), strict=True)
        return [cloudpickle.loads(content) for content in contents], max(ended)

    def send_pickled(self, contents: Sequence[list[bytes]]) -> None:
        for rank, channel in self._channels.items():
            with contextlib.suppress(ChannelError):  # the rank is gone; it may have sent the reason
                channel.send(contents[rank])

    def close(self) -> None:
        """Close the connections, which ends the ranks."""
        for channel in self._channels.values():
            channel.close()

    def _await(self, doing: str, failed: Mapping[int, Failure] = MappingProxyType({})) -> None:
        """Wait for the next result of every rank. ``failed`` has failures that are known already."""
        failures = dict(failed)
        lost: list[int] = []
        deadline = time.monotonic() + (self._timeout or math.inf)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                if not self._told[rank]:
                    selector.register(channel, selectors.EVENT_READ, rank)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:  # also where a rank prints without a pause
                    break
                for key, _ in selector.select(min(left, DAY_SECONDS)):
                    rank = key.data
                    try:
                        kind, content = self._channels[rank].receive(left)
                    except ChannelError:
                        kind = LOST
                    if kind == OUTPUT:
                        self._print(rank, content)
                        continue
                    selector.unregister(key.fileobj)
                    if kind == RESULT:
                        now = time.monotonic()
                        self._told[rank].extend((result, now - age) for result, age in content)
                        continue
                    if kind == ERROR:
                        failures[rank] = content
                    else:
                        lost.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed or not all(self._told.values()):
            answered = [rank for rank, told in self._told.items() if told]
            self._fail(doing, failures, lost, answered)

    def _fail(
        self,
        doing: str,
        failures: dict[int, Failure],
        lost: Sequence[int],
        answered: Sequence[int] = (),
    ) -> None:
        """Close the connections and raise the reason.

        It is a rank's own error or, if there is none, a lost rank, or else a late one.
        """
        hosts, noun = self._hosts, self._noun
        self.close()
        own = [(rank, failure) for rank, failure in failures.items() if not failure.by_group]
        if own:
            rank, failure = own[0]
            reason = f"{failure.kind}: {failure.text.partition(chr(10))[0]}"
            raise (StateLostError if deleted(reason) else TrainingError)(
                f"{doing}: {noun} {rank} on {hosts[rank]} failed. {reason}{limit_hint(reason)}\n"
                f"{failure.trace}"
            )
        if lost:
            names = ", ".join(f"{rank} on {hosts[rank]}" for rank in sorted(lost))
            raise StateLostError(
                f"{doing}: {noun}{'s' * (len(lost) > 1)} {names} went away (the process died or was "
                "killed, or its node is out of reach)."
            )
        if failures:
            rank, failure = next(iter(failures.items()))
            lost_group = StateLostError(
                f"{doing}: the connection between the ranks broke. Rank {rank} on {hosts[rank]} says: "
                f"{failure.text.partition(chr(10))[0]}"
            )
            lost_group.add_note(failure.trace)
            raise lost_group
        raise self._late(doing, [rank for rank in self._told if rank not in answered])

    def _late(self, doing: str, ranks: Sequence[int]) -> StalledError:
        names = ", ".join(f"{self._noun} {rank} on {self._hosts[rank]}" for rank in ranks)
        return StalledError(
            f"{doing}: waited {self._timeout:g} s for {names}. Where it takes so long "
            "by right, raise the timeout (of a fit: spark.sparkdl.timeout.seconds)."
        )

    def _print(self, rank: int, text: str) -> None:
        for line in text.split("\n"):
            print_escaped(f"[rank {rank}] {line}")


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks for a message."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class ArrivedRanks:
    """The ranks of job number ``job`` that have connected so far; ``first`` is the first to come."""

    def __init__(self, job: int, size: int, first: int = 0) -> None:
        self._job, self._size, self._first = job, size, first
        self.come: dict[int, tuple[Channel, Introduction]] = {}

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._first, self._size) if rank not in self.come]

    @property
    def too_few(self) -> bool:
        """Return whether the stage runs fewer ranks than the gang has."""
        return any(hello.ranks != self._size for _, hello in self.come.values())

    def admit(self, channel: Channel, hello: Introduction) -> None:
        """Add a rank. If it has connected before, the later attempt counts."""
        known = self.come.get(hello.rank)
        if hello.job != self._job or (known and known[1].task > hello.task):
            channel.close()
            return
        if known:
            known[0].close()
        self.come[hello.rank] = channel, hello

    def disconnect(self) -> None:
        for channel, _ in self.come.values():
            channel.close()
