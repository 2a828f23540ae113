"""Start of the Python daemons for a session's first fit, while the driver still prepares it.

A daemon imports torch and more for two seconds when Spark first has a Python task for its executor.
Meanwhile the driver builds the model, imports what torch's first optimizer needs, and plans the
query, which takes about as long. Without this module, a user would wait for both in sequence.

On a cluster the driver waits for the daemons: if executors lack sparkdl or torch, that is told before
any data are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.errors import SessionError
from sparkdl.spark.executors import executors, task_per_executor
from sparkdl.spark.failures import check_session
from sparkdl.spark.frames import map_frames, stage_name
from sparkdl.spark.properties import own_properties

SECONDS_TO_END = 5
SECONDS_TO_START = 30
"""The longest wait for the daemons of a cluster, whose executors may still have to come."""
_begun: WeakSet[SparkContext] = WeakSet()


@contextlib.contextmanager
def warming_up(context: SparkContext) -> Iterator[None]:
    """Start a daemon on each executor, if no fit of this session has done so.

    In local mode the block does not wait for the daemons unless it raises an error. On a cluster it
    begins when they run, and SessionError is raised if their Python cannot run tasks of sparkdl.

    An error is often followed by the end of the session. Spark would then report a task that has not
    started as crashed, and a running one as missing its broadcast. Therefore tasks get
    ``SECONDS_TO_END``, and any that has not started is cancelled.
    """
    if context in _begun:
        yield
        return
    _begun.add(context)
    jvm: Any = context._jvm
    with own_properties(context), stage_name(context, "start Python"):
        places = task_per_executor(context, executors(context) or [None])
        starting = map_frames(places, nothing)._jrdd.countAsync()
    try:
        _check(context, starting)
        yield
    except BaseException:
        with contextlib.suppress(Py4JError):  # the time is up, or Spark is gone
            seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
            try:
                starting.get(SECONDS_TO_END, seconds)
            finally:
                starting.cancel(True)
        raise


def check_python(context: SparkContext) -> None:
    """Raise SessionError if executors of a cluster cannot run tasks of sparkdl."""
    if not context._jsc.sc().isLocal():  # type: ignore[union-attr]
        with warming_up(context):
            pass


def _check(context: SparkContext, starting: Any) -> None:
    """Wait for the daemons of a cluster; any failure but that of their Python is left to later jobs."""
    jvm: Any = context._jvm
    if context._jsc.sc().isLocal():  # type: ignore[union-attr]
        return
    try:
        starting.get(SECONDS_TO_START, jvm.java.util.concurrent.TimeUnit.SECONDS)
    except Py4JError as error:
        try:
            check_session(str(error))
        except SessionError:
            _begun.discard(context)
            raise


def nothing(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Task: do nothing, because the worker has started when the task begins."""
    for _ in frames:
        pass
    return iter(())
