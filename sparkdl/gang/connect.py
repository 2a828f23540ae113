"""The client's side of a gang in a session of Spark Connect: a barrier query, and its results.

[Note: what a client of Spark Connect can do] It has no SparkContext, and executors cannot reach it.
Spark tells it only how many tasks of a query have ended. A query that can never have its slots waits
without a word, since Spark asks for them again for ten minutes; a query that is to end is interrupted
by its tag.

[Note: interrupts and gRPC] A KeyboardInterrupt inside gRPC's Python may leave a lock of the channel
taken, and every later call of the session waits for ever. So a query that takes long is awaited in a
thread of its own, where Python raises none.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import operator
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SessionError, SparkdlError, StateLostError, counted
from sparkdl.gang.led import FAILED, LOG, PRINTED, SCHEMA, LedTask
from sparkdl.gang.slots import check_profile, no_dynamic_allocation, too_few_slots
from sparkdl.process.system import print_escaped
from sparkdl.spark.failures import explain, of_modules, of_python
from sparkdl.spark.frames import is_local_master
from sparkdl.spark.worker import finish_task
from sparkdl.usercode import accompanied

_at_work: set[tuple[str, str]] = set()
"""The gangs of this process whose tasks run: the id of the session and the tag of the query."""


logger = logging.getLogger("sparkdl")
SILENT_SECONDS = 60.0
"""The time after which a query that runs no task is taken for one that waits for slots that do not
exist."""
END_SECONDS = 20.0
"""The time that a query has to end once it is interrupted."""
NEWS_SECONDS = 30.0
"""The time between two lines of the log that say how long a query has been running."""
ASK_SECONDS = 1.0
"""The time between two questions to rank 0; longer while nobody answers."""
WAKE_SECONDS = 0.5
"""The time after which the main thread wakes: Python may note a signal and not wake it."""
_MANY = 1 << 16


@dataclass(frozen=True)
class Nodes:
    """The number of cores that a session was seen to have, and the addresses of its nodes."""

    cores: int
    hosts: tuple[str, ...]


class Follower(Protocol):
    """A follower of a query while it runs. It is called in a thread of its own."""

    def ask(self) -> bool | None:
        """Ask rank 0 how far it is, and return whether it answers; None if that is not asked now."""

    def waiting(self, seconds: float, begun: bool) -> None:
        """Take note that nobody has answered for so long; ``begun`` says whether tasks run."""

    @property
    def known(self) -> int:
        """Return how many lines of the log of rank 0 were told."""


_LOST = ("barrier task", "ExecutorLostFailure", "StateLostError", "Python worker exited")
"""Texts in Spark's report of a query that has failed because a rank was lost."""
_seen: dict[str, Nodes] = {}
"""The cores and nodes that each session was seen to have, by its id."""


def slots_of(session: Any, profile: ResourceProfile | None = None) -> int:
    """Return how many tasks can run at once in a session of Spark Connect, as far as it tells.

    Spark makes a range of as many partitions as there are cores. Of other resources than cores it
    tells nothing.
    """
    found = session.range(_MANY).mapInArrow(_names_of_node(), "part int, names string").toArrow()
    names = [name for text in found.column("names").to_pylist() for name in text.split()]
    _seen[session.session_id] = Nodes(found.num_rows, tuple(dict.fromkeys(names)))
    return _slots(session, found.num_rows, profile)


def _names_of_node() -> Callable[[Any], Any]:
    """Return a task that yields the addresses of its node. It pickles without this module, whose
    import may take a task seconds."""

    def names(batches: Any) -> Any:
        import os
        import socket

        import pyarrow as pa
        from pyspark import TaskContext

        for _ in batches:
            pass
        found = [os.environ.get("SPARK_LOCAL_IP", ""), socket.gethostname()]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing
                found.append(probe.getsockname()[0])
            except OSError:
                pass
        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()
        yield pa.RecordBatch.from_arrays(
            [pa.array([part], pa.int32()), pa.array([" ".join(found)])], names=["part", "names"]
        )

    return names


def _slots(session: Any, cores: int, profile: ResourceProfile | None) -> int:
    """Return how many tasks can have their cores at once."""
    each = int(session.conf.get("spark.task.cpus", "1") or 1)
    if profile is not None and "cpus" in profile.taskResources:
        each = int(profile.taskResources["cpus"].amount)
    return max(1, cores // max(1, each))


def hosts_of(session: Any) -> tuple[str, ...]:
    """Return the addresses of the nodes that a session was seen to have."""
    if session.session_id not in _seen:
        slots_of(session)
    return _seen[session.session_id].hosts


def check_slots_of(session: Any, ranks: int, profile: ResourceProfile | None) -> None:
    """Raise an error if the session has too few slots for a gang, as far as it tells.

    With ``spark.default.parallelism``, nobody can tell: the query then ends after
    :data:`SILENT_SECONDS`.
    """
    if session.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise no_dynamic_allocation()
    if profile is not None:
        check_profile(profile, is_local_master(session.conf.get("spark.master", None)))
    seen = _seen.get(session.session_id)
    if seen is not None and ranks <= _slots(session, seen.cores, profile):
        return
    if session.conf.get("spark.default.parallelism", None) is not None:
        return
    slots = slots_of(session, profile)
    if slots < ranks:
        raise ParameterError(too_few_slots(ranks, slots))


def run_led(
    frame: Any,
    task: LedTask,
    ranks: int,
    profile: ResourceProfile | None,
    follower: Follower | None = None,
) -> dict[str, bytes]:
    """Run a gang over a DataFrame of Spark Connect, and return what rank 0 has yielded, by kind.

    Raise StateLostError if a rank was lost, and what rank 0 has raised.
    """
    session, tag = frame.sparkSession, f"sparkdl-{secrets.token_hex(8)}"
    tags, found, over = [*session.getTags(), tag], queue.SimpleQueue[Any](), threading.Event()

    def await_end() -> None:
        for each in tags:  # of this thread
            session.addTag(each)
        try:
            query = frame.mapInArrow(accompanied(task), SCHEMA, barrier=True, profile=profile)
            with _watched(session, tag, ranks, follower):
                table = _collected(query)
        except BaseException as error:
            table = error
        over.set()
        found.put(table)

    _in_thread(await_end)
    try:
        table = None
        while table is None:
            with contextlib.suppress(queue.Empty):
                table = found.get(timeout=WAKE_SECONDS)
    except BaseException:  # KeyboardInterrupt: the ranks end with the query
        _in_thread(lambda: _interrupt(session, tag, over))
        with contextlib.suppress(queue.Empty):
            found.get(timeout=END_SECONDS)
        raise
    if isinstance(table, BaseException):
        raise table
    return _contents(table, 0 if follower is None else follower.known)


def _in_thread(work: Callable[[], None]) -> None:
    """Begin ``work`` in a thread; see the note on interrupts and gRPC."""
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(work,), name="sparkdl-query-end", daemon=True
    ).start()


def _interrupt(session: Any, tag: str, over: threading.Event) -> None:
    """Interrupt a query until it has ended: Spark may miss the interrupt of one that just begins."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(PySparkException):
            session.interruptTag(tag)
        if over.wait(1.0):
            return


def tell_line(level: int, text: str) -> None:
    """Log a line that rank 0 has logged, or print one that it has printed."""
    if level == PRINTED:
        print_escaped(text)
    else:
        logger.log(level, "%s", text)


def _contents(table: Any, known: int) -> dict[str, bytes]:
    """Return the contents of the rows by kind; log, print and raise what rank 0 has.

    The first ``known`` lines of its log were told before.
    """
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for row in table.to_pylist():
        parts.setdefault(row["kind"], []).append((row["part"], bytes(row["data"])))
    found = {kind: b"".join(data for _, data in sorted(some)) for kind, some in parts.items()}
    for level, text in pickle.loads(found.pop(LOG))[known:] if LOG in found else ():
        tell_line(level, text)
    if FAILED in found:
        raise pickle.loads(found[FAILED])
    return found


def _collected(query: Any) -> Any:
    """Return the rows of the query as an Arrow table; raise what :func:`run_led` raises."""
    try:
        return query.toArrow()
    except PySparkException as error:
        text = str(error)
        if any(word in text for word in _LOST) and not of_modules(text):
            reason = explain(text) if of_python(text) else explain(text).partition("\n")[0]
            raise StateLostError(f"a rank of the gang went away: {reason}") from None
        raise


def in_tasks(session: Any, call: Callable[[int], Any], numbers: range) -> list[Any]:
    """Return what ``call`` returns for each number, in a task of its own. Raise its SparkdlError."""
    frame = session.range(numbers.start, numbers.stop, 1, len(numbers))
    table = frame.mapInArrow(
        accompanied(functools.partial(_called, call)), "number long, data binary"
    ).toArrow()
    rows = sorted(table.to_pylist(), key=operator.itemgetter("number"))
    results = [pickle.loads(row["data"]) for row in rows]
    for error in (one for one in results if isinstance(one, SparkdlError)):
        raise error
    return results


def _called(
    call: Callable[[int], Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run as the task of :func:`in_tasks`."""
    for number in (one for batch in batches for one in batch.column(0).to_pylist()):
        try:
            result = call(number)
        except SparkdlError as error:
            result = error
        row = [pa.array([number]), pa.array([pickle.dumps(result)])]
        yield pa.RecordBatch.from_arrays(row, names=["number", "data"])
    finish_task()


@contextlib.contextmanager
def _watched(session: Any, tag: str, ranks: int, follower: Follower | None) -> Iterator[None]:
    """Interrupt the query of the block if Spark does not begin with it, and follow it.

    Spark reports what has changed in the thread that awaits the query, which is this one. A query may
    wait for another gang of this process for as long as that takes.
    """
    over, silent, gang = threading.Event(), threading.Event(), (session.session_id, tag)
    awaiting, idle_since = threading.get_ident(), time.monotonic()

    def hear(*, inflight_tasks: int, **others: Any) -> None:
        nonlocal idle_since
        if threading.get_ident() != awaiting:  # another query of the session
            return
        if inflight_tasks:
            _at_work.add(gang)
        elif gang in _at_work:
            _at_work.discard(gang)
            idle_since = time.monotonic()

    def watch() -> None:
        nonlocal idle_since
        began = told = asked = time.monotonic()
        pause = ASK_SECONDS
        while not over.wait(0.1):
            now = time.monotonic()
            if any(session_id == gang[0] for session_id, _ in list(_at_work)):
                idle_since = now
            if now - idle_since > SILENT_SECONDS:
                silent.set()
                with contextlib.suppress(PySparkException):  # again, until the query has ended
                    session.interruptTag(tag)
                continue
            if follower is None:
                continue
            answered = None
            if now - asked >= pause:
                try:
                    answered = follower.ask()
                except Exception:  # a display that fails: the next interrupt must be passed on
                    logger.debug("news of the fit cannot be shown", exc_info=True)
                    answered = False
            if answered is not None:
                asked = time.monotonic()
                told = asked if answered else told
                pause = ASK_SECONDS if answered else min(15.0, pause * 1.2)
            if now - told >= NEWS_SECONDS:
                told = now
                follower.waiting(now - began, gang in _at_work)

    session.registerProgressHandler(hear)
    thread = threading.Thread(target=watch, name="sparkdl-query", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if silent.is_set():
            raise SessionError(
                f"Spark did not begin with the gang's {counted(ranks, 'task')} in "
                f"{SILENT_SECONDS:.0f} s: it needs {counted(ranks, 'task slot')} at once, and this "
                "session seems to have fewer, or others use them (also the fit of a client that "
                "went away, for some minutes). Ask for fewer ranks, or for more executors or cores."
            ) from None
        raise
    finally:
        over.set()
        thread.join()
        session.removeProgressHandler(hear)
        _at_work.discard(gang)
