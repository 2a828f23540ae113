"""A gang that its own rank 0 leads, where there is no driver that ranks can reach.

[Note: a gang without a driver] The client of Spark Connect cannot be reached from executors, so rank 0
does what the driver does elsewhere: the others connect to it and serve its commands. Its own commands
rank 0 runs in the same thread, between sending them and awaiting the results of the others: no second
process takes memory, and nobody else draws random numbers. Therefore it must not send commands ahead:
it would await the results of the first only after it has run the last.

The task of a gang that its rank 0 leads: the body of ``mapInArrow`` in a barrier stage.

Its rows are (kind, part, data): what the work of rank 0 yields, in pieces, since Arrow and gRPC
bound the size of a row.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import logging
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import pyarrow as pa
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.errors import (
    SessionError,
    SlabFullError,
    SparkdlError,
    StalledError,
    StateLostError,
    TrainingError,
    UserError,
)
from sparkdl.gang.channel import LineStream, Listener, connect, listening
from sparkdl.gang.process_group import Where, form_group
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks, StartableGroup, named_ranks
from sparkdl.gang.rank_task import (
    Command,
    Failure,
    RankContext,
    Rendezvous,
    describe_failure,
    packed_result,
)
from sparkdl.slab.pool import give_back
from sparkdl.spark.worker import finish_task

REACH_SECONDS = 30.0
"""The time in which every rank must reach rank 0, and every other rank."""
JOB = 1
"""The job number of the ranks, which are never started again."""
YEAR_SECONDS = 365 * 86400.0


class LedRanks(ConnectedRanks):
    """The ranks of a gang, as rank 0 leads them; see the note above."""

    def __init__(
        self, arrivals: ArrivedRanks, timeout: float | None, own: RankContext, output: bool
    ) -> None:
        super().__init__(arrivals, timeout)
        self.size, self._own, self._output = own.size, own, output
        self._hosts = {0: socket.gethostname(), **self._hosts}
        self._told = {0: deque(), **self._told}
        self._commands: deque[bytes] = deque()
        self._failed: dict[int, Failure] = {}

    def send_pickled(self, contents: Sequence[list[bytes]]) -> None:
        self._commands.extend(contents[0])
        super().send_pickled(contents)

    def _await(self, doing: str, failed: Any = None) -> None:
        """Run the next command of rank 0, then await the others."""
        if not self._told[0] and not self._failed:
            with _bounded(self._timeout, lambda: self._late(doing, [0])):
                self._run(self._commands.popleft())
        super()._await(doing, self._failed if not self._told[0] else {})

    def _run(self, content: bytes) -> None:
        """Run a command as :class:`sparkdl.gang.rank_task.Rendezvous` does, with copies."""
        try:
            command: Command = cloudpickle.loads(content)
            with self._printed():
                result = packed_result(command(self._own))
            self._told[0].append((result, time.monotonic()))
            self._own.do_deferred()
        except StalledError:
            self.close()
            raise
        except (Exception, SystemExit) as error:  # the next command fails with one that comes later
            self._failed = {0: describe_failure(error)}

    @contextlib.contextmanager
    def _printed(self) -> Iterator[None]:
        """Print what is printed in the block as that of rank 0, or else as that of any task."""
        if not self._output:
            with contextlib.redirect_stdout(getattr(sys.stdout, "before", sys.stdout)):
                yield
            return
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                yield
        finally:
            if text.getvalue():
                self._print(0, text.getvalue().removesuffix("\n"))


@contextlib.contextmanager
def _bounded(seconds: float | None, late: Callable[[], StalledError]) -> Iterator[None]:
    """Raise ``late()`` in the block after so many seconds, as soon as Python runs again in it.

    Whatever waits for other ranks has a limit of its own.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise late()

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class LedGang(StartableGroup):
    """A gang that the rank of this process leads.

    The ranks come together once. After an error of a command the gang has ended. ``log`` has the
    level and the text of each line that this process has logged, and grows.
    """

    ahead = False

    def __init__(
        self,
        listener: Listener,
        own: RankContext,
        timeout: float | None,
        output: bool = False,
        log: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.address, self.log = own.address, log
        self.size = self.tasks = own.size
        self._listener, self._own, self._timeout = listener, own, timeout
        self._output = output
        self._ranks: LedRanks | None = None
        self._started, self._ended = False, False
        self.where: list[Where] = []

    @property
    def running(self) -> bool:
        return self._started

    def start(self) -> None:
        """Bring the ranks together, unless they are.

        Raise StateLostError if some were lost: only a new gang can have others.
        """
        self.come_together()
        self._started = True

    def come_together(self) -> None:
        """See :meth:`start`. Afterwards the gang takes commands, but does not count as running."""
        if self._ended:
            raise StateLostError(
                "the ranks have ended, and the task of rank 0 cannot start others."
            )
        if self._ranks is not None:
            return
        arrivals = ArrivedRanks(JOB, self.size, first=1)
        began, stopped = time.monotonic(), False
        while arrivals.missing and time.monotonic() < began + (self._timeout or YEAR_SECONDS):
            if time.monotonic() > began + REACH_SECONDS:
                if not self._listener.silent:
                    break
                stopped = True  # whoever has connected can reach rank 0
            arrived = self._listener.accept(0.5)
            if arrived is not None:
                arrivals.admit(*arrived)
        if arrivals.missing:
            arrivals.disconnect()
            where = f"rank 0 at {self._own.address}"
            raise (silent if stopped else unreached)(arrivals.missing, where)
        self._ranks = LedRanks(arrivals, self._timeout, self._own, self._output)
        joining = functools.partial(self.call, doing="joining the process group")
        doors = joining(_open_door)
        for rank, missed in enumerate(joining(functools.partial(_knock, doors))):
            if missed:
                self.close()
                raise unreached(missed, f"rank {rank} at {doors[rank][0]}")
        self.where = form_group(joining, self._timeout or YEAR_SECONDS)

    def answers(self, doing: str) -> tuple[list[Any], float]:
        assert self._ranks is not None
        try:
            return self._ranks.answers(doing)
        except TrainingError:
            self.close()
            raise

    def leave(self) -> None:
        """See :class:`sparkdl.gang.rank_group.StartableGroup`. The ranks wait for what comes next."""
        self._started = False

    def close(self) -> None:
        self._started = False
        if self._ranks is not None:
            self._ranks.close()
            self._ended, self._ranks = True, None
        self._listener.close()


def unreached(ranks: Sequence[int], where: str) -> SessionError:
    """Return the error to raise if ranks cannot reach one of them."""
    return SessionError(
        f"{named_ranks(ranks)} could not reach {where} within {REACH_SECONDS:.0f} s. The executors of "
        "a gang exchange data by TCP, on ports that the system chooses: this compute must allow "
        "connections between its executors. If it does, a process was stopped for that long: try again."
    )


def silent(ranks: Sequence[int], where: str) -> StateLostError:
    """Return the error to raise if ranks have connected to ``where``, but say nothing."""
    return StateLostError(
        f"{where} heard nothing from {named_ranks(ranks)}, though somebody connected to it: a "
        "process was stopped, or its node lacks memory or processor time."
    )


def _open_door(member: RankContext) -> tuple[str, int]:
    """Listen on a port until the rank ends, for :func:`_knock`; return address and port."""
    member.kept["door"] = door = member.at_end.enter_context(listening(member.address))
    return member.address, int(door.getsockname()[1])


def _knock(doors: Sequence[tuple[str, int]], member: RankContext) -> list[int]:
    """Return the ranks that this one cannot reach; ``doors`` are those of all."""
    missed, until = [], time.monotonic() + REACH_SECONDS
    for rank, door in enumerate(doors):
        try:
            left = max(1.0, until - time.monotonic())
            socket.create_connection(door, timeout=left).close()
        except OSError:
            missed.append(rank)
    return missed


SCHEMA = "kind string, part int, data binary"
PIECE_BYTES = 1 << 20
RESULT, FAILED, LOG = "result", "failed", "log"
"""The kinds of rows that every gang may have; a work may yield others."""
PRINTED = 0
"""The level, among those of the log, of a line that rank 0 has printed outside of commands."""


class LedWork(Protocol):
    """The work of a gang's tasks."""

    def begin(self, batches: Iterable[pa.RecordBatch]) -> list[Any]:
        """Take the rows of the task, and return the frames of its rank; in every task.

        The other ranks are told of a UserError or SlabFullError that it raises.
        """

    def lead(self, gang: LedGang, frames: list[list[Any]]) -> Iterator[tuple[str, bytes]]:
        """Lead the gang, not started yet, in rank 0; yield kinds and contents of the results."""

    def end(self) -> None:
        """Delete what :meth:`begin` has written; in every task, at its end."""


@dataclass(frozen=True)
class LedTask:
    """The body of a task. It pickles by name, with its work."""

    work: LedWork
    device: str = "auto"
    timeout: float | None = None  # seconds for a command; None: no limit
    output: bool = False  # the client prints what ranks print

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        rank = context.partitionId()
        address = context.getTaskInfos()[rank].address.rpartition(":")[0]
        problem: SparkdlError | None = None
        try:
            frames = self.work.begin(batches)
        except (UserError, SlabFullError) as error:
            frames, problem = [], error
        listener, at = None, None
        if rank == 0:
            listener = Listener(address)
            at = address, listener.port, listener.key
        try:
            told = _told_to_all(context, (frames, problem, at))
            host, port, key = told[0][2]
            meeting = Rendezvous(host, port, key, self.device, self.output, JOB)
            problems = [problem for _, problem, _ in told if problem is not None]
            if listener is not None:
                every = [frames for frames, _, _ in told]
                yield from self._lead(context, meeting, listener, every, problems)
            elif not problems:
                self._follow(context, meeting, frames)
        finally:
            self.work.end()
        give_back()
        finish_task()

    def _follow(self, context: BarrierTaskContext, meeting: Rendezvous, frames: list[Any]) -> None:
        """Run the commands of rank 0."""
        hello = meeting.introduction_of(context)
        try:
            channel = connect(meeting.host, meeting.port, meeting.key, hello, REACH_SECONDS)
        except OSError:  # rank 0 says who has not come
            return
        meeting.attend(channel, lambda at_end: meeting.member_of(context, frames, at_end))

    def _lead(
        self,
        context: BarrierTaskContext,
        meeting: Rendezvous,
        listener: Listener,
        frames: list[list[Any]],
        problems: list[SparkdlError],
    ) -> Iterator[pa.RecordBatch]:
        """Lead the other ranks, and yield the rows of the results."""
        rows: list[tuple[str, bytes]] = []
        with _logged() as log, contextlib.ExitStack() as block:
            tell = functools.partial(_printed_to, log)
            lines = LineStream(tell, sys.stdout, also=True)
            block.enter_context(contextlib.redirect_stdout(lines))
            try:
                if problems:
                    raise problems[0]
                at_end = block.enter_context(contextlib.ExitStack())
                own = meeting.member_of(context, frames[0], at_end)
                gang = LedGang(listener, own, self.timeout, self.output, log)
                with contextlib.closing(gang):
                    rows.extend(self.work.lead(gang, frames))
            except StateLostError:  # Spark tells the client
                raise
            except (Exception, SystemExit) as error:
                rows = [(FAILED, _packed_error(error))]
        rows.append((LOG, pickle.dumps(log)))
        for kind, data in rows:
            for part, start in enumerate(range(0, len(data), PIECE_BYTES)):
                yield _row(kind, part, data[start : start + PIECE_BYTES])


def _told_to_all(context: BarrierTaskContext, value: Any) -> list[Any]:
    """Tell all tasks of the stage ``value``, and return what each has told, in rank order."""
    text = base64.b64encode(pickle.dumps(value)).decode()
    return [pickle.loads(base64.b64decode(each)) for each in context.allGather(text)]


def _row(kind: str, part: int, data: bytes) -> pa.RecordBatch:
    row = [pa.array([kind]), pa.array([part], pa.int32()), pa.array([data], pa.binary())]
    return pa.RecordBatch.from_arrays(row, names=["kind", "part", "data"])


def _printed_to(log: list[tuple[int, str]], lines: Sequence[str]) -> None:
    log.extend((PRINTED, line) for line in lines)


class _Kept(logging.Handler):
    """A handler that keeps the level and the text of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


@contextlib.contextmanager
def _logged() -> Iterator[list[tuple[int, str]]]:
    """Yield a list that gets what the logger of sparkdl is told in the block."""
    handler, logger = _Kept(), logging.getLogger("sparkdl")
    logger.addHandler(handler)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)


def _packed_error(error: BaseException) -> bytes:
    """Pickle an exception, with its traceback as a note if it is not ours.

    One that cannot be pickled becomes a TrainingError with its text.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, SparkdlError):
        error.add_note(f"In rank 0 of the gang:\n{trace}")
    for form in (error, _ErrorParts(error)):
        with contextlib.suppress(Exception):
            content: bytes = cloudpickle.dumps(form)
            if str(pickle.loads(content)) == str(error):
                return content
    told = TrainingError(f"rank 0 failed. {type(error).__name__}: {error}\n{trace}")
    return pickle.dumps(told)


class _ErrorParts:
    """An exception whose class takes other arguments than the exception keeps; unpickled, it is one.

    Python calls the class with ``error.args`` to unpickle an exception, so that one whose
    ``__init__`` takes several arguments fails, or gets another text.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _error_of, (type(self._error), self._error.args, picklable_attributes(self._error))


def _error_of(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Return an exception with these arguments and attributes, whatever its class takes."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def picklable_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object that can be pickled."""
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        with contextlib.suppress(Exception):
            pickle.loads(cloudpickle.dumps(value))
            found[name] = value
    return found
