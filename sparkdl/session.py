"""Spark sessions: creating one that is set up for training, and checking any other."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdl import archive
from sparkdl.errors import NEEDS_SPARK_4, SessionError, shown, wrong_data
from sparkdl.plain import plain
from sparkdl.settings import NEEDED_FOR_SPEED, PREFIX, SPARK_SETTINGS, Settings

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger("sparkdl")
_warned: set[str] = set()
DAEMON = "spark.python.daemon.module"
SOCKETS = "spark.python.unix.domain.socket.enabled"
_ANOTHERS_DAEMON = (
    "slower than necessary: %s=%s is another library's, and stays as it is (%s). It can import "
    "torch before it forks: with sparkdl.daemon.preload()."
)
_SET_BY_THE_LAUNCHER = ("spark.ui.showConsoleProgress",)
"""Keys that PySpark sets by itself when it starts the JVM, so their values are not the user's
choice."""
_MASTER = re.compile(
    r"local(\[([1-9]\d*|\*)(\s*,\s*\d+)?\])?"
    r"|local-cluster\[(\s*\d+\s*,){2}\s*\d+\s*\]|yarn|[a-z][a-z0-9+.-]*://.+"
)
"""Matches the masters that Spark knows, and URLs of any cluster manager that may be plugged into it."""


_TELLTALES = (
    "TaskContextImpl",
    "executor.Executor",
    "scheduler.TaskSetManager",
    "sql.execution.datasources.FileFormatWriter",
    "sql.execution.datasources.v2.AppendDataExec",
    "sql.execution.datasources.v2.OverwriteByExpressionExec",
    "util.Utils",
)


def session(master: str | None = None, **settings: Any) -> SparkSession:
    """Return a SparkSession with the settings of ``conf/spark-defaults.conf``.

    A session that is already running is returned as it is, and a warning names the arguments that
    have no effect on it. Settings that ``spark-submit`` or its properties file made stay unless they
    are given here. Workers run this Python interpreter unless ``PYSPARK_PYTHON`` or
    ``spark.pyspark.python`` names another one.

    Args:
        master: A Spark master URL; None leaves the choice to ``spark-submit``, or is ``local[*]``.
        settings: Spark settings, as in ``session("local[2]", **{"spark.ui.enabled": "false"})``. An
            underscore stands for a dot, so ``spark_driver_memory="4g"`` works, too.

    Raises:
        SessionError: ``master`` is not a Spark master, this process uses Spark Connect, or there is no
            Java that starts.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    if is_remote() or os.environ.get("SPARK_REMOTE"):
        raise SessionError(
            "this process uses Spark Connect, and sparkdl.session makes classic sessions; Spark has "
            "one kind in a process. Use the session that is there "
            "(SparkSession.builder.getOrCreate()), or start another process without SPARK_REMOTE and "
            "builder.remote."
        )
    if str(master).startswith("sc://"):
        raise SessionError(
            f"master={shown(master)} is the address of a Spark Connect server, and sparkdl.session "
            f'makes classic sessions: use SparkSession.builder.remote("{master}").getOrCreate().'
        )
    if master is not None and not _MASTER.fullmatch(str(master)):
        raise SessionError(
            f"master={shown(master)} is not a Spark master. Give local, local[2] or local[*], yarn, or "
            "a cluster's URL, such as spark://host:7077 or k8s://https://host:443."
        )
    given = {
        (key if "." in key else key.replace("_", ".")): str(value).lower()
        if isinstance(value, bool)
        else str(value)
        for key, value in plain(settings).items()
    }
    # With pandas 3, Spark warns at each of its functions; docs/versions.md says what is tested.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    conf = _launched(given, master)
    python = given.get("spark.pyspark.python") or conf.get("spark.pyspark.python")
    os.environ.setdefault("PYSPARK_PYTHON", python or sys.executable)
    if sys.platform == "darwin":  # the workers are forked, with torch imported
        os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    builder = SparkSession.builder
    for key, (value, _) in SPARK_SETTINGS.items():
        if not conf.contains(key) or (key in _SET_BY_THE_LAUNCHER and not submitted):
            builder = builder.config(key, value)
    for key, value in given.items():
        builder = builder.config(key, value)
    if master is not None:
        builder = builder.master(master)
    elif not conf.contains("spark.master"):
        builder = builder.master("local[*]")
    running = SparkContext._active_spark_context
    spark = builder.getOrCreate()
    if running is not None and spark.sparkContext is running:
        _tell_what_is_kept(spark, given if master is None else {"spark.master": master, **given})
    level = given.get("spark.log.level", conf.get("spark.log.level"))
    spark.sparkContext.setLogLevel(level or "ERROR")
    if "spark.log.level" not in given and level in (None, "ERROR"):
        _hush(spark.sparkContext)
    return spark


def _hush(context: SparkContext) -> None:
    """Silence what logs the stack of a failed task, which comes as an exception anyway."""
    log4j: Any = context._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in _TELLTALES:
        log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)


def _tell_what_is_kept(spark: SparkSession, asked: Mapping[str, str]) -> None:
    """Warn of the ``asked`` settings that have no effect on ``spark``, which was running before."""
    conf = spark.sparkContext._conf
    without_effect = [
        key
        for key, value in asked.items()
        if conf.get(key) != value
        and not key.startswith(PREFIX)
        and key != "spark.log.level"
        and not spark.conf.isModifiable(key)
    ]
    if without_effect:
        logger.warning(
            "a session with spark.master=%s is already running and is kept. Without effect: %s. To get "
            "another session, stop that one first, with spark.stop().",
            conf.get("spark.master"),
            ", ".join(
                f"{key}={asked[key]}" if key == "spark.master" else key for key in without_effect
            ),
        )


def _launched(given: dict[str, str], master: str | None) -> SparkConf:
    """Return what ``spark-submit`` and Spark's properties file set, which only the JVM knows.

    If no JVM runs, one is started with ``given`` (its memory, for example), and with the archive of
    Java's classes if there is one.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError

    launch = SparkConf()
    for key, value in given.items():
        launch.set(key, value)
    starts = SparkContext._gateway is None
    used = archive.used(master or given.get("spark.master")) if starts else contextlib.nullcontext()
    try:
        with used:
            SparkContext._ensure_initialized(conf=launch)
    except PySparkRuntimeError:
        raise SessionError(_why_no_jvm()) from None
    return SparkConf()


def _why_no_jvm() -> str:
    program = archive.java()
    if program is None or shutil.which(program) is None:
        place = "" if program is None else f" at {program}"
        return f"there is no Java{place}: install Java 17 or newer, on PATH or in JAVA_HOME."
    return (
        "Spark's JVM did not start, for the reason that it printed above. The Java is "
        f"{program}, and Spark 4 needs 17 or newer."
    )


def is_connected(thing: Any) -> bool:
    """Return whether ``thing`` is a DataFrame or a session of Spark Connect."""
    return type(thing).__module__.startswith("pyspark.sql.connect")


def connected_session_of(data: Any, method: str) -> Any:
    """Return the session of a DataFrame of Spark Connect, which ``method`` takes; it must run."""
    from pyspark.sql import DataFrame

    if not isinstance(data, DataFrame):
        remedy = "Read one with spark.read or spark.table."
        raise wrong_data(method, data, "a DataFrame", remedy)
    session: Any = data.sparkSession
    check_running(session)
    return session


def check_running(session: Any) -> None:
    """Raise SessionError if a session of Spark Connect was stopped, or cannot run gangs."""
    from sparkdl.compat import CONNECT

    if not CONNECT:
        raise SessionError(NEEDS_SPARK_4)
    if session.is_stopped:
        raise SessionError(
            "the Spark Connect session was stopped, here or by its server: make a new one with "
            "SparkSession.builder.remote(address).getOrCreate(), and load the data again with it."
        )


def context_of(data: Any) -> SparkContext:
    """Return the SparkContext of a DataFrame or an RDD, which must run and be no Connect session's."""
    from pyspark import RDD
    from pyspark.sql import DataFrame

    if isinstance(data, RDD):
        return _running(data.ctx)
    if isinstance(data, DataFrame) and hasattr(data.sparkSession, "_sc"):
        return _running(data.sparkSession._sc)
    if is_connected(data):
        raise SessionError(
            "this DataFrame belongs to a Spark Connect session, which has no RDDs, and this needs "
            "them. There, Trainer.fit, partial_fit, fit_groups and tune.search train, and "
            "sparkdl.gang.run runs functions. For anything else start a classic session on the "
            "cluster: sparkdl.session(master), or spark-submit your script; do not set spark.remote "
            "or SPARK_REMOTE."
        )
    raise wrong_data(
        "fit",
        data,
        "a DataFrame or an RDD",
        "Make one with spark.createDataFrame(rows, schema) or spark.sparkContext.parallelize(samples).",
    )


def _running(context: SparkContext) -> SparkContext:
    """Return ``context``. Raises SessionError if its session was stopped."""
    if context._jsc is None or context._jsc.sc().isStopped():
        raise SessionError(
            "the session of this data was stopped: make a new one with sparkdl.session(master), "
            "and load the data again with it."
        )
    return context


@dataclass(frozen=True)
class SessionFacts:
    """The Spark session of a fit's data, and its settings, read once."""

    session: Any  # None: of an RDD, in a thread without one
    context: Any  # the SparkContext; None: Spark Connect
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings that are other ones here

    @staticmethod
    def of(data: Any, method: str, **changes: Any) -> SessionFacts:
        """Return the facts of the session of ``data``, which ``method`` takes.

        Raises what :func:`connected_session_of` and :func:`context_of` raise.
        """
        if is_connected(data):
            return SessionFacts(connected_session_of(data, method), None, changes)
        context = context_of(data)
        tell_what_costs_speed(context)
        from pyspark.sql import DataFrame, SparkSession

        session = data.sparkSession if isinstance(data, DataFrame) else None
        return SessionFacts(session or SparkSession.getActiveSession(), context, changes)

    @functools.cached_property
    def settings(self) -> Settings:
        """The checked ``spark.sparkdl.*`` settings. Raises what :func:`settings_of` raises."""
        return replace(settings_of(self.context, self.session), **self.changes)

    @property
    def application(self) -> str:
        """The id of the application, or of the session of Spark Connect."""
        if self.context is None:
            return f"connect-{self.session.session_id}"
        return str(self.context.applicationId)

    def check_beside(self, data: Any) -> None:
        """Raise DataError or SessionError unless other data is of a session of the same kind."""
        if self.context is not None:
            context_of(data)
        elif not is_connected(data):
            raise SessionError(
                "it is not a DataFrame of a Spark Connect session, as the training data is: make both "
                "with one session."
            )


def settings_of(context: SparkContext | None, session: SparkSession | None = None) -> Settings:
    """Return the checked ``spark.sparkdl.*`` settings.

    They are those of ``session`` (``spark.conf.set``), which begin as those of its application, or
    those of the application if ``session`` is None. A session of Spark Connect has no ``context``.
    """
    if session is None:
        assert context is not None
        found = context._conf.getAll()
    else:
        found = _all_of(session)
    given = {key: value for key, value in found if key.startswith(PREFIX)}
    return Settings.read(lambda key, default: given.get(key) or default, list(given))


def _all_of(session: SparkSession) -> list[tuple[str, str]]:
    """Return the settings of a session by name.

    ``conf.getAll`` of a classic session calls the JVM three times for each of them.
    """
    if not hasattr(session, "_jsparkSession"):
        return list(session.conf.getAll.items())
    text = session._jsparkSession.conf().getAll().mkString("\0")
    return [(key, value) for key, _, value in (pair.partition(" -> ") for pair in text.split("\0"))]


def tell_what_costs_speed(context: SparkContext) -> list[str]:
    """Log each Spark setting whose absence slows training, once per application.

    Return the keys that are missing.
    """
    from sparkdl.compat import UNIX_SOCKETS, untried

    conf = context._conf
    needed = [key for key in NEEDED_FOR_SPEED if UNIX_SOCKETS or key != SOCKETS]
    missing = [key for key in needed if conf.get(key, "") != SPARK_SETTINGS[key][0]]
    if context.applicationId not in _warned:
        _warned.add(context.applicationId)
        if (sentence := untried()) is not None:
            logger.warning(sentence)
        for key in missing:
            value, reason = SPARK_SETTINGS[key]
            if key == DAEMON and conf.get(key, "") not in ("", "pyspark.daemon"):
                logger.warning(_ANOTHERS_DAEMON, key, conf.get(key, ""), reason)
            else:
                logger.warning("slower than necessary: set %s=%s (%s)", key, value, reason)
    return missing
