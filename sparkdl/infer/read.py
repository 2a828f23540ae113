"""The rows of a partition as tensors, window by window: Arrow columns, or records of an RDD."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from sparkdl.data.arrow_tasks import bad_rows
from sparkdl.data.columns.base import Column, Specs
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.ragged import Ragged, Rows, concatenate
from sparkdl.data.records import (
    Names,
    Parts,
    Sample,
    feature_names,
    named,
    record_field,
    split_record,
    stack_records,
)
from sparkdl.data.row_errors import RowError
from sparkdl.errors import DataError
from sparkdl.infer.outputs import lengths_of

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 4096
"""The rows that are read at a time where rows are taken in their order, in whole batches."""
ANOTHER_FORM = "Give values of the form that it was trained on."


@dataclass(frozen=True)
class Group:
    """Rows of a window whose tensors have the same shapes."""

    places: np.ndarray  # in the window, ascending
    arrays: Sequence[Rows]  # one per feature

    def batches(self, size: Callable[[int], int], by_length: bool) -> Iterator[Group]:
        """Yield the rows in batches; ``by_length``: rows of varying length from long to short.

        ``size`` gives a batch's number of rows by its longest row's length (1 if lengths do not
        vary, or do not matter).
        """
        lengths = lengths_of(self.arrays) if by_length else None
        if lengths is None:
            step = size(1)
            for start in range(0, len(self.places), step):
                rows = slice(start, start + step)
                yield Group(self.places[rows], [array[rows] for array in self.arrays])
            return
        order, start = np.argsort(-lengths, kind="stable"), 0
        while start < len(order):
            stop = start + size(int(lengths[order[start]]))
            yield self.some(order[start:stop])
            start = stop

    def some(self, rows: np.ndarray) -> Group:
        """Return some of the rows."""
        return Group(self.places[rows], [array[rows] for array in self.arrays])


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a partition, as tensors."""

    count: int
    groups: Sequence[Group]
    problems: dict[int, str] = field(default_factory=dict)  # why a row is in no group, by its place


@dataclass(frozen=True)
class ReadColumns:
    """The conversion of Arrow columns; what it reads are batches: sequences of arrays."""

    columns: tuple[Column, ...]
    rows: int  # of a window
    forms: tuple[str, ...] = ()  # of the Arrow types that :attr:`columns` were resolved for

    @staticmethod
    def of(columns: tuple[Column, ...], batch_size: int) -> ReadColumns:
        """Return the reader for batches of rows in their order; those that grow come one by one."""
        batches = 1 if any(column.grows for column in columns) else max(1, AHEAD // batch_size)
        return ReadColumns(columns, batches * batch_size)

    def windows(self, batches: Iterable[Sequence[pa.Array]], keep: bool) -> Iterator[Window]:
        """Yield the rows window by window; ``keep`` sets bad rows apart instead of raising."""
        return read_ahead(self._cut(batches), lambda cut: self._window(*cut, keep))

    def _cut(self, batches: Iterable[Sequence[pa.Array]]) -> Iterator[tuple[list[pa.Array], int]]:
        """Yield arrays of as many rows as a window has, and the number of the first."""
        seen = 0
        for arrays in batches:
            count = len(arrays[0])
            for start in range(0, count, self.rows):
                yield [array.slice(start, self.rows) for array in arrays], seen + start
            seen += count

    def _window(self, arrays: Sequence[pa.Array], first_row: int, keep: bool) -> Window:
        for array, column, form in zip(arrays, self.columns, self.forms, strict=False):
            if form_of(array.type) != form:
                raise DataError(
                    f'column "{column.name}" is of type {array.type} here, and the function was '
                    f"registered for {form}: cast it."
                )
        count = len(arrays[0])
        places, problems = np.arange(count), dict[int, str]()
        if not keep:
            with told_with_place("column"):
                return Window(count, [Group(places, self.read(arrays, first_row))])
        with contextlib.suppress(RowError):
            return Window(count, [Group(places, self.read(arrays, first_row))])
        for array, column in zip(arrays, self.columns, strict=True):
            for place, text in bad_rows(array, column):
                problems.setdefault(place, f'column "{column.name}" {text}.')
        places = np.setdiff1d(places, np.fromiter(problems, np.int64))
        good = [array.take(pa.array(places)) for array in arrays]
        with contextlib.suppress(RowError):
            return Window(count, [Group(places, self.read(good))] if len(places) else [], problems)
        each = [
            (place, self.read([array.slice(place, 1) for array in arrays]))
            for place in places.tolist()
        ]
        return Window(count, list(_by_shape(each)), problems)

    def read(self, arrays: Sequence[pa.Array], first_row: int = 0) -> list[Rows]:
        """Return the tensors of Arrow arrays. Raises RowError."""
        pairs = zip(arrays, self.columns, strict=True)
        return [to_numpy(array, column, first_row) for array, column in pairs]


@dataclass(frozen=True)
class ReadRecords:
    """The conversion of an RDD's records: their features, then their labels if ``names`` has some."""

    names: Names
    num_features: int
    float_dtype: str
    rows: int  # of a window
    specs: Specs
    fields: Sequence[Field] = ()  # that the model was trained on; (): not known

    def windows(self, records: Iterable[Any], keep: bool) -> Iterator[Window]:
        """Yield the records window by window; ``keep`` sets bad ones apart instead of raising."""
        rows, first_rows = iter(records), count(0, self.rows)
        names: list[str] = []  # of the fields of the first record
        return read_ahead(
            iter(lambda: tuple(islice(rows, self.rows)), ()),
            lambda some: self._window(some, next(first_rows), keep, names),
        )

    def _window(
        self, records: Sequence[Any], first_row: int, keep: bool, names: list[str]
    ) -> Window:
        if not keep:
            with told_with_place("field"):
                arrays = self.read(records, first_row, names)
                return Window(len(records), [Group(np.arange(len(records)), arrays)])
        problems: dict[int, str] = {}
        good: list[tuple[int, list[Rows]]] = []
        for place, record in enumerate(records):
            try:
                good.append((place, self.read([record], first_row + place, names)))
            except RowError as error:
                problems[place] = f'field "{error.problem.column}" {error.problem.text}.'
        return Window(len(records), list(_by_shape(good)), problems)

    def read(
        self, records: Sequence[Any], first_row: int = 0, names: list[str] | None = None
    ) -> list[Rows]:
        """Return the tensors of records, which must be alike. Raises RowError."""
        parts = [(row, self._fields(record, row)) for row, record in enumerate(records, first_row)]
        return stack_records(parts, [] if names is None else names, self.specs)

    def _fields(self, record: Any, row: int) -> Parts:
        """Return the names and arrays of a record, features first, then labels."""
        if self.names.label:
            record = self.names.sample(record, row, 0)
            features, label = split_record(record, True, row)
        else:
            features, label = self._features(record, row), ()
        features = self.names.in_order(features, row)
        parts = [*named("features", features), *named("label", label)]
        values = [
            (name, record_field(value, name, row, self.float_dtype, self.specs, trained))
            for (name, value), trained in with_fields(parts, self.fields)
        ]
        for (name, value), trained in with_fields(values[: self.num_features], self.fields):
            if name not in self.specs and another_form(value.ndim, trained):
                shown = f"{value.dtype}{list(value.shape) or ''}"
                raise RowError(
                    name, row, f"is {shown}, and the model was trained on {trained}", ANOTHER_FORM
                )
        return values

    def _features(self, record: Any, row: int) -> Any:
        """Return the features of a record that may also have labels."""
        record = self.names.sample(record, row, self.num_features)
        if isinstance(record, Sample):
            return record.features
        if isinstance(record, tuple) and len(record) == 2:
            by_keyword = bool(self.names.inputs) and isinstance(record[0], Mapping)
            pair = self.num_features == 1 or isinstance(record[0], tuple) or by_keyword
            return record[0] if pair else record
        return record


Reader: TypeAlias = ReadColumns | ReadRecords


@contextlib.contextmanager
def told_with_place(noun: str) -> Iterator[None]:
    """Turn a RowError in the block into a DataError that names this partition."""
    try:
        yield
    except RowError as error:
        context = TaskContext.get()
        place = "the partition" if context is None else f"partition {context.partitionId()}"
        raise DataError(error.problem.message(place, noun)) from None


def _by_shape(rows: Iterable[tuple[int, list[Rows]]]) -> Iterator[Group]:
    """Yield single rows, which come with their places, grouped by the shapes of their tensors."""
    groups: dict[Any, tuple[list[int], list[list[Rows]]]] = {}
    for place, tensors in rows:
        places, read = groups.setdefault(tuple(map(_shape, tensors)), ([], []))
        places.append(place)
        read.append(tensors)
    for places, read in groups.values():
        arrays = [concatenate(list(parts)) for parts in zip(*read, strict=True)]
        yield Group(np.array(places), arrays)


def _shape(rows: Rows) -> tuple[Any, ...]:
    return (rows.item_shape if isinstance(rows, Ragged) else rows.shape[1:], rows.dtype.str)


def read_ahead(items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
    """Yield ``work(item)`` for each item, in order; a thread works on the next one meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="sparkdl-read") as pool:
        before: Future[R] | None = None
        for item in items:
            following = pool.submit(work, item)
            if before is not None:
                yield before.result()
            before = following
        if before is not None:
            yield before.result()


def another_form(dimensions: int, trained: Field | None) -> bool:
    """Return whether values are numbers and the field that the model was trained with arrays, or
    the other way round: a batch of one then passes for one row of the other."""
    return trained is not None and not trained.ragged and bool(dimensions) != bool(trained.shape)


def form_of(kind: pa.DataType) -> str:
    """Return the form of an Arrow type: all numbers are alike, as are arrays of them."""
    name = str(kind).removeprefix("large_")
    if name.startswith("list"):
        return f"array<{form_of(kind.value_type)}>"
    if name.startswith(("int", "uint", "float", "double", "halffloat", "decimal", "bool")):
        return "number"
    return name.partition("<")[0].partition("[")[0]


def record_specs(names: Sequence[str], num_features: int, specs: Specs) -> Specs:
    """Return the specifications of columns by the fields of a record, features first.

    Raises :class:`DataError` for a column type that is not known to be converted in records, such
    as a function.
    """
    labels = (None,) * (len(names) - num_features)
    fields = feature_names(num_features) + [name for name, _ in named("label", labels)]
    found = {}
    for name, part in zip(names, fields, strict=False):
        spec = specs.get(name)
        if spec is None or spec.records_hold_tensors:
            continue
        if not spec.for_records:
            raise DataError(
                f'columns["{name}"] is a sparkdl.{type(spec).__name__}, which is for '
                "DataFrames, not for the records of an RDD: pass a DataFrame with this column "
                "to transform or evaluate."
            )
        found[part] = spec
    return found
