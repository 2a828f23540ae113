"""Windows of rows on their way to a model: read in a thread, bad rows set apart, sorted by length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.ragged import Ragged, Rows, concatenate
from sparkdl.data.row_errors import RowError
from sparkdl.infer.scoring.outputs import lengths_of

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Group:
    """Rows of a window whose tensors have the same shapes."""

    places: np.ndarray  # in the window, ascending
    arrays: Sequence[Rows]  # one per feature

    def batches(self, size: Callable[[int], int]) -> Iterator[Group]:
        """Yield the rows in batches; rows of varying length from long to short.

        ``size`` gives a batch's number of rows by its longest row's length (1 if lengths do not
        vary).
        """
        lengths = lengths_of(self.arrays)
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
class ReadWindow:
    """The conversion of a window's Arrow arrays into tensors."""

    columns: Sequence[Column]
    keep: bool  # set bad rows apart instead of raising an error

    def __call__(self, arrays: Sequence[pa.Array], first_row: int) -> Window:
        """Return the window; raise RowError for a bad row that is not kept."""
        count = len(arrays[0])
        places = np.arange(count)
        if not self.keep:
            return Window(count, [Group(places, self._read(arrays, first_row))])
        problems: dict[int, str] = {}
        for array, column in zip(arrays, self.columns, strict=True):
            if array.null_count:
                for place in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
                    problems.setdefault(int(place), f'column "{column.name}" is null.')
        if problems:
            places = np.setdiff1d(places, np.fromiter(problems, np.int64))
            arrays = [array.take(pa.array(places)) for array in arrays]
        if not len(places):
            return Window(count, [], problems)
        try:
            return Window(count, [Group(places, self._read(arrays, first_row))], problems)
        except RowError:
            return Window(count, list(self._one_by_one(arrays, places, problems)), problems)

    def _read(self, arrays: Sequence[pa.Array], first_row: int) -> list[Rows]:
        pairs = zip(arrays, self.columns, strict=True)
        return [to_numpy(array, column, first_row) for array, column in pairs]

    def _one_by_one(
        self, arrays: Sequence[pa.Array], places: np.ndarray, problems: dict[int, str]
    ) -> Iterator[Group]:
        """Yield the good rows, grouped by shape; add the bad ones to ``problems``."""
        found: dict[Any, tuple[list[int], list[list[Rows]]]] = {}
        for row, place in enumerate(places.tolist()):
            try:
                tensors = self._read([array.slice(row, 1) for array in arrays], place)
            except RowError as error:
                problems[place] = f'column "{error.problem.column}" {error.problem.text}.'
                continue
            shapes = tuple(_shape(tensor) for tensor in tensors)
            rows, read = found.setdefault(shapes, ([], []))
            rows.append(place)
            read.append(tensors)
        for rows, read in found.values():
            yield Group(
                np.array(rows), [concatenate(list(parts)) for parts in zip(*read, strict=True)]
            )


def _shape(rows: Rows) -> tuple[Any, ...]:
    return (rows.values.shape[1:] if isinstance(rows, Ragged) else rows.shape[1:], rows.dtype.str)


def cut_windows(
    batches: Iterable[Sequence[pa.Array]], rows: int
) -> Iterator[tuple[Sequence[pa.Array], int]]:
    """Yield the Arrow arrays of at most so many rows, and the number of the first."""
    seen = 0
    for arrays in batches:
        count = len(arrays[0])
        for start in range(0, count, rows):
            yield [array.slice(start, rows) for array in arrays], seen + start
        seen += count


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
