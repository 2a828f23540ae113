"""The task of a gang that its rank 0 leads: the body of ``mapInArrow`` in a barrier stage.

Its rows are (rank, kind, part, data): what the work of rank 0 yields, in pieces, since Arrow and gRPC
bound the size of a row.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import pickle
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import pyarrow as pa
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.errors import SlabFullError, SparkdlError, StateLostError, TrainingError, UserError
from sparkdl.gang.channel import Listener, connect
from sparkdl.gang.led import JOB, REACH_SECONDS, LedGang
from sparkdl.gang.rank_task import Introduction, Rendezvous
from sparkdl.slab.release import give_back
from sparkdl.spark.worker import finish_task

SCHEMA = "rank int, kind string, part int, data binary"
PIECE_BYTES = 1 << 20
RESULT, FAILED, LOG, OUTPUT = "result", "failed", "log", "output"
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
    output: bool = False  # what ranks print becomes rows of the result

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        infos, rank = context.getTaskInfos(), context.partitionId()
        address = infos[rank].address.rpartition(":")[0]
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
                self._follow(context, meeting, frames, len(infos))
        finally:
            self.work.end()
        give_back()
        finish_task()

    def _follow(
        self, context: BarrierTaskContext, meeting: Rendezvous, frames: list[Any], ranks: int
    ) -> None:
        """Run the commands of rank 0."""
        hello = Introduction(
            context.partitionId(), JOB, context.taskAttemptId(), ranks, socket.gethostname()
        )
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
        printed = io.StringIO()
        with _logged() as log, contextlib.ExitStack() as block:
            out = printed if self.output else PrintedLines(log, sys.stdout)
            block.enter_context(contextlib.redirect_stdout(out))
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
        rows.append((OUTPUT, printed.getvalue().encode()))
        for kind, data in rows:
            for part, start in enumerate(range(0, len(data), PIECE_BYTES)):
                yield _row(0, kind, part, data[start : start + PIECE_BYTES])


def _told_to_all(context: BarrierTaskContext, value: Any) -> list[Any]:
    """Tell all tasks of the stage ``value``, and return what each has told, in rank order."""
    text = base64.b64encode(pickle.dumps(value)).decode()
    return [pickle.loads(base64.b64decode(each)) for each in context.allGather(text)]


def _row(rank: int, kind: str, part: int, data: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([rank], pa.int32()),
            pa.array([kind], pa.string()),
            pa.array([part], pa.int32()),
            pa.array([data], pa.binary()),
        ],
        names=["rank", "kind", "part", "data"],
    )


class PrintedLines(io.TextIOBase):
    """A standard output that adds complete lines to a log, and passes everything on."""

    def __init__(self, log: list[tuple[int, str]], also: TextIO) -> None:
        super().__init__()
        self.also, self._log, self._rest = also, log, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        self._log.extend((PRINTED, line) for line in lines)
        return self.also.write(text)

    def flush(self) -> None:
        self.also.flush()


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
