"""Problems with single rows: found on an executor, raised on the driver."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

SAME_SHAPE = "Every row must have the same shape: filter out, pad or truncate such rows."
NO_VALUES = "Filter out such rows, or leave the column out."
MEND_RECORDS = "Filter out such records, or fix them with rdd.map."
INSIDE_ARRAYS = (
    "dropna does not look into arrays: filter out such rows with functions.exists, or fill them "
    "with functions.transform."
)
INSIDE_VECTORS = (
    "dropna does not look into vectors: fix them at their source, or convert them to arrays with "
    "pyspark.ml.functions.vector_to_array and filter out such rows with functions.exists."
)
SAME_TYPE = (
    "Every row must be of the same type: write 1.0, not 1, where a measurement is meant, or fix "
    "them with rdd.map."
)


def columns_with(name: str, spec: object) -> str:
    """Return the argument that gives a column this specification, as a message shows it."""
    return f'columns={{"{name}": sparkdl.{spec}}}'


def varying(column: str, before: str = SAME_SHAPE) -> str:
    """Return the remedy for arrays of different lengths; ``before`` says what else to do."""
    padded = f"Rows of varying length are padded with {columns_with(column, 'Sequence()')}."
    return f"{before} {padded}"


@dataclass(frozen=True)
class BadRow:
    """A problem with one row of one column, found on an executor and raised on the driver."""

    column: str
    row: int  # its number in its partition
    text: str  # the end of a sentence about the value
    remedy: str
    partition: int | None = None  # in the data as read; None: the reporting partition
    digest: str | None = None  # SHA-256 of bytes or text, to find the row again
    spec: Any = None  # the specification by which all rows of the column can be read

    def message(self, place: str, noun: str = "column") -> str:
        """Return one line for the user; ``noun`` says what :attr:`column` names."""
        return f'{noun} "{self.column}", row {self.row} of {place}: {self.text}. {self.remedy}'


@dataclass(frozen=True)
class Adapted:
    """A column that was read by another specification than it was given, since values asked for it."""

    name: str
    spec: Any  # a ColumnSpec
    problem: BadRow | None = None  # of a label: the first row that could not be read otherwise

    def of(self, partition: int | None) -> Adapted:
        """Return it as of a partition of the data as read."""
        problem = None if self.problem is None else replace(self.problem, partition=partition)
        return replace(self, problem=problem)


FIRST = 10
"""The bad rows that are told of one by one."""


@dataclass(frozen=True)
class InvalidRow:
    """A row that could not be read, and was left out or trained on with zeros."""

    key: str | None  # its value in the key column
    column: str
    reason: str
    row: int  # its number in its partition
    partition: int | None = None  # in the data as read; None: the reporting partition

    def record(self, partition: int) -> dict[str, Any]:
        """Return the row for the history; ``partition`` reported it."""
        number = partition if self.partition is None else self.partition
        key = f"row {self.row} of partition {number}" if self.key is None else self.key
        return {"key": key, "column": self.column, "reason": self.reason}


@dataclass(frozen=True)
class InvalidRows:
    """How many rows could not be read, and the first of them."""

    count: int = 0
    left_out: int = 0
    first: tuple[InvalidRow, ...] = ()

    def __add__(self, other: InvalidRows) -> InvalidRows:
        first = (*self.first, *other.first)[:FIRST]
        return InvalidRows(self.count + other.count, self.left_out + other.left_out, first)

    def of(self, partition: int | None) -> InvalidRows:
        """Return the rows as those of a partition of the data as read."""
        return replace(self, first=tuple(replace(row, partition=partition) for row in self.first))


NONE_INVALID = InvalidRows()


@dataclass(frozen=True)
class Handling:
    """The way to handle rows that cannot be read."""

    way: str = "error"  # "skip" leaves them out, "keep" trains on zeros
    key: str | None = None  # the column that names a row in what is told


AS_ERRORS = Handling()


class RowError(Exception):
    """An exception that carries a :class:`BadRow` out of a conversion."""

    def __init__(self, column: str, row: int, text: str, remedy: str, spec: Any = None) -> None:
        super().__init__(text)
        self.problem = BadRow(column, row, text, remedy, spec=spec)

    def note_value(self, value: object) -> None:
        """Note the value of the column in the row."""
        raw = value.encode() if isinstance(value, str) else value
        if isinstance(raw, bytes):
            digest = hashlib.sha256(raw, usedforsecurity=False).hexdigest()
            self.problem = replace(self.problem, digest=digest)


def drop(name: str) -> str:
    """Return the remedy for rows in which a whole column is missing."""
    return f'Drop such rows with df.dropna(subset=["{name}"]), or fill them.'


def refuse_nulls(
    array: pa.Array, name: str, first_row: int, text: str = "is null", column: str = ""
) -> None:
    """Raise RowError for the first null of an array, which is in ``column`` (else ``name``)."""
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(name, first_row + row, text, drop(column or name))


def finite(dtype: str) -> str:
    """Return the remedy for numbers that are infinite or too large for ``dtype``."""
    return (
        f"It is infinite, or beyond {_LARGEST.get(dtype, 'the largest number')} of {dtype}: filter "
        "out such rows, or scale the numbers."
    )


_LARGEST = {"float32": "the 3.4e+38", "float64": "the 1.8e+308"}
