"""Spark's local properties: what the jobs of a thread are submitted with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.clientserver import ClientServer
from py4j.protocol import Py4JError
from pyspark import SparkContext


@contextlib.contextmanager
def own_properties(context: SparkContext) -> Iterator[None]:
    """This thread has local properties of its own in the block, which begin as those that it had;
    after the block it has these again, as they were.

    Threads may share one set of properties, as those of ``pyspark.ml.tuning`` do. The jobs of each
    would be submitted with what any of them set last: in the job group of another fit, for one, and
    cancelled with it.
    """
    if context._jsc is None:  # it was stopped
        yield
        return
    spark = context._jsc.sc()
    before = spark.getLocalProperties()
    spark.setLocalProperties(before.clone())
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError, OSError):  # it may have been stopped meanwhile
            spark.setLocalProperties(before)


def are_of_this_thread() -> bool:
    """Whether Spark sees the calls of this thread as those of one thread.

    With ``PYSPARK_PIN_THREAD=false`` it does not: what one call sets as a local property, the job
    that the next call submits need not have.
    """
    return isinstance(SparkContext._gateway, ClientServer)
