"""What the driver tells all tasks of a job, without building the job's RDDs anew.

A task body is pickled when its RDD is built. What differs from one iteration to the next goes into a
property of the job instead, which Spark hands to every task with its description: so the RDDs of an
iteration can be built before it is known what they shall do.
"""

from __future__ import annotations

import base64
import functools
import pickle
import zlib
from typing import Any

from pyspark import SparkContext, TaskContext

PROPERTY = "sparkdl.message"
MAX_BYTES = 16 << 10
"""Every task description holds the properties, so a larger message belongs into the task body,
which an executor fetches once."""


def post(context: SparkContext, value: Any) -> bool:
    """Tell ``value`` to the tasks of the jobs that this thread submits; False: it is too large."""
    data = zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), level=1)
    if len(data) > MAX_BYTES:
        return False
    context.setLocalProperty(PROPERTY, base64.b64encode(data).decode())
    return True


def posted() -> Any:
    """In a task: what its job was told."""
    context = TaskContext.get()
    text = context.getLocalProperty(PROPERTY) if context is not None else None
    assert text is not None, "no message in this task's properties"
    return _decoded(text)


@functools.lru_cache(maxsize=1)
def _decoded(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))
