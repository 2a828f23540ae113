"""What made a Spark job fail, out of Spark's long report: the task, the node, the Python error."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.errors import (
    DataError,
    ModelError,
    StaleReferenceError,
    StalledError,
    StateLostError,
    TrainingError,
)
from sparkdl.spark.frames import PLACE
from sparkdl.usercode.travel import REMEDY

WAITED = "sparkdl waited"
"""How the reason begins where a job was cancelled because nothing happened in it."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_TASK = re.compile(
    r"Task (?P<partition>\d+) in stage [\d.]+ failed (?P<attempts>\d+) times?, most recent "
    r"failure: Lost task \S+ in stage \S+ \(TID \d+\) \((?P<node>[^)]*)\)"
)
_TRACE = re.compile(r"Traceback \(most recent call last\):\n.*?(?=\n\s*at |\n ?SQLSTATE|\Z)", re.S)
_NOT_STARTED = re.compile(r"Error from python worker:\n(?P<said>.*?)\n *PYTHONPATH was:", re.S)
_WAITED = re.compile(rf"{WAITED} .*?timeout\.seconds\.", re.S)
_JAVA_CLASS = re.compile(r"^(:? ?(Caused by: )?(java|org)\.[\w.]+: )+")
_FUTURE = re.compile(r"^:? ?java\.util\.concurrent\.ExecutionException: ")
"""What Java puts around the error of a job that runs in the background."""


def of_python(text: str) -> bool:
    """Whether Spark reports an exception of Python's, with its traceback."""
    return _TRACE.search(text) is not None


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
    started = _NOT_STARTED.search(text)
    if started:  # Spark indents what the daemon said
        said = textwrap.dedent(started["said"]).strip()
        return f"{where}{_did_not_start(said)}"
    trace = _TRACE.search(text)
    if trace:
        lines = PLACE.sub("", trace[0]).strip().splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
        after = [line for line in lines[heads[-1] + 1 :] if line and not line.startswith(" ")]
        first = after[0] if after else lines[-1]
        if missing := _MISSING.match(first):
            first += f'. The executors have no module "{missing[1]}". {REMEDY}'
        return f"{where}{first}\n" + "\n".join(lines)
    if place:  # no Python error: what Spark says after naming the task
        first = text[place.end() :].lstrip(": ").partition("\n")[0]
    else:
        lines = [line for line in text.splitlines() if not line.startswith("\tat ")]
        named = [line for line in lines if "Exception" in line or "Error" in line]
        causes = [line for line in named if not _FUTURE.match(line)]
        first = next(iter(causes or named), text)
    reason = _JAVA_CLASS.sub("", first.strip())
    if reason.startswith("Python worker exited unexpectedly"):
        reason = "The Python worker died: it was killed, ran out of memory, or crashed."
    return where + reason


def _did_not_start(said: str) -> str:
    """Of an executor whose Python ends before it takes tasks, and of what it printed."""
    *before, last = said.splitlines() or ["it said nothing"]
    hint = (
        " The Python of the executors (spark.pyspark.python) needs sparkdl, torch and what they need: "
        "install them there, or ship an environment with --archives."
        if "No module named" in last
        else ""
    )
    return f"Python did not start: {last}.{hint}" + (f"\n{said}" if before else "")


@contextlib.contextmanager
def reading_explained(doing: str = "reading the data") -> Iterator[None]:
    """What Spark reports while it reads the data: a :class:`DataError` where the data's own query
    fails (a cast, a UDF, a function of ``rdd.map``), a :class:`ModelError` where a module of the user's
    is not there, else a :class:`TrainingError`. ``doing``: what the data are read for."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        if mistake := _OF_MODULES.search(text):
            raise ModelError(f"{doing}: {mistake[1]}") from None
        if isinstance(error, Py4JError) or "sparkdl.errors." in text:
            reason = of_query(explain(text))
            kind = StalledError if reason.startswith(WAITED) else TrainingError
            raise kind(f"{doing}: {reason}") from None
        told = explain(text) if of_python(text) else of_query(text)
        raise DataError(
            f"the data cannot be read: {told.rstrip('. ')}{chr(10) if chr(10) in told else '. '}"
            "Mend the query or the function that the data comes from; data.count() fails likewise."
        ) from None


def of_query(text: str) -> str:
    """What Spark says of a query: its sentences, without the class of the error and the SQL."""
    first, newline, trace = text.strip().partition("\n")
    return _LABEL.sub("", first) + (newline + trace if trace.startswith("Traceback") else "")


_OF_MODULES = re.compile(r"errors\.ModelError: (the executors (?:cannot import|have other) .*)")
"""See :mod:`sparkdl.usercode`."""


_LABEL = re.compile(r"^\[[A-Z_.0-9]+\] | SQLSTATE: \w+.*$")


_DELETED = f"{StaleReferenceError.__name__}:"
"""What a task says that reads what is no longer there."""


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
