"""A rank of a gang: a task that runs the driver's commands."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.gang.channel import (
    Channel,
    ChannelError,
    CommandReceiver,
    ResultSender,
    connect,
    output_sent,
)
from sparkdl.slab.pool import give_back, make_room
from sparkdl.spark.device import gpus_here, use_gpu
from sparkdl.spark.worker import finish_task

ERROR = "error"
"""The kind of a rank's message that says why it failed. A message is a pair (kind, content). For other
kinds see :mod:`sparkdl.gang.channel` and :mod:`sparkdl.gang.channel`."""
_HERE = os.path.dirname(__file__) + os.sep
_OF_GROUPS = ("gloo/", "NCCL error", "NCCL communicator")
"""Words in plain RuntimeErrors that come from a process group."""


@dataclass(frozen=True)
class Introduction:
    """The first message of a rank."""

    rank: int
    job: int
    task: int  # Spark's number, which increases with every task
    ranks: int  # the number of tasks that its stage runs
    host: str


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    kind: str
    text: str
    trace: str
    by_group: bool  # from the process group, which breaks on all ranks if one fails


@dataclass
class RankContext:
    """The argument of every command: the context of a rank."""

    rank: int
    size: int
    address: str  # of its node, as Spark knows it
    device: torch.device
    frames: list[Any]
    at_end: contextlib.ExitStack
    meeting: Rendezvous | None = None  # None: this rank is no task
    kept: dict[str, Any] = field(default_factory=dict)
    deferred: Callable[[], None] | None = None

    def defer(self, work: Callable[[], None]) -> None:
        """Leave ``work`` to be done after the result of the present command has been sent."""
        self.deferred = work

    def do_deferred(self) -> None:
        """Do the work that the command has left, if any."""
        work, self.deferred = self.deferred, None
        if work is not None:
            work()


Command = Callable[[RankContext], Any]


@dataclass(frozen=True)
class Rendezvous:
    """The instructions with which a rank connects to its gang: the body of the stage's tasks."""

    host: str
    port: int
    key: bytes = field(repr=False)
    device: str
    output: bool = False
    job: int = 0

    def __call__(self, partition: int, frames: Iterable[Any]) -> Iterator[bytes]:
        """Run as the body of a barrier stage's task."""
        context, own = BarrierTaskContext.get(), list(frames)
        self.serve(
            self.introduction_of(context), lambda at_end: self.member_of(context, own, at_end)
        )
        give_back()
        finish_task()
        yield from ()  # a generator of nothing

    def introduction_of(self, context: BarrierTaskContext) -> Introduction:
        """Return the first message of the rank that the task of ``context`` is."""
        rank, task, ranks = context.partitionId(), context.taskAttemptId(), context.getTaskInfos()
        return Introduction(rank, self.job, task, len(ranks), socket.gethostname())

    def serve(
        self, hello: Introduction, member: Callable[[contextlib.ExitStack], RankContext]
    ) -> None:
        """Send ``hello`` to the driver, and run its commands in the context that ``member`` creates."""
        try:
            channel = connect(self.host, self.port, self.key, hello)
        except ConnectionError:  # the driver no longer waits for this gang
            return
        self.attend(channel, member)

    def attend(
        self, channel: Channel, member: Callable[[contextlib.ExitStack], RankContext]
    ) -> None:
        """Run the commands that come through ``channel``; see :meth:`serve`."""
        with (
            contextlib.closing(channel),
            output_sent(channel if self.output else None) as rest,
            _failures_told(channel),
            contextlib.ExitStack() as at_end,
            _failures_told(channel),  # before the process group is destroyed, which may take long
        ):
            _serve(channel, member(at_end), rest)

    def member_of(
        self, context: BarrierTaskContext, frames: list[Any], at_end: contextlib.ExitStack
    ) -> RankContext:
        """Return the context of the rank that the task of ``context`` is."""
        infos, rank = context.getTaskInfos(), context.partitionId()
        address = infos[rank].address.rpartition(":")[0]
        device = device_of(self.device, context)
        if device.type == "cuda":
            make_room()
        return RankContext(rank, len(infos), address, device, frames, at_end, self)


@contextlib.contextmanager
def _failures_told(channel: Channel) -> Iterator[None]:
    """Report exceptions in the block to the driver, unless it has closed the connection."""
    try:
        yield
    except ChannelError:
        pass
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        with contextlib.suppress(ChannelError):
            channel.send((ERROR, describe_failure(error)))


def _serve(channel: Channel, member: RankContext, rest: Callable[[], None]) -> None:
    """Run commands until the driver closes the connection, or something fails.

    ``rest`` sends the last, unfinished line of output.
    """
    commands, results = CommandReceiver(channel), ResultSender(channel)
    try:
        while (content := commands.next()) is not None:
            command: Command = cloudpickle.loads(content)
            result = packed_result(command(member))
            rest()
            results.add(result, more=commands.waiting)
            member.do_deferred()
    finally:
        ended = False
        while not ended:  # no call here, because Python handles signals when a function begins
            try:
                commands.done()
                results.close()
                ended = True
            except KeyboardInterrupt:  # from CommandReceiver, handled only now
                continue
        rest()


def packed_result(result: Any) -> bytes:
    """Pickle a result: importable objects by name, which is faster, and others by value."""
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(result)


def device_of(kind: str, context: BarrierTaskContext) -> torch.device:
    """Return the device of this task.

    It is the first GPU that Spark has assigned to the task. Without an assignment, the ranks of a
    node take its GPUs in turn. It is the CPU if there is no GPU, or ``kind`` is "cpu".
    """
    gpus, assigned = gpus_here(kind, context)
    if not gpus:
        return torch.device("cpu")
    if assigned:
        return use_gpu(gpus[0])
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    before = hosts[: context.partitionId()].count(hosts[context.partitionId()])
    return use_gpu(gpus[before % len(gpus)])


def describe_failure(error: BaseException) -> Failure:
    """Describe an exception, or its cause if its text begins with an empty line.

    Torch adds such a text to what a pipeline stage has raised.
    """
    told: BaseException = error
    while told.__cause__ is not None and not _first_line(told):
        told = told.__cause__
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(_HERE):
        place = place.tb_next  # begin with the user's own frames
    trace = "".join(traceback.format_exception(error.with_traceback(place))).rstrip()
    return Failure(type(told).__name__, _text(told), trace, _by_group(error))


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) ends a rank without a result: return instead."
    try:
        return str(error)
    except Exception:
        return "(it has no text: its __str__ fails)"


def _first_line(error: BaseException) -> str:
    return _text(error).partition("\n")[0].strip()


def _by_group(error: BaseException | None) -> bool:
    """Return whether the error, or a cause of it, comes from the process group.

    Torch raises plain RuntimeErrors if Gloo breaks, and other errors caused by these in a pipeline.
    """
    while error is not None:
        text, kind = _text(error), type(error).__name__
        if kind.startswith("Dist") or any(word in text for word in _OF_GROUPS):
            return True
        error = error.__cause__ or error.__context__
    return False
