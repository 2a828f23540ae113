"""A failed Spark job as an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.errors import StaleReferenceError, StalledError, StateLostError, TrainingError
from sparkdl.spark.failures import WAITED, explain

_DELETED = f"{StaleReferenceError.__name__}:"
"""What a task says that reads what is no longer there."""


@contextlib.contextmanager
def faults_explained(doing: str) -> Iterator[None]:
    """Turn a failed Spark job into one :class:`TrainingError` that says what, where and why; into a
    :class:`StateLostError` where its tasks found slabs deleted, a :class:`StalledError` where nothing
    happened in it."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        reason = explain(str(error))
        raise _kind(reason)(f"{doing}: {reason}") from None


def _kind(reason: str) -> type[TrainingError]:
    if reason.startswith(WAITED):
        return StalledError
    return StateLostError if _DELETED in reason.partition("\n")[0] else TrainingError
