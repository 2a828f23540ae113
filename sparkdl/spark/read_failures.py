"""A Spark job that failed while it read the user's data, as an error of ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.errors import DataError, ModelError, StalledError, TrainingError
from sparkdl.spark.failures import WAITED, explain, of_python


@contextlib.contextmanager
def reading_explained(doing: str = "reading the data") -> Iterator[None]:
    """What Spark reports while it reads the data: a :class:`DataError` where the data's own query
    fails (a cast, a UDF, a function of ``rdd.map``), a :class:`ModelError` where a module of the user's
    is not there, else a :class:`TrainingError`. ``doing``: what the data are read for."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        text = str(error)
        if mistake := _OF_MODULES.search(text):
            raise ModelError(f"{doing}: {mistake[1]}") from None
        if isinstance(error, Py4JError) or "sparkdl.errors." in text:
            reason = of_query(explain(text))
            kind = StalledError if reason.startswith(WAITED) else TrainingError
            raise kind(f"{doing}: {reason}") from None
        told = explain(text) if of_python(text) else of_query(text)
        raise DataError(
            f"the data cannot be read: {told.rstrip('. ')}{chr(10) if chr(10) in told else '. '}"
            "Mend the query or the function that the data comes from; data.count() fails likewise."
        ) from None


def of_query(text: str) -> str:
    """What Spark says of a query: its sentences, without the class of the error and the SQL."""
    first, newline, trace = text.strip().partition("\n")
    return _LABEL.sub("", first) + (newline + trace if trace.startswith("Traceback") else "")


_OF_MODULES = re.compile(r"errors\.ModelError: (the executors (?:cannot import|have other) .*)")
"""See :mod:`sparkdl.usercode`."""
_LABEL = re.compile(r"^\[[A-Z_.0-9]+\] | SQLSTATE: \w+.*$")
