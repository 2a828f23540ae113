"""What the driver tells all tasks of a job, without building the job's RDDs anew.

A task body is pickled when its RDD is built. What differs from one iteration to the next goes into a
property of the job instead, which Spark hands to every task with its description: so the RDDs of an
iteration can be built before it is known what they shall do.

A message names the fit that it is of, and a task takes none of another fit: properties belong to
threads, and several fits may run in one session.
"""

from __future__ import annotations

import base64
import functools
import pickle
import zlib
from typing import Any

from pyspark import SparkContext, TaskContext

from sparkdl.errors import TrainingError
from sparkdl.spark.properties import are_of_this_thread

PROPERTY = "sparkdl.spark.message"
MAX_BYTES = 16 << 10
"""Every task description holds the properties, so a larger message belongs into the task body,
which an executor fetches once."""


def post(context: SparkContext, fit: str, value: Any) -> bool:
    """Tell ``value`` to the tasks of the jobs that this thread submits; ``fit`` is the key of the run.

    False: it is too large, or what a thread sets need not reach its jobs.
    """
    if not are_of_this_thread():
        return False
    data = zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), level=1)
    if len(data) > MAX_BYTES:
        return False
    context.setLocalProperty(PROPERTY, f"{fit} {base64.b64encode(data).decode()}")
    return True


def posted(fit: str) -> Any:
    """In a task of the run with the key ``fit``: what its job was told.

    Raises :class:`sparkdl.TrainingError` where that is nothing, or of another fit.
    """
    context = TaskContext.get()
    text = context.getLocalProperty(PROPERTY) if context is not None else None
    told, _, content = (text or "").partition(" ")
    if told != fit:
        raise TrainingError(
            f"the job of this task was told {'the step of another fit' if told else 'nothing'}: the "
            "local properties of the thread that trains were changed by another thread. Start threads "
            "with pyspark.InheritableThread, and let none of them call setLocalProperties of Spark's "
            "JVM."
        )
    return _decoded(content)


@functools.lru_cache(maxsize=1)
def _decoded(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))
