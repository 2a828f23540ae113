"""A rank of a gang: a task that does what the driver says."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.errors import SessionError
from sparkdl.gang.channel import Channel, ChannelError, connect
from sparkdl.gang.command_queue import CommandReceiver, ResultSender
from sparkdl.slab.gpu_memory import give_back, make_room
from sparkdl.spark.device import Gpu, Sight, gpus_of, use_gpu
from sparkdl.spark.worker import finish_task

ERROR, OUTPUT = "error", "output"
"""What a rank says beside results, see :mod:`sparkdl.gang.command_queue`; its messages are (kind,
content)."""
_HERE = os.path.dirname(__file__) + os.sep
_OF_GROUPS = ("gloo/", "NCCL error", "NCCL communicator")
"""What errors of a process group speak of that are plain RuntimeErrors."""


@dataclass(frozen=True)
class Introduction:
    """The first message of a rank. ``job``: of :class:`Rendezvous`; ``task``: a number that grows with
    every task of Spark's; ``ranks``: how many tasks its stage runs."""

    rank: int
    job: int
    task: int
    ranks: int
    host: str


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: its kind and text, and its traceback. ``by_group``: it is of the process
    group, which breaks at all ranks when one of them fails."""

    kind: str
    text: str
    trace: str
    by_group: bool


@dataclass
class RankContext:
    """What commands are given: who this is, its node's address as Spark knows it, its device, the
    frames of its partition; what shall happen ``at_end``; how a task came to the driver; what
    commands have ``kept``; and what a command leaves to be done ``afterwards``, when its result is on
    its way."""

    rank: int
    size: int
    address: str
    device: torch.device
    frames: list[Any]
    at_end: contextlib.ExitStack
    meeting: Rendezvous | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    afterwards: Callable[[], None] | None = None


Command = Callable[[RankContext], Any]


@dataclass(frozen=True)
class Rendezvous:
    """How a rank comes to its gang: the driver's address and key, the kind of device ("auto", "cpu",
    "cuda"), whether its output goes to the driver, and which job of the gang this is."""

    host: str
    port: int
    key: bytes = field(repr=False)
    device: str
    output: bool = False
    job: int = 0

    def __call__(self, partition: int, frames: Iterable[Any]) -> Iterator[bytes]:
        """Body of a barrier stage's tasks."""
        context = BarrierTaskContext.get()
        ranks = len(context.getTaskInfos())
        hello = Introduction(
            partition, self.job, context.taskAttemptId(), ranks, socket.gethostname()
        )
        own = list(frames)
        self.serve(hello, lambda at_end: self._member(context, own, at_end))
        give_back()
        finish_task()
        yield from ()  # a generator of nothing

    def serve(
        self, hello: Introduction, member: Callable[[contextlib.ExitStack], RankContext]
    ) -> None:
        """Say ``hello`` to the driver, and do what it says as the member that this makes."""
        try:
            channel = connect(self.host, self.port, self.key, hello)
        except ConnectionError:  # nobody waits for this gang any more
            return
        with (
            contextlib.closing(channel),
            _output(channel if self.output else None) as rest,
            _failures_told(channel),
            contextlib.ExitStack() as at_end,
            _failures_told(channel),  # before the process group goes, which may take long
        ):
            _serve(channel, member(at_end), rest)

    def _member(
        self, context: BarrierTaskContext, frames: list[Any], at_end: contextlib.ExitStack
    ) -> RankContext:
        infos, rank = context.getTaskInfos(), context.partitionId()
        address = infos[rank].address.rpartition(":")[0]
        device = device_of(self.device, context)
        if device.type == "cuda":
            make_room()
        return RankContext(rank, len(infos), address, device, frames, at_end, self)


@contextlib.contextmanager
def _failures_told(channel: Channel) -> Iterator[None]:
    """The driver is told what fails in the block, and where it has hung up nothing is told."""
    try:
        yield
    except ChannelError:
        pass
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        with contextlib.suppress(ChannelError):
            channel.send((ERROR, _failure(error)))


def _serve(channel: Channel, member: RankContext, rest: Callable[[], None]) -> None:
    """Do what comes, until the driver hangs up, or something fails. ``rest``: tells what has been
    printed of a line."""
    commands, results = CommandReceiver(channel), ResultSender(channel)
    try:
        while (content := commands.next()) is not None:
            command: Command = cloudpickle.loads(content)
            result = _packed(command(member))
            rest()
            results.add(result, more=commands.waiting)
            if member.afterwards is not None:
                work, member.afterwards = member.afterwards, None
                work()
    finally:
        ended = False
        while not ended:  # no call here: Python sees to signals where a function begins
            try:
                commands.done()
                results.close()
                ended = True
            except KeyboardInterrupt:  # by Commands, and noticed only now
                continue
        rest()


def _packed(result: Any) -> bytes:
    """What can be imported goes by name, which is quicker; else by value."""
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(result)


def device_of(kind: str, context: BarrierTaskContext) -> torch.device:
    """The GPU that Spark assigned to this task, the first where there are several; without an
    assignment the ranks of a node take its GPUs in turn; the CPU where there is none, or it is asked
    for."""
    gpus, assigned = gpus_here(kind, context)
    if not gpus:
        return torch.device("cpu")
    if assigned:
        return use_gpu(gpus[0])
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    before = hosts[: context.partitionId()].count(hosts[context.partitionId()])
    return use_gpu(gpus[before % len(gpus)])


def gpus_here(kind: str, context: BarrierTaskContext) -> tuple[list[Gpu], bool]:
    """The GPUs that ranks of this kind of device may use here, and whether Spark assigned them to the
    task; else they are those of the node. Raises :class:`SessionError` where there must be one."""
    if kind == "cpu":
        return [], False
    gpu = context.resources().get("gpu")
    found: list[Gpu] = []
    if gpu is not None:
        found = gpus_of(gpu.addresses)
    elif torch.cuda.is_available():
        found = list(range(torch.cuda.device_count()))
    if kind == "cuda" and not found:
        raise SessionError(f'device="cuda": torch sees no GPU on this node: {Sight.here().reason}')
    return found, gpu is not None


def _failure(error: BaseException) -> Failure:
    """Where a text begins with an empty line, as that of torch does around what a stage of a pipeline
    raised, the cause says more."""
    told: BaseException = error
    while told.__cause__ is not None and not _first_line(told):
        told = told.__cause__
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(_HERE):
        place = place.tb_next  # the user's own frames say more
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
    """Whether it, or what it came of, is of the process group: torch raises plain RuntimeErrors where
    Gloo breaks, and others of these in a pipeline."""
    while error is not None:
        text, kind = _text(error), type(error).__name__
        if kind.startswith("Dist") or any(word in text for word in _OF_GROUPS):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Output(io.TextIOBase):
    """A text stream into the channel, line by line. Of processes that are forked from this one, such as
    those of a DataLoader, it is ``before``, as the channel has two ends and no more."""

    def __init__(self, channel: Channel, before: TextIO) -> None:
        self._channel, self._before, self._line = channel, before, ""
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            return self._before.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._send("\n".join(lines))
        return len(text)

    def flush(self) -> None:
        """Lines go by themselves."""
        if os.getpid() != self._process:
            self._before.flush()

    def rest(self) -> None:
        """Tell the line that has begun."""
        line, self._line = self._line, ""
        if line:
            self._send(line)

    def _send(self, text: str) -> None:
        with contextlib.suppress(ChannelError):
            self._channel.send((OUTPUT, text))


@contextlib.contextmanager
def _output(channel: Channel | None) -> Iterator[Callable[[], None]]:
    """What is printed inside the block goes to the driver, where there is a channel; the function tells
    what has begun."""
    if channel is None:
        yield lambda: None
        return
    stream = _Output(channel, sys.stdout)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield stream.rest
