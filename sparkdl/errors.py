"""Every exception sparkdl raises on purpose: one small tree.

A *user error* (:class:`UserError` and below) is a mistake in what was given: the data, the model,
a parameter. It is found before the first training task, names the place and the remedy, and is
never retried. Everything else is a *fault* of the run, which Spark retries first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_VOWEL_SOUND = re.compile("[aeioAEIO]|[FHLMNRSX][A-Z]|ndarray")
"""Begins the names of types that are spoken with a vowel first: int, LRScheduler, ndarray."""
_OF_PANDAS = {"pandas": "spark.createDataFrame(df)", "pyspark.pandas": "df.to_spark()"}
"""Makes a Spark DataFrame of a DataFrame ``df`` of these libraries."""


class SparkdlError(Exception):
    """The root: ``except sparkdl.SparkdlError`` catches all that sparkdl raises on purpose."""


class UserError(SparkdlError, ValueError):
    """A mistake in what the user gave; the message says what, where, and what to do."""


class ParameterError(UserError):
    """A parameter of the trainer, of a job, or a setting has a value that cannot work."""


class DataError(UserError):
    """A column, a row or a sample cannot become a tensor."""


class ModelError(UserError):
    """The model, the loss or the optimizer cannot be used as given."""


class SessionError(UserError):
    """This kind of Spark session cannot train (Spark Connect, for one), or there is no such master."""


class TrustError(UserError):
    """A saved model holds a pickle (or names a function nobody vouched for) and was not trusted."""


class TrainingError(SparkdlError, RuntimeError):
    """An iteration failed for good, after Spark's retries; says where and why."""


class StateLostError(TrainingError):
    """The state of a slice, or a rank of a gang, is lost: its node died, its slab was deleted."""


class StalledError(TrainingError):
    """Nothing happened in a job for ``spark.sparkdl.timeout.seconds``; says who was waited for."""


class CheckpointError(SparkdlError, RuntimeError):
    """A checkpoint cannot be written, found or read; says which path and why."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete, changed on disk or not ours; an earlier one may be whole."""


class StaleReferenceError(SparkdlError, RuntimeError):
    """A slab reference names a write that is no longer there (a late attempt of a past iteration)."""


class SlabFullError(TrainingError, OSError):
    """No slab directory of this node has room, or it cannot be made."""


def kind_of(value: object) -> str:
    """Return ``value``'s type with its article, to stand in a sentence: "an int", "a str", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if _VOWEL_SOUND.match(name) else 'a'} {name}"


def wrong_data(method: str, data: object, wanted: str, remedy: str = "") -> DataError:
    """Return the error for ``data`` that ``method`` cannot take; ``wanted``: what it takes."""
    kind = type(data)
    library = kind.__module__.rpartition(".core.")[0] or kind.__module__.rpartition(".")[0]
    if kind.__name__ == "DataFrame" and library in _OF_PANDAS:
        to = "" if "DataFrame" in wanted else " to transform"
        remedy = f"Pass {_OF_PANDAS[library]}{to}."
    found = f"{kind.__module__}.{kind.__qualname__}"
    return DataError(f"{method} takes {wanted}, not {found}. {remedy}".rstrip())


def cannot_travel(what: str, error: Exception, remedy: str) -> str:
    """What to say of a user's part that pickle, with ``error``, does not take to the executors."""
    return (
        f"{what} cannot be pickled, so it cannot travel to the executors "
        f"({type(error).__name__}: {error}). {remedy}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """``' Did you mean "label"?'`` where a known name begins with ``name`` or is close to it, else an
    empty string."""
    names = list(known)
    begun = sorted((k for k in names if len(name) > 2 and k.startswith(name)), key=len)
    close = begun or difflib.get_close_matches(name, names, n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


def raise_all(kind: type[UserError], problems: Sequence[str]) -> None:
    """Raise one ``kind`` that lists every problem, or return where there is none."""
    if len(problems) == 1:
        raise kind(problems[0])
    if problems:
        raise kind("\n".join([f"{len(problems)} problems:", *(f"  - {p}" for p in problems)]))
