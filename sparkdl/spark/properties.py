"""Local properties of Spark, which a thread's jobs are submitted with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark import SparkContext


@contextlib.contextmanager
def own_properties(context: SparkContext) -> Iterator[None]:
    """Give this thread a copy of its local properties inside the block; restore them afterwards.

    Threads may share one set of properties, as those of ``pyspark.ml.tuning`` do. The jobs of each
    would then be submitted with the values that any of them set last. For example, they would be in
    the job group of another fit, and cancelled with it.
    """
    if context._jsc is None:  # the context was stopped
        yield
        return
    spark = context._jsc.sc()
    before = spark.getLocalProperties()
    spark.setLocalProperties(before.clone())
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError, OSError):  # it may have been stopped in the meantime
            spark.setLocalProperties(before)
