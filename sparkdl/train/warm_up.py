"""Python workers of a session's first fit, started while the driver still prepares it.

The worker daemon imports torch and more for two seconds when Spark first has a Python task for it.
Meanwhile the driver builds the model, imports what torch's first optimizer takes, and plans the query,
which takes as long again. One after the other is what a user would wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakSet

from pyspark import SparkContext

from sparkdl.frames import map_frames, stage_name

_begun: WeakSet[SparkContext] = WeakSet()


def start_workers(context: SparkContext) -> None:
    """Start the workers, one a task slot, if no fit of this session did so; nothing waits for it."""
    if context in _begun:
        return
    _begun.add(context)
    slots = context.defaultParallelism
    with stage_name(context, "start Python workers"):
        map_frames(context.parallelize(range(slots), slots), nothing)._jrdd.collectAsync()


def nothing(partition: int, records: Iterable[object]) -> Iterator[bytes]:
    """Task: its worker is there when it begins."""
    return iter(())
