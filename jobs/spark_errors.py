"""One line, instead of a stack trace, for mistakes that Spark and Java report."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException

from sparkdl import ParameterError

# Spark's conditions of such kinds, by SQL's state: settings, features, data, names, sources.
_MISTAKE = re.compile(r"\[[A-Z0-9_.]+\] (.*?) SQLSTATE: (?:F0|0A|22|42|KD)\w+", re.DOTALL)
_INPUT_OUTPUT = re.compile(
    r": (?:java\.io|java\.nio\.file|org\.apache\.hadoop\.(?:fs|security))\.\w+Exception: (.+)"
)


def status_of(error: PySparkException | Py4JJavaError) -> tuple[int, str | None]:
    """Return the exit status and the message of an exception of Spark.

    The status is 2 for a mistake that Spark found (a path, a column, a file that cannot be read or
    written) or that an executor found in a row; 1, without a message, for a fault."""
    text = str(error)
    found = re.search(r"sparkdl\.errors\.\w*Error: (.*?)(?:\n\s*\n|\n\tat |\Z)", text, re.DOTALL)
    if found:
        return 2, found[1].strip()
    if isinstance(error, AnalysisException | IllegalArgumentException):
        return 2, _short(text).split("\n", 1)[0]
    if isinstance(error, Py4JJavaError):
        said = text.split("\n\tat ", 1)[0]
        found = _MISTAKE.search(said) or _INPUT_OUTPUT.search(said)
        if found:
            return 2, _short(found[1])
    return 1, None


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turn any exception of Java inside into a mistake of the user: ``what``, and its message."""
    try:
        yield
    except AnalysisException:
        raise
    except Py4JJavaError as error:
        message = error.java_exception.getMessage() or error.java_exception.toString()
        raise ParameterError(f"{what}: {_short(message)}") from None
    except PySparkException as error:
        raise ParameterError(f"{what}: {_short(str(error))}") from None


def _short(message: str) -> str:
    """Return the message without the name and the state of Spark's condition."""
    return re.sub(r"^\[[A-Z0-9_.]+\] | SQLSTATE: \w+.*$", "", message).strip()
