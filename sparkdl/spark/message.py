"""Messages from the driver to all tasks of a job, which need no new RDDs.

A task body is pickled when its RDD is built. What differs between iterations goes into a property
of the job instead, which Spark sends to every task with its description. The RDDs of an iteration
can therefore be built before its content is known.

A message names its fit, and a task rejects messages of other fits: properties belong to threads,
and several fits may run in one session.
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
"""The size limit of a message. Every task description contains the properties, so a larger message
belongs in the task body, which an executor fetches once."""


def post(context: SparkContext, fit: str, value: Any) -> bool:
    """Send ``value`` to the tasks of the jobs that this thread submits.

    Args:
        context: The Spark context.
        fit: The key of the run.
        value: The message.

    Returns:
        False if the message is too large, or if a thread's properties need not reach its jobs.
    """
    if not are_of_this_thread():
        return False
    data = zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), level=1)
    if len(data) > MAX_BYTES:
        return False
    context.setLocalProperty(PROPERTY, f"{fit} {base64.b64encode(data).decode()}")
    return True


def posted(fit: str) -> Any:
    """Return the message of this task's job, in a task of the run with the key ``fit``.

    Raises:
        sparkdl.TrainingError: There is no message, or it is of another fit.
    """
    context = TaskContext.get()
    text = context.getLocalProperty(PROPERTY) if context is not None else None
    sender, _, content = (text or "").partition(" ")
    if sender != fit:
        raise TrainingError(
            f"the job of this task received {'the step of another fit' if sender else 'nothing'}: "
            "the local properties of the thread that trains were changed by another thread. Start "
            "threads with pyspark.InheritableThread, and let none of them call setLocalProperties "
            "of Spark's JVM."
        )
    return _decoded(content)


@functools.lru_cache(maxsize=1)
def _decoded(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))
