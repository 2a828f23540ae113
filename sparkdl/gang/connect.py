"""The client's side of a gang in a session of Spark Connect: a barrier query, and its results.

[Note: what a client of Spark Connect can do] It has no SparkContext, and executors cannot reach it.
Spark tells it only how many tasks of a query have ended. A query that can never have its slots waits
without a word, since Spark asks for them again for ten minutes; a query that is to end is interrupted
by its tag.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SessionError, StateLostError
from sparkdl.gang.led_task import FAILED, LOG, OUTPUT, SCHEMA, LedTask
from sparkdl.gang.slots import no_dynamic_allocation, too_few_slots
from sparkdl.spark.failures import explain, of_python, reading_explained
from sparkdl.usercode import accompanied

logger = logging.getLogger("sparkdl")
SILENT_SECONDS = 60.0
"""The time after which a query of which Spark has not reported anything is taken for one that waits for
slots that do not exist."""
NEWS_SECONDS = 30.0
"""The time between two lines of the log that say how long a query has been running."""
Tell = Callable[[float], None] | None
_MANY = 1 << 16
_LOST = ("barrier task", "ExecutorLostFailure", "StateLostError", "Python worker exited")
"""Texts in Spark's report of a query that has failed because a rank was lost."""
_seen: dict[str, int] = {}
"""The largest number of slots that each session was seen to have."""


def is_connected(thing: Any) -> bool:
    """Return whether ``thing`` is a DataFrame or a session of Spark Connect."""
    return type(thing).__module__.startswith("pyspark.sql.connect")


def slots_of(session: Any) -> int:
    """Return how many tasks can run at once in a session of Spark Connect, as far as it tells.

    It is the number of partitions of a range, which Spark makes as many as there are cores.
    """
    found = session.range(_MANY).selectExpr("spark_partition_id() AS part").distinct().count()
    cores = max(1, int(session.conf.get("spark.task.cpus", "1") or 1))
    _seen[session.session_id] = max(1, found // cores)
    return _seen[session.session_id]


def check_slots_of(session: Any, ranks: int, profile: ResourceProfile | None) -> None:
    """Raise an error if the session has too few slots for a gang, as far as it tells.

    With a profile, or ``spark.default.parallelism``, nobody can tell: the query then ends after
    :data:`SILENT_SECONDS`.

    Raises:
        ParameterError: There are too few slots.
        SessionError: The session has dynamic allocation.
    """
    if session.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise no_dynamic_allocation()
    if ranks <= _seen.get(session.session_id, 0) or profile is not None:
        return
    if session.conf.get("spark.default.parallelism", None) is not None:
        return
    slots = slots_of(session)
    if slots < ranks:
        raise ParameterError(too_few_slots(ranks, slots))


def run_led(
    frame: Any, task: LedTask, ranks: int, profile: ResourceProfile | None, tell: Tell = None
) -> dict[str, bytes]:
    """Run a gang over a DataFrame of Spark Connect, and return what its rank 0 has yielded, by kind.

    Args:
        frame: The DataFrame, with a partition for each rank.
        task: The body of the tasks.
        ranks: The number of ranks.
        profile: The resources of the tasks, if they differ from those of other tasks.
        tell: A function that is told now and then for how many seconds the query has been running.

    Raises:
        sparkdl.StateLostError: If a rank was lost.
        sparkdl.SessionError: If the ranks do not get their slots, or do not reach each other.
        Exception: What rank 0 has raised.
    """
    session, tag = frame.sparkSession, f"sparkdl-{secrets.token_hex(8)}"
    query = frame.mapInArrow(accompanied(task), SCHEMA, barrier=True, profile=profile)
    session.addTag(tag)
    try:
        with _watched(session, tag, ranks, tell):
            table = _collected(query)
    except PySparkException:
        raise
    except BaseException:  # also KeyboardInterrupt: the ranks end with the query
        with contextlib.suppress(PySparkException):
            session.interruptTag(tag)
        raise
    finally:
        session.removeTag(tag)
    return _contents(table)


def _contents(table: Any) -> dict[str, bytes]:
    """Return the contents of the rows by kind; log, print and raise what rank 0 has."""
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for row in table.to_pylist():
        parts.setdefault(row["kind"], []).append((row["part"], bytes(row["data"])))
    found = {kind: b"".join(data for _, data in sorted(some)) for kind, some in parts.items()}
    for level, text in pickle.loads(found.pop(LOG)) if LOG in found else ():
        logger.log(level, "%s", text)
    if OUTPUT in found:
        print(found.pop(OUTPUT).decode(), end="")
    if FAILED in found:
        raise pickle.loads(found[FAILED])
    return found


def _collected(query: Any) -> Any:
    """Return the rows of the query as an Arrow table; raise what :func:`run_led` raises."""
    with reading_explained():
        try:
            return query.toArrow()
        except PySparkException as error:
            text = str(error)
            if any(word in text for word in _LOST):
                reason = explain(text) if of_python(text) else explain(text).partition("\n")[0]
                raise StateLostError(f"a rank of the gang went away: {reason}") from None
            raise


@contextlib.contextmanager
def _watched(session: Any, tag: str, ranks: int, tell: Tell) -> Iterator[None]:
    """Interrupt the query of the block if Spark does not begin with it; tell how long it runs."""
    heard, over, silent = threading.Event(), threading.Event(), threading.Event()

    def hear(*args: Any, **kwargs: Any) -> None:
        heard.set()

    def watch() -> None:
        began, told = time.monotonic(), time.monotonic()
        while not over.wait(0.5):
            now = time.monotonic()
            if not heard.is_set() and now - began > SILENT_SECONDS:
                silent.set()
                session.interruptTag(tag)
                return
            if tell is not None and now - told >= NEWS_SECONDS:
                told = now
                tell(now - began)

    session.registerProgressHandler(hear)
    thread = threading.Thread(target=watch, name="sparkdl-query", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if silent.is_set():
            raise SessionError(
                f"Spark did not begin with the gang's {ranks} tasks in {SILENT_SECONDS:.0f} s: it "
                f"needs {ranks} task slots at once, and this session seems to have fewer. Ask for "
                "fewer ranks, or for more executors or cores."
            ) from None
        raise
    finally:
        over.set()
        session.removeProgressHandler(hear)
        thread.join()
