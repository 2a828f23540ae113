"""Spark waits for the executors that samples and state are on, whatever the session says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark import SparkContext

WAIT = "spark.locality.wait"
ENOUGH_SECONDS = 3.0
"""Spark's own default."""
ONE_SECONDS = 60.0
"""How long a task that is for one executor, and would do nothing elsewhere, waits for it."""


@contextlib.contextmanager
def places_awaited(context: SparkContext) -> Iterator[None]:
    """Inside the block Spark keeps a task for its executor for :data:`ENOUGH_SECONDS` at least.

    Sessions set it to 0 for the sake of queries. A task of ours that runs elsewhere than its state can
    do nothing, and where there are more of them than slots Spark would send some elsewhere each time.
    Spark looks it up as a stage begins; the three finer settings, if given, stay as they are.
    """
    sc = context._jsc.sc() if context._jsc is not None else None
    if sc is None or sc.isLocal():
        yield
        return
    conf = sc.conf()
    before = conf.get(WAIT, "3s")
    if conf.getTimeAsMs(WAIT, "3s") < ENOUGH_SECONDS * 1000:
        conf.set(WAIT, f"{ENOUGH_SECONDS:g}s")
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError):  # the session may be gone
            if conf.get(WAIT, "3s") != before:
                conf.set(WAIT, before)


@contextlib.contextmanager
def executor_awaited(context: SparkContext) -> Iterator[None]:
    """Inside the block a task goes to the executor it is for, or, where that is lost, to another."""
    conf, key = context._jsc.sc().conf(), f"{WAIT}.process"  # type: ignore[union-attr]
    before = conf.get(key) if conf.contains(key) else None
    conf.set(key, f"{ONE_SECONDS:g}s")
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError):
            conf.remove(key) if before is None else conf.set(key, before)
