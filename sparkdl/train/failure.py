"""What made a Spark job fail, out of Spark's long report: the task, the node, the Python error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.errors import (
    DataError,
    StaleReferenceError,
    StalledError,
    StateLostError,
    TrainingError,
)
from sparkdl.frames import PLACE
from sparkdl.train.watch import WAITED

_TASK = re.compile(
    r"Task (?P<partition>\d+) in stage [\d.]+ failed (?P<attempts>\d+) times?, most recent "
    r"failure: Lost task \S+ in stage \S+ \(TID \d+\) \((?P<node>[^)]*)\)"
)
_TRACE = re.compile(r"Traceback \(most recent call last\):\n.*?(?=\n\s*at |\n ?SQLSTATE|\Z)", re.S)

_WAITED = re.compile(rf"{WAITED} .*?timeout\.seconds\.", re.S)
_DELETED = f"{StaleReferenceError.__name__}:"
"""What a task says that reads what is no longer there."""
_JAVA_CLASS = re.compile(r"^(:? ?(java|org)\.[\w.]+: )+")


@contextlib.contextmanager
def faults_explained(doing: str) -> Iterator[None]:
    """Turn a failed Spark job into one :class:`TrainingError` that says what, where and why; into a
    :class:`StateLostError` where its tasks found slabs deleted, a :class:`StalledError` where nothing
    happened in it."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        reason = explain(str(error))
        raise _kind(reason)(f"{doing}: {reason}") from None


def _kind(reason: str) -> type[TrainingError]:
    if reason.startswith(WAITED):
        return StalledError
    return StateLostError if _DELETED in reason.partition("\n")[0] else TrainingError


@contextlib.contextmanager
def reading_explained() -> Iterator[None]:
    """What Spark reports while it reads the data: a :class:`DataError` where the data's own query
    fails (a cast, a UDF, a function of ``rdd.map``), else a :class:`TrainingError`."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        if isinstance(error, Py4JError) or "sparkdl.errors." in text:
            reason = of_query(explain(text))
            kind = StalledError if reason.startswith(WAITED) else TrainingError
            raise kind(f"reading the data: {reason}") from None
        told = explain(text) if _TRACE.search(text) else of_query(text)
        raise DataError(
            f"the data cannot be read: {told.rstrip('. ')}{chr(10) if chr(10) in told else '. '}"
            "Mend the query or the function that the data comes from; data.count() fails likewise."
        ) from None


def of_query(text: str) -> str:
    """What Spark says of a query: its sentences, without the class of the error and the SQL."""
    first, newline, trace = text.strip().partition("\n")
    return _LABEL.sub("", first) + (newline + trace if trace.startswith("Traceback") else "")


_LABEL = re.compile(r"^\[[A-Z_.0-9]+\] | SQLSTATE: \w+.*$")


def explain(text: str) -> str:
    """One line with partition, node, attempts and error; then the Python traceback, if any.

    Spark names the task where it reports the failed job. Since 4.1 it reports a Python error in a
    task as that error alone, and the place is the one that the task noted, see ``map_frames``.
    """
    waited = _WAITED.search(text)
    if waited:
        return waited[0]
    place = PLACE.search(text) or _TASK.search(text)
    where = ""
    if place:
        attempts = int(place["attempts"])
        times = "once" if attempts == 1 else f"{attempts} times"
        where = f"partition {place['partition']} on {place['node']} failed {times}. "
    trace = _TRACE.search(text)
    if trace:
        lines = PLACE.sub("", trace[0]).strip().splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
        after = [line for line in lines[heads[-1] + 1 :] if line and not line.startswith(" ")]
        return f"{where}{after[0] if after else lines[-1]}\n" + "\n".join(lines)
    if place:  # no Python error: what Spark says after naming the task
        text = text[place.end() :].lstrip(": ")
    first = next(
        (line for line in text.splitlines() if "Exception" in line or "Error" in line), text
    )
    reason = _JAVA_CLASS.sub("", first.strip())
    if reason.startswith("Python worker exited unexpectedly"):
        reason = "The Python worker died: it was killed, ran out of memory, or crashed."
    return where + reason
