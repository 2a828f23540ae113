"""Python daemons of a session's first fit, started while the driver still prepares it.

A daemon imports torch and more for two seconds when Spark first has a Python task for its executor.
Meanwhile the driver builds the model, imports what torch's first optimizer takes, and plans the query,
which takes as long again. One after the other is what a user would wait for.
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
    """Start one on each executor, if no fit of this session did so. Only an error waits for them.

    An error inside the block is often followed by the end of the session. Spark would then report a
    task that has not started as crashed, and one that still runs as without its broadcast: they get
    ``SECONDS_TO_END``, and what has not started then is cancelled.
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
        with contextlib.suppress(Py4JError):  # time is over, or Spark is gone
            seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
            try:
                starting.get(SECONDS_TO_END, seconds)
            finally:
                starting.cancel(True)
        raise


def nothing(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Task: its worker is there when it begins."""
    for _ in frames:
        pass
    return iter(())
