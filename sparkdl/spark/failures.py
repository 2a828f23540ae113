"""The causes of failed Spark jobs, from Spark's long report: the task, the node, the Python error.

A timeout for every wait of a fit: jobs in which nothing happens are cancelled with a reason.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from sparkdl.compat import cancel_group
from sparkdl.errors import (
    DataError,
    ModelError,
    SessionError,
    StaleReferenceError,
    StalledError,
    StateLostError,
    TrainingError,
    UserError,
)
from sparkdl.spark.frames import PLACE
from sparkdl.usercode.travel import REMEDY

WAITED = "sparkdl waited"
"""The start of the reason given when a job is cancelled because nothing happened in it."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_LACKING = re.compile(r"ModuleNotFoundError: No module named '(sparkdl|torch)'")
"""The end of a worker, or of the daemon that forks workers, that cannot run any task of sparkdl."""
_TASK = re.compile(
    r"Task (?P<partition>\d+) in stage [\d.]+ failed (?P<attempts>\d+) times?, most recent "
    r"failure: Lost task \S+ in stage \S+ \(TID \d+\) \((?P<node>[^)]*)\)"
)
_TRACE = re.compile(r"Traceback \(most recent call last\):\n.*?(?=\n\s*at |\n ?SQLSTATE|\Z)", re.S)
_WORKER = re.compile(r'^  File "[^"\n]*/pyspark\.zip/pyspark/.*\n(?:    .*\n)*', re.M)
"""A frame of PySpark's worker in a traceback."""
_NOT_STARTED = re.compile(r"Error from python worker:\n(?P<said>.*?)\n *PYTHONPATH was:", re.S)
_NO_MEMORY = re.compile(r"(?i)cannot allocate memory|can't allocate memory|MemoryError|worker died")
_VERSIONS = re.compile(
    r"Python in worker has different version: (?P<executors>[\d.]+\d) than that in driver: "
    r"(?P<driver>[\d.]+\d)"
)
_WAITED = re.compile(rf"{WAITED} .*?timeout\.seconds\.", re.S)
_JAVA_CLASS = re.compile(r"^(:? ?(Caused by: )?(java|org)\.[\w.]+: )+")
_ENDED = re.compile(
    r'<_(?:MultiThreadedRendezvous|InactiveRpcError) of RPC.*?\sdetails = "(?P<said>[^"\n]*)'
    r"|(?:\([\w.]+\) )?\[(?:NO_ACTIVE_SESSION|RETRIES_EXCEEDED|INVALID_HANDLE\.SESSION_\w+)\] "
    r"(?P<told>[^\n]*)",
    re.S,
)
"""The beginning of the error of a failed call to a Spark Connect server. The error of a query may
contain the same text, if the user's own code calls another server."""
_FUTURE = re.compile(r"^:? ?java\.util\.concurrent\.ExecutionException: ")
"""The wrapper that Java puts around the error of a job in the background."""


def of_python(text: str) -> bool:
    """Return whether Spark reports a Python exception, with its traceback."""
    return _TRACE.search(text) is not None


def of_modules(text: str) -> bool:
    """Return whether Spark reports that the executors lack a module of the user, or have another."""
    return _OF_MODULES.search(text) is not None


def explain(text: str) -> str:
    """Return one line with partition, node, attempts and error, followed by any Python traceback.

    Spark names the task in the report of a failed job. Since 4.1 it reports a Python error in a
    task as that error alone; the location then comes from the note that the task added, see
    ``map_frames``.
    """
    waited = _WAITED.search(text)
    if waited:
        return waited[0]
    if _VERSIONS.search(text):
        return _interpreters(text)
    place = PLACE.search(text) or _TASK.search(text)
    where = ""
    if place:
        attempts = int(place["attempts"])
        times = "once" if attempts == 1 else f"{attempts} times"
        where = f"partition {place['partition']} on {place['node']} failed {times}. "
    started = _NOT_STARTED.search(text)
    if started:  # Spark indents the output of the daemon
        said = textwrap.dedent(started["said"]).strip()
        return f"{where}{_did_not_start(said)}"
    trace = _TRACE.search(text)
    if trace:
        lines = PLACE.sub("", _WORKER.sub("", trace[0])).strip().splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
        after = [line for line in lines[heads[-1] + 1 :] if line and not line.startswith(" ")]
        first = after[0] if after else lines[-1]
        if missing := _MISSING.match(first):
            first += f'. The executors have no module "{missing[1]}". {REMEDY}'
        first += limit_hint(first)
        return f"{where}{first}\n" + "\n".join(lines)
    if place:  # no Python error: take Spark's text after the name of the task
        first = text[place.end() :].lstrip(": ").partition("\n")[0]
    else:
        lines = [line for line in text.splitlines() if not line.startswith("\tat ")]
        named = [line for line in lines if "Exception" in line or "Error" in line]
        causes = [line for line in named if not _FUTURE.match(line)]
        first = next(iter(causes or named), text)
    reason = _JAVA_CLASS.sub("", first.strip())
    if reason.startswith("Python worker exited unexpectedly"):
        reason = "The Python worker died: it was killed, ran out of memory, or crashed."
        reason += limit_hint(reason)
    return where + reason


def limit_hint(text: str) -> str:
    """Return the remedy if a process may have died of a limit of its address space, else ""."""
    if not _NO_MEMORY.search(text):
        return ""
    context = SparkContext._active_spark_context
    limit = None if context is None else context._conf.get("spark.executor.pyspark.memory")
    if limit:
        whose = (
            f"spark.executor.pyspark.memory={limit} limits the address space of each Python worker"
        )
    elif (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        whose = f"ulimit -v limits the address space of a process to {soft / 2**30:.3g} GiB"
    else:
        return ""
    start = "" if text.endswith((".", "!")) else "."
    return (
        f"{start} {whose}, of which Python and torch take 1 GiB without any model, and maps of shared "
        "memory count too: raise or unset it."
    )


def _lacking(module: str) -> str:
    """Name the interpreter of the executors that has no ``module``, and what the driver imports."""
    context = SparkContext._active_spark_context
    executors = "" if context is None else f' ("{context.pythonExec}")'
    return (
        f"the Python of the executors{executors} has no {module}, which the driver imports from "
        f"{Path(str(sys.modules[module].__file__)).parent}: install it there, or ship it with "
        "spark-submit --py-files or --archives, as docs/guide/packaging.md says."
    )


def _interpreters(text: str) -> str:
    """Name the interpreters of the driver and of the executors; empty if PySpark does not mind them."""
    found = _VERSIONS.search(text)
    if found is None:
        return ""
    context = SparkContext._active_spark_context
    executors = "" if context is None else f' ("{context.pythonExec}")'
    return (
        f"the executors run Python {found['executors']}{executors} and the driver Python "
        f'{found["driver"]} ("{sys.executable}"), and PySpark needs one minor version on both. Set '
        f"spark.pyspark.python or PYSPARK_PYTHON to a Python {found['driver']} that every node has, "
        "and start a new session."
    )


def check_session(text: str) -> None:
    """Raise SessionError or TrainingError if the text is neither of the data nor of a task."""
    _check_server(text)
    if lacking := _LACKING.search(text):
        raise SessionError(_lacking(lacking[1])) from None
    if "[OPERATION_CANCELED]" in text:
        raise TrainingError(
            "the query was cancelled, by spark.interruptAll() or the like, or at the server. "
            'resume="latest" continues a fit that wrote checkpoints.'
        ) from None
    if differ := _interpreters(text):
        raise SessionError(differ) from None


def _check_server(text: str) -> None:
    """Raise SessionError if the text is of a call to a Spark Connect server that failed as such."""
    ended = _ENDED.match(text)
    if ended is not None:
        said = (ended["said"] or ended["told"] or "it said nothing").rstrip(".")
        raise _session_ended(f"it was stopped, or its server went away ({said})") from None


def _session_ended(how: str) -> SessionError:
    return SessionError(
        f"the Spark Connect session ended: {how}. Make a new one with "
        "SparkSession.builder.remote(address).getOrCreate(), and load the data again with it. "
        'resume="latest" continues a fit that wrote checkpoints.'
    )


@contextlib.contextmanager
def end_of_session_explained(session: Any) -> Iterator[None]:
    """Make a SessionError of what a client's calls raise once a Spark Connect session has ended."""
    try:
        yield
    except Exception as error:
        if session.is_stopped:  # each part of PySpark and gRPC then has an error of its own
            raise _session_ended("it was stopped while it was in use") from None
        if isinstance(error, PySparkException):
            _check_server(str(error))
        raise


def _did_not_start(said: str) -> str:
    """Explain why an executor's Python ended before it took tasks; ``said`` is its output."""
    *before, last = said.splitlines() or ["it said nothing"]
    hint = (
        " The Python of the executors (spark.pyspark.python) needs sparkdl, torch and what they need: "
        "install them there, or ship an environment with --archives. The driver's Python is "
        f'"{sys.executable}".'
        if "No module named" in last
        else ""
    )
    return f"Python did not start: {last}.{hint}" + (f"\n{said}" if before else "")


@contextlib.contextmanager
def query_log_hushed() -> Iterator[None]:
    """Silence PySpark's own log of a query that fails, with the stack of Java: an error tells it."""

    def hush(record: logging.LogRecord) -> bool:
        return False

    logs: list[logging.Logger] = []
    with contextlib.suppress(ImportError):  # Spark 3.5 has none
        from pyspark.logger import PySparkLogger

        names = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
        logs = [PySparkLogger.getLogger(name) for name in names]
    for log in logs:
        log.addFilter(hush)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(hush)


@contextlib.contextmanager
def reading_explained(doing: str = "reading the data") -> Iterator[None]:
    """Translate the errors of jobs that read the data; ``doing`` says what the data are read for.

    A query or row that fails is a DataError; a model that fails on rows, or user modules that the
    executors lack, a ModelError; the rest is as in :func:`faults_explained`.
    """
    try:
        with query_log_hushed():
            yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        check_session(text)
        if mistake := _OF_MODULES.search(text):
            raise ModelError(f"{doing}: {mistake[1]}") from None
        if told := _IN_ROWS.search(text):
            raise _MISTAKES[told[1]](f"{doing}: {told[2].strip()}") from None
        reason = of_query(explain(text))
        if isinstance(error, Py4JError) or "sparkdl.errors." in text or deleted(reason):
            raise _kind(reason)(f"{doing}: {reason}") from None
        reason = explain(text) if of_python(text) else of_query(text)
        raise DataError(
            "the data cannot be read: "
            f"{reason.rstrip('. ')}{chr(10) if chr(10) in reason else '. '}Fix the query or the "
            "function that produces the data; data.count() fails in the same way."
        ) from None


def of_query(text: str) -> str:
    """Return Spark's message about a query, without the error class and the SQL state."""
    first, newline, trace = text.strip().partition("\n")
    return _LABEL.sub("", first) + (newline + trace if trace.startswith("Traceback") else "")


_OF_MODULES = re.compile(r"errors\.ModelError: (the executors (?:cannot import|have other) .*)")
"""The message of an error that :mod:`sparkdl.usercode` raises in a task."""


_MISTAKES: dict[str, type[UserError]] = {"DataError": DataError, "ModelError": ModelError}
_IN_ROWS = re.compile(
    r"(?:^|^\[USER_RAISED_EXCEPTION\] |java\.lang\.RuntimeException: )"
    r"sparkdl\.errors\.(DataError|ModelError): "
    r"(.*?)(?=\n\s*at |\n? ?SQLSTATE|\Z)",
    re.S | re.M,
)
"""A mistake that a prediction or a column of sparkdl finds in rows, as Spark reports it, with frames of
the user's model."""
_LABEL = re.compile(r"^\[[A-Z_.0-9]+\] | SQLSTATE: \w+.*$")


_DELETED = re.compile(
    rf"{StaleReferenceError.__name__}:|Could not compute split, block rdd_"
    r"|FileNotFoundError: [^\n]*/sparkdl-[^/\n]+-[0-9a-f]{16}\b"
)
"""The error of a task that misses what was deleted or overwritten: a slab, a file in a slab root, or a
stored block, which another fit on the same samples has just had written again."""


def deleted(reason: str) -> bool:
    """Return whether a task failed because slabs were deleted."""
    return _DELETED.search(reason.partition("\n")[0]) is not None


@contextlib.contextmanager
def faults_explained(doing: str) -> Iterator[None]:
    """Translate the error of a failed Spark job into one that says what failed, where and why.

    It is a StateLostError if slabs were deleted, a StalledError if nothing happened, a SessionError
    for another Python or a session that ended, else a TrainingError.
    """
    try:
        yield
    except (Py4JError, PySparkException) as error:
        check_session(str(error))
        reason = explain(str(error))
        raise _kind(reason)(f"{doing}: {reason}") from None


def _kind(reason: str) -> type[TrainingError]:
    if reason.startswith(WAITED):
        return StalledError
    return StateLostError if deleted(reason) else TrainingError


MOST = 8
"""The largest number of tasks that a message names."""


class Watchdog:
    """A thread that watches the jobs of a job group until :meth:`stop`.

    If none of their tasks starts or ends for ``seconds`` (None: no limit), the jobs are cancelled,
    and Spark reports the reason to whoever waits for them.
    """

    def __init__(self, context: SparkContext, group: str, seconds: float | None) -> None:
        self._context, self._group, self._seconds = context, group, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sparkdl-watch", daemon=True)
        if seconds is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        assert self._seconds is not None
        pause = min(10.0, self._seconds / 4)
        before, since = None, 0.0
        while not self._stopped.wait(pause):
            with contextlib.suppress(Py4JError, OSError):
                stages = self._stages()
                since = since + pause if stages and stages == before else 0.0
                before = stages
                if since >= self._seconds:
                    self._cancel(stages)
                    since = 0.0

    def _stages(self) -> list[tuple[Any, ...]]:
        """Return the state of each active stage and job, which changes whenever something happens."""
        tracker = self._context.statusTracker()
        found: list[tuple[Any, ...]] = []
        active = set(tracker.getActiveJobsIds())
        for job in sorted(active.intersection(tracker.getJobIdsForGroup(self._group))):
            info = tracker.getJobInfo(job)
            for number in sorted(info.stageIds if info else ()):
                stage = tracker.getStageInfo(number)
                if stage is not None:
                    found.append((job, *stage))
            found.append((job,))
        return found

    def _cancel(self, stages: list[tuple[Any, ...]]) -> None:
        """Cancel the jobs, with a reason that names the tasks that still run."""
        store = self._context._jsc.sc().statusStore()
        waited = []
        for number in dict.fromkeys(stage[1] for stage in stages if len(stage) > 1):
            with contextlib.suppress(Py4JError):  # Spark has not started this stage
                data = store.lastStageAttempt(number)
                tasks = store.taskList(number, data.attemptId(), 1 << 20)
                waited += [
                    f"partition {task.partitionId()} on executor {task.executorId()} ({task.host()})"
                    for task in (tasks.apply(i) for i in range(tasks.size()))
                    if task.status() == "RUNNING"
                ]
        if len(waited) > MOST:
            waited[MOST:] = [f"{len(waited) - MOST} more"]
        executors = self._context._jsc.sc().getExecutorMemoryStatus().size() - 1  # less the driver
        if waited:
            whom, who = ", ".join(waited), "tasks really take that long"
        elif executors:
            whom = f"a free executor: there are {executors}, but no task of the job runs"
            who = "others really need them for that long"
        else:
            whom = "an executor: there is none, so no task can run"
            who = "the cluster really takes that long"
        reason = (
            f"{WAITED} {self._seconds:g} s for {whom}. Nothing happened in that time. If {who}, "
            "raise spark.sparkdl.timeout.seconds."
        )
        cancel_group(self._context, self._group, reason)
