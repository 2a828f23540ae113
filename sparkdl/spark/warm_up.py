"""Start of the Python daemons for a session's first fit, while the driver still prepares it.

A daemon imports torch and more for two seconds when Spark first has a Python task for its executor.
Meanwhile the driver builds the model, imports what torch's first optimizer needs, and plans the
query, which takes about as long. Without this module, a user would wait for both in sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.spark.executors import executors, task_per_executor
from sparkdl.spark.frames import map_frames, stage_name
from sparkdl.spark.properties import own_properties

SECONDS_TO_END = 5
_begun: WeakSet[SparkContext] = WeakSet()


@contextlib.contextmanager
def warming_up(context: SparkContext) -> Iterator[None]:
    """Start a daemon on each executor, if no fit of this session has done so.

    The block does not wait for the daemons unless it raises an error. An error is often followed by
    the end of the session. Spark would then report a task that has not started as crashed, and a
    running one as missing its broadcast. Therefore tasks get ``SECONDS_TO_END``, and any that has
    not started is cancelled.
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
        yield
    except BaseException:
        with contextlib.suppress(Py4JError):  # the time is up, or Spark is gone
            seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
            try:
                starting.get(SECONDS_TO_END, seconds)
            finally:
                starting.cancel(True)
        raise


def nothing(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Task: do nothing, because the worker has started when the task begins."""
    for _ in frames:
        pass
    return iter(())
