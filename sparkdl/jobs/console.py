"""The console of the jobs: session, exit statuses, errors of Spark in few words, tables."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException

import sparkdl
from sparkdl.errors import ParameterError
from sparkdl.jobs.components import place_of
from sparkdl.spark.executors import check_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_interrupted = threading.Event()
# Spark's conditions of such kinds, by SQL's state: settings, features, data, names, sources.
_MISTAKE = re.compile(r"\[[A-Z0-9_.]+\] (.*?) SQLSTATE: (?:F0|0A|22|42|KD)\w+", re.DOTALL)
_INPUT_OUTPUT = re.compile(
    r": (?:java\.io|java\.nio\.file|org\.apache\.hadoop\.(?:fs|security))\.\w+Exception: (.+)"
)
_OF_A_TASK = re.compile(r"sparkdl\.errors\.\w*Error: (.*?)(?:\n\s*\n|\n\tat |\Z)", re.DOTALL)


def ended_by(error: BaseException) -> tuple[int, str | None]:
    """Return the exit status and the message; no message if the traceback says more.

    The status is 2 for a mistake of the user, 130 after an interrupt, or 1 for a fault."""
    if isinstance(error, KeyboardInterrupt) or _interrupted.is_set():
        return 130, "interrupted."  # in the midst of a call Py4J makes another error of it
    if isinstance(error, (sparkdl.UserError, sparkdl.CheckpointError, OSError)):
        message, place = str(error), place_of(error.__cause__)
        return 2, message + ("" if place in message else place)
    if isinstance(error, sparkdl.TrainingError):
        return 1, str(error)
    if isinstance(error, (PySparkException, Py4JJavaError)):
        return status_of(error)
    return 1, None


def status_of(error: PySparkException | Py4JJavaError) -> tuple[int, str | None]:
    """Return the exit status and the message of an exception of Spark.

    The status is 2 for a mistake that Spark found (a path, a column, a file that cannot be read or
    written) or that an executor found in a row; 1, without a message, for a fault."""
    text = str(error)
    if match := _OF_A_TASK.search(text):
        return 2, match[1].strip()
    if isinstance(error, AnalysisException | IllegalArgumentException):
        return 2, _short(text).split("\n", 1)[0]
    if isinstance(error, Py4JJavaError):
        said = text.split("\n\tat ", 1)[0]
        if match := _MISTAKE.search(said) or _INPUT_OUTPUT.search(said):
            return 2, _short(match[1])
    return 1, None


@contextlib.contextmanager
def told(what: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception of Java inside into a mistake of the user: ``what``, and its message."""
    try:
        yield
    except Py4JJavaError as error:
        message = error.java_exception.getMessage() or error.java_exception.toString()
    except PySparkException as error:
        message = str(error)
    else:
        return
    raise ParameterError(f"{what}: {_short(message.strip().splitlines()[0])}{remedy}") from None


def _short(message: str) -> str:
    """Return the message without the name and the state of Spark's condition."""
    return re.sub(r"^\[[A-Z0-9_.]+\] | SQLSTATE: \w+.*$", "", message).strip()


@contextlib.contextmanager
def session(
    app: str, master: str | None = None, settings: Mapping[str, Any] | None = None
) -> Iterator[SparkSession]:
    """Open a session, stopped at the end. A master given to ``spark-submit`` precedes ``master``."""
    given = {k: v for k, v in (settings or {}).items() if v is not None}
    given.setdefault("spark.app.name", app)
    submitted = _submitted_master()
    with told("Spark cannot start"):
        spark = sparkdl.session(None if submitted else master, **given)
    _leave_interrupts_to_python(spark)
    signal.signal(signal.SIGINT, _quietly(signal.getsignal(signal.SIGINT)))
    try:
        check_python(spark.sparkContext)
        yield spark
    finally:
        with contextlib.suppress(Exception):  # what ended the job is told, the JVM's end, say
            spark.stop()


def _leave_interrupts_to_python(spark: SparkSession) -> None:
    """Let the JVM ignore Ctrl-C, which reaches all processes of a terminal.

    Under spark-submit it would end Spark in the middle of what Python then does: finish the
    iteration, and write the model.
    """
    signals = spark.sparkContext._jvm.sun.misc  # type: ignore[union-attr]
    signals.Signal.handle(signals.Signal("INT"), signals.SignalHandler.SIG_IGN)


def _quietly(interrupt: Any) -> Callable[..., None]:
    """Silence Py4J's log during an interrupt.

    PySpark's handler calls the JVM in the middle of another call, and Py4J logs both stacks.
    """

    def quiet(*arguments: Any) -> None:
        _interrupted.set()
        logging.disable(logging.ERROR)
        interrupt(*arguments)

    return quiet


def _submitted_master() -> str | None:
    """Return the master given to ``spark-submit``; its own default, local[*], does not count."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    assert SparkContext._jvm is not None
    master = SparkConf().get("spark.master", "local[*]")
    command = SparkContext._jvm.System.getProperty("sun.java.command") or ""
    told = "local[*]" in command.split() or "spark.master=local[*]" in command
    return master if master != "local[*]" or told else None


def table(rows: Mapping[str, Any]) -> str:
    """Format names and values as two columns, with readable numbers."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}   {_readable(value)}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
