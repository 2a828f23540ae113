"""The driver's description of a partition: its files, its fields and its extreme values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np

from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.data.row_errors import (
    FIRST,
    NONE_INVALID,
    SAME_SHAPE,
    SAME_TYPE,
    Adapted,
    BadRow,
    InvalidRows,
    columns_with,
)
from sparkdl.errors import DataError


@dataclass(frozen=True)
class Field:
    """The name, NumPy dtype and shape (without the rows) of one input or label of a sample.

    A field of varying length has a ``padding``, and its ``shape`` is that of one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    padding: Padding | None = None

    @property
    def ragged(self) -> bool:
        """Return whether rows vary in length."""
        return self.padding is not None

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Return the shape of a row's tensor, or of one element of it if rows vary in length."""
        size = None if self.padding is None else self.padding.entries_of
        return self.shape if size is None else (size,)

    @property
    def rules(self) -> list[Padding]:
        """Return the padding of each level of lists that vary in length, the rows first."""
        found, rule = [], self.padding
        while rule is not None:
            found.append(rule)
            rule = rule.items
        return found

    def unlike(self, first: Field, place: str) -> tuple[str, str] | None:
        """Return what differs from the field of the row at a place, and the remedy; None: nothing."""
        remedy = SAME_TYPE if self.shape == first.shape else SAME_SHAPE
        return None if self == first else (f"is {self} where {place} is {first}", remedy)

    def __str__(self) -> str:
        lengths: list[int | str] = ["any" for _ in self.rules]
        lengths += self.shape
        return f"{self.dtype}[{', '.join(map(str, lengths))}]" if lengths else self.dtype


def zero_row(field: Field) -> Rows:
    """Return one row of zeros; that of a field of varying length has one element."""
    row: Rows = np.zeros((1, *field.shape), field.dtype)
    for rule in reversed(field.rules):
        row = Ragged(row, np.arange(2), rule)
    return row


T = TypeVar("T")


def with_fields(values: Iterable[T], fields: Sequence[Field]) -> Iterator[tuple[T, Field | None]]:
    """Pair each of ``values`` with its field, or with None once the fields run out."""
    return zip(values, chain(fields, repeat(None)), strict=False)


def dtype_as(dtype: str, field: Field | None) -> str:
    """Return the dtype of a floating ``field`` if ``dtype`` is integer or boolean, else ``dtype``."""
    floats = field is not None and np.dtype(field.dtype).kind == "f"
    return field.dtype if field and floats and np.dtype(dtype).kind in "ib" else dtype


@dataclass(frozen=True)
class Extreme:
    """The smallest or largest value of a field, and a row that has it.

    Integer fields, labels, the weight, and the row lengths of fields of varying length have extremes.
    """

    field: int
    sign: int  # -1: the smallest value, 1: the largest, 0: one that is missing
    value: float
    row: int
    of_length: bool = False  # the value is the length of a row
    tried: bool = True  # the model is tried on the row before training

    def exceeds(self, value: float) -> bool:
        """Return whether this extreme is more extreme than ``value``."""
        return self.value * self.sign > value * self.sign


@dataclass(frozen=True)
class RowFile:
    """The rows that one task wrote into one directory; the names of its files begin with ``path``."""

    path: str
    num_rows: int


@dataclass(frozen=True)
class SampleHandle:
    """A handle of one partition's samples, held by the sample RDD.

    A partition that could not be written because of the user's data has a ``problem`` and no files.
    """

    node_id: str
    segments: tuple[RowFile, ...]  # they may hold rows of other partitions too
    order_path: str  # canonical order: places in the segments, one after another
    num_rows: int
    checksum: int
    fields: tuple[Field, ...]
    extremes: tuple[Extreme, ...] = ()
    problem: BadRow | None = None
    repeats: tuple[tuple[int, int], ...] = ()  # (first, count) of equal rows, in the order
    invalid: InvalidRows = NONE_INVALID
    adapted: tuple[Adapted, ...] = ()


class ReadOtherwise(DataError):
    """Rows can be read once all of them are, by other specifications of some columns.

    Attributes:
        specs: These specifications, by column.
    """

    def __init__(self, message: str, specs: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.specs = dict(specs)

    @staticmethod
    def of(text: str, name: str, spec: Any) -> ReadOtherwise:
        """Return the error for one column."""
        return ReadOtherwise(f"{text} Give {columns_with(name, spec)}.", {name: spec})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.specs)


def adapted_specs(handles: Iterable[SampleHandle]) -> dict[str, Any]:
    """Return the specifications by which columns were read that were given others, by column."""
    return {one.name: one.spec for handle in handles for one in reversed(handle.adapted)}


NO_ROWS = "the data is empty: it has no rows."


def check_handles(
    handles: Sequence[SampleHandle], noun: str, locate: Callable[[BadRow], str] = lambda _: ""
) -> None:
    """Raise :class:`DataError` for a problem of one partition, or of all of them together.

    ``locate`` returns what is known about the place of a row besides its partition.
    """
    filled = [(i, handle) for i, handle in enumerate(handles) if handle.num_rows]
    of_one = ((i, handle.problem) for i, handle in enumerate(handles) if handle.problem)
    partition, problem = next(of_one, (0, None))
    if not filled and problem is None:
        invalid = invalid_in(handles)
        if invalid is None:
            raise DataError(NO_ROWS)
        one = invalid["first"][0]
        raise DataError(
            f"none of the {invalid['count']:,} rows of the data can be read: {one['key']}, {noun} "
            f'"{one["column"]}": {one["reason"]}.'
        )
    if problem is None:
        (first_partition, first), *_ = filled
        for number, handle in filled:
            names, wanted = ([field.name for field in h.fields] for h in (handle, first))
            if names != wanted:
                raise DataError(
                    f"row 0 of partition {number} has {', '.join(names)} where row 0 of partition "
                    f"{first_partition} has {', '.join(wanted)}. {SAME_SHAPE}"
                )
        problem = differing(filled)
    if problem is not None:
        number = partition if problem.partition is None else problem.partition
        text = problem.message(f"partition {number}{locate(problem)}", noun)
        if problem.spec is not None:
            raise ReadOtherwise.of(text, problem.column, problem.spec)
        raise DataError(text)


def differing(parts: Sequence[tuple[int | None, Any]]) -> BadRow | None:
    """Return the problem of rows of different fields in parts, each with its partition, or None."""
    for number, part in parts[1:]:
        source, first = parts[0]
        for one, other in zip(part.fields, first.fields, strict=True):
            if unlike := one.unlike(other, f"row 0 of partition {source}"):
                spec = adapted_specs([first, part]).get(one.name)
                text, remedy = unlike
                return BadRow(one.name, 0, text, remedy, number, spec=spec)
    return None


def invalid_in(handles: Sequence[SampleHandle]) -> dict[str, Any] | None:
    """Return the number of all rows, of those that could not be read, and the first of these; None
    if all could."""
    count = sum(handle.invalid.count for handle in handles)
    if not count:
        return None
    first = [row.record(i) for i, handle in enumerate(handles) for row in handle.invalid.first]
    rows = sum(handle.num_rows + handle.invalid.left_out for handle in handles)
    return {"rows": rows, "count": count, "first": first[:FIRST]}


def told_of_invalid(role: str, found: Mapping[str, Any], way: str) -> str:
    """Return what :func:`invalid_in` found, as one line for the log."""
    done = "are left out" if way == "skip" else "are trained on with zeros in their place"
    first = "; ".join(f'{o["key"]} ("{o["column"]}" {o["reason"]})' for o in found["first"])
    more = "; ..." if found["count"] > len(found["first"]) else ""
    return (
        f"{role} data: {found['count']:,} of {found['rows']:,} rows cannot be read, and {done}: "
        f"{first}{more}"
    )


def check_total_weight(handles: Sequence[SampleHandle], field: int, what: str) -> None:
    """Raise :class:`DataError` if all weights are 0."""
    largest = [e.value for h in handles for e in h.extremes if e.field == field and e.sign > 0]
    if not any(largest):
        raise DataError(
            f"{what}: all weights are 0, so no sample counts. Give some rows a weight above 0, or "
            "train with weight=None."
        )
