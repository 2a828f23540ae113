"""Writing partitions of samples into slabs, and joining what tasks have written into a partition.

A task writes its rows in the order in which they arrive. They form one partition, or parts of several
partitions. In the second case a partition is an order of rows in the files of many tasks, and no row
moves. Joining makes the canonical order, the checksum and the handle.
"""

from __future__ import annotations

import errno
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparkdl.data.columns.base import Column
from sparkdl.data.fields import Extreme, Field, RowFile, SampleHandle, differing
from sparkdl.data.partition_reader import MappedPartition, SegmentWriter, write_all
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import (
    FIRST,
    NONE_INVALID,
    SAME_SHAPE,
    Adapted,
    BadRow,
    InvalidRow,
    InvalidRows,
    RowError,
)
from sparkdl.data.row_order import canonical_order, checksum, row_hashes, ties
from sparkdl.errors import SlabFullError
from sparkdl.slab.root import Root, SlabConfig, open_private, open_root, remove_root
from sparkdl.spark.worker import task_cancelled

COMPARE_BYTES = 64 << 20
"""Bytes of rows with equal hashes that are held at a time to sort them."""
REPEATED = 1024
"""Equal rows are told of that are more than one of so many equal portions of their partition."""
Extremes = dict[tuple[int, int, bool], Extreme]
_T = TypeVar("_T")
CHECKED_BYTES = 16 << 20
"""Bytes that are written before the remaining memory is checked again."""
PART_BYTES = 16 << 20
"""Limit on the decoded bytes, and on the bytes of an RDD's records, that are held at a time."""


@dataclass(frozen=True)
class WrittenRows:
    """Rows of one partition, as one task wrote them."""

    segments: tuple[RowFile, ...]
    fields: tuple[Field, ...]
    places: np.ndarray  # of these rows in the segments, one after another (int64)
    hashes: np.ndarray
    extremes: tuple[Extreme, ...] = ()  # the row of each is its place
    row_bytes: int = 1
    problem: BadRow | None = None
    source: int | None = None  # the number of the task that wrote rows of several partitions
    invalid: InvalidRows = NONE_INVALID
    adapted: tuple[Adapted, ...] = ()


def join_partition(config: SlabConfig, parts: Sequence[WrittenRows]) -> SampleHandle:
    """Join the rows of all ``parts`` into a partition; the rows stay in their files on this node.

    Write the canonical order of the rows. This takes about 40 bytes of memory a row.
    """
    root = open_root(config, create=True)
    assert root is not None
    parts = sorted(parts, key=lambda part: part.source or 0)
    problems = [replace(part.problem, partition=part.source) for part in parts if part.problem]
    problem = (*problems, differing([(part.source, part) for part in parts if part.fields]))[0]
    if problem is not None:
        return SampleHandle(root.node_id, (), "", 0, 0, (), problem=problem)
    invalid = sum((part.invalid.of(part.source) for part in parts), NONE_INVALID)
    adapted = {one.name: one.of(part.source) for part in reversed(parts) for one in part.adapted}
    parts = [part for part in parts if len(part.places)]
    segments = tuple(segment for part in parts for segment in part.segments)
    lengths = [sum(segment.num_rows for segment in part.segments) for part in parts]
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    shifted = (part.places + begin for part, begin in zip(parts, begins, strict=True))
    places = np.concatenate([np.zeros(0, np.int64), *shifted])
    hashes = np.concatenate([np.zeros(0, np.uint64), *(part.hashes for part in parts)])
    fields = parts[0].fields if parts else ()
    rows = MappedPartition.map(segments, "", fields)
    at_once = COMPARE_BYTES // max((part.row_bytes for part in parts), default=1) or 1
    ranking = canonical_order(hashes, lambda numbers: rows.contents(places[numbers]), at_once)
    order = places[ranking]
    repeats = tuple(_repeats(hashes, ranking, lambda where: rows.contents(order[where]), at_once))
    del ranking
    extremes: Extremes = {}
    for part, begin in zip(parts, begins, strict=True):
        for extreme in part.extremes:
            keep_extreme(extremes, replace(extreme, row=extreme.row + begin))
    order_path = where_there_is_room(
        root, lambda folder: save_order(folder, order), len(order), order.nbytes
    )
    return SampleHandle(
        node_id=root.node_id,
        segments=segments,
        order_path=order_path,
        num_rows=len(order),
        checksum=checksum(hashes),
        fields=fields,
        extremes=tuple(replace(e, row=int(np.argmax(order == e.row))) for e in extremes.values()),
        repeats=repeats,
        invalid=invalid,
        adapted=tuple(adapted.values()),
    )


def _repeats(
    hashes: np.ndarray,
    ranking: np.ndarray,
    contents: Callable[[np.ndarray], np.ndarray],
    rows_at_once: int,
) -> Iterator[tuple[int, int]]:
    """Yield the places and numbers of :attr:`SampleHandle.repeats`.

    A run of equal hashes is sorted by content, so its rows are equal if the first and the last are.
    """
    starts, stops = ties(hashes, ranking)
    many = (stops - starts) * REPEATED > len(ranking)
    starts, stops = starts[many], stops[many]
    step = max(1, rows_at_once // 2)
    for begin in range(0, len(starts), step):
        some = slice(begin, begin + step)
        equal = contents(starts[some]) == contents(stops[some] - 1)
        for start, stop in zip(
            starts[some][equal].tolist(), stops[some][equal].tolist(), strict=True
        ):
            yield start, stop - start


def keep_extreme(extremes: Extremes, found: Extreme) -> None:
    """Keep ``found`` if it is the most extreme of its kind so far."""
    key = (found.field, found.sign, found.of_length)
    known = extremes.get(key)
    if known is None or found.exceeds(known.value):
        extremes[key] = found


def where_there_is_room(root: Root, write: Callable[[Path], _T], num_rows: int, nbytes: int) -> _T:
    """Return ``write(directory)`` for the first directory of the slab root that has room."""
    for directory in root.directories_for(nbytes):
        try:
            return write(directory)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    raise SlabFullError(
        f"there is not enough room for the samples in {', '.join(map(str, root.directories))} "
        f"after row {num_rows:,}. Free space there, or point spark.sparkdl.slab.dir at a larger "
        "directory."
    )


def save_order(folder: Path, order: np.ndarray) -> str:
    """Write the order of a partition's rows into a new file of a slab root, and return its path."""
    path = folder / f"samples-{secrets.token_hex(8)}.order"
    with open(path, "xb", buffering=0, opener=open_private) as file:
        try:
            write_all(file, order)
        except OSError:
            path.unlink()
            raise
    return str(path)


class PartitionWriter:
    """A writer that streams rows into files; it holds no samples, only 8 to 12 bytes a row.

    Its methods raise :class:`sparkdl.errors.SlabFullError` if no slab directory has room.
    ``source`` is the number of a task whose rows are of several partitions; if ``weighted``, the last
    field is the weight.
    """

    def __init__(
        self, config: SlabConfig, source: int | None = None, weighted: bool = False
    ) -> None:
        root = _root_of_a_task(config)
        self._config, self._root, self._source = config, root, source
        self._stem = f"samples-{secrets.token_hex(8)}"
        self._weighted = weighted
        self.fields: tuple[Field, ...] = ()  # of the rows; () before the first
        self._writers: list[SegmentWriter] = []
        self._hashes: list[np.ndarray] = []
        self._partitions: list[np.ndarray] = []
        self._extremes: Extremes = {}
        self._nbytes = self._unchecked = 0
        self.num_rows = 0
        self.invalid = NONE_INVALID
        self.adapted: dict[int, Column] = {}
        self._adaptions: list[Adapted] = []

    @property
    def rows_read(self) -> int:
        """Return the number of rows so far, with those that were left out."""
        return self.num_rows + self.invalid.left_out

    def note_invalid(self, rows: Sequence[InvalidRow], left_out: bool) -> None:
        """Note rows that could not be read, in their order."""
        count = len(rows)
        self.invalid += InvalidRows(count, count if left_out else 0, tuple(rows[:FIRST]))

    def adapt(self, number: int, column: Column, problem: BadRow | None) -> None:
        """Read column ``number`` as ``column`` from now on.

        Raises RowError if rows are there that have another form than the next ones will have.
        """
        spec = column.spec
        assert spec is not None
        if self.num_rows and self.fields[number].padding != spec.rule:
            raise RowError(column.name, self.rows_read, "is not like row 0", SAME_SHAPE, spec)
        self.adapted[number] = column
        self._adaptions.append(Adapted(column.name, spec, problem))

    @property
    def row_bytes(self) -> int:
        """Return the average bytes of a row so far; at least 1."""
        return max(1, self._nbytes // max(1, self.num_rows))

    def add(
        self,
        names: Sequence[str],
        columns: Sequence[Rows],
        partitions: np.ndarray | None = None,
        labels: Collection[int] = (),
    ) -> None:
        """Append rows, one array a column; ``labels`` are the numbers of the label columns.

        ``partitions`` has the partition of each row; None: they form one.
        """
        if len(columns[0]) == 0:
            return
        fields = tuple(field_of(name, column) for name, column in zip(names, columns, strict=True))
        self.fields = self.fields or fields
        for field, first in zip(fields, self.fields, strict=True):
            if unlike := field.unlike(first, "row 0"):
                raise RowError(field.name, self.num_rows, *unlike)
        for number, column in enumerate(columns):
            weight = self._weighted and number == len(columns) - 1
            self._note_extremes(number, column, number in labels, weight)
        self._hashes.append(row_hashes(columns))
        if partitions is not None:  # a view would keep the whole Arrow batch alive
            self._partitions.append(partitions.copy())
        self._append(columns)
        self._nbytes += sum(column.nbytes for column in columns)
        self.num_rows += len(columns[0])

    def _append(self, columns: Sequence[Rows]) -> None:
        """Append to the last segment, or to a new one in the first directory that has room."""
        nbytes = sum(column.nbytes for column in columns)
        if self._writers and self._stays(nbytes):
            try:
                return self._writers[-1].append(columns)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

        def begin(directory: Path) -> SegmentWriter:
            path = str(directory / f"{self._stem}-{len(self._writers)}")
            return SegmentWriter(path, self.fields, columns)

        rows = self.num_rows + len(columns[0])
        self._writers.append(where_there_is_room(self._root, begin, rows, nbytes))
        self._unchecked = 0

    def _stays(self, nbytes: int) -> bool:
        """Return whether the last segment is still the best place for ``nbytes`` more.

        The answer is checked only once every :data:`CHECKED_BYTES`.
        """
        self._unchecked += nbytes
        if self._unchecked < CHECKED_BYTES:
            return True
        self._unchecked = 0
        places = self._root.directories_for(max(nbytes, CHECKED_BYTES))
        return Path(self._writers[-1].segment.path).parent in places

    def _note_extremes(self, number: int, column: Rows, label: bool, weight: bool) -> None:
        values, ends = column, np.arange(len(column) + 1)
        if isinstance(column, Ragged):
            self._note(number, column.lengths, ends, of_length=True)
            values, ends = column.flat
        assert isinstance(values, np.ndarray)
        tried = weight or values.dtype.kind == "i"
        if tried or (label and values.dtype.kind == "f"):
            ends = ends * math.prod(values.shape[1:])
            self._note(number, values.reshape(-1), ends, tried=tried)

    def _note(
        self,
        number: int,
        values: np.ndarray,
        offsets: np.ndarray,
        of_length: bool = False,
        tried: bool = True,
    ) -> None:
        """Keep the extremes of ``values``; the values of row i begin at ``offsets[i]``."""
        places: dict[int, Any] = {}
        missing = np.flatnonzero(np.isnan(values)) if values.dtype.kind == "f" else values[:0]
        if len(missing):
            places[0] = missing[0]
        if len(missing) < len(values):
            places |= {-1: np.nanargmin(values), 1: np.nanargmax(values)}
        for sign, place in places.items():
            row = self.num_rows + int(np.searchsorted(offsets, place, side="right")) - 1
            value, looked_at = values[place].item(), tried or not sign
            keep_extreme(self._extremes, Extreme(number, sign, value, row, of_length, looked_at))

    def filled(self, write: Callable[[], None]) -> SampleHandle:
        """Return the handle of all rows that ``write`` adds, or a failed one if a row is wrong."""
        try:
            write()
            return self.finish()
        except RowError as error:
            return self.fail(error.problem)

    def finish(self) -> SampleHandle:
        """Join all rows into one partition and return its handle."""
        hashes = self._close()
        part = self._part(np.arange(self.num_rows), hashes)
        return join_partition(self._config, [replace(part, invalid=self.invalid)])

    def parts(self, count: int) -> Iterator[WrittenRows]:
        """Yield the rows of each of ``count`` partitions."""
        hashes = self._close()
        partitions = np.concatenate([np.zeros(0, np.int32), *self._partitions])
        places = np.argsort(partitions, kind="stable")
        ends = np.cumsum(np.bincount(partitions, minlength=count))[:-1]
        for partition, chosen in enumerate(np.split(places, ends)):
            part = self._part(chosen, hashes[chosen])
            mine = [e for e in part.extremes if partitions[e.row] == partition]
            invalid = NONE_INVALID if partition else self.invalid
            yield replace(part, extremes=tuple(mine), invalid=invalid)

    def fail(self, problem: BadRow) -> SampleHandle:
        """Remove what was written and return a failed handle; call it instead of :meth:`finish`."""
        return join_partition(self._config, [self.failed_part(problem)])

    def failed_part(self, problem: BadRow) -> WrittenRows:
        """Remove what was written and return a failed part; call it instead of :meth:`parts`."""
        for writer in self._writers:
            writer.remove()
        self._writers, self.fields, self._extremes = [], (), {}
        none = self._part(np.zeros(0, np.int64), np.zeros(0, np.uint64))
        return replace(none, problem=problem)

    def _close(self) -> np.ndarray:
        """Close the files and return the hashes of all rows."""
        for writer in self._writers:
            writer.close()
        return np.concatenate([np.zeros(0, np.uint64), *self._hashes])

    def _part(self, places: np.ndarray, hashes: np.ndarray) -> WrittenRows:
        return WrittenRows(
            segments=tuple(writer.segment for writer in self._writers),
            fields=self.fields,
            places=places,
            hashes=hashes,
            extremes=tuple(self._extremes.values()),
            row_bytes=self.row_bytes,
            source=self._source,
            adapted=tuple(self._adaptions),
        )


def _root_of_a_task(config: SlabConfig) -> Root:
    """Return the slab root of a task, made if it does not exist.

    A cancelled task may get here after the run has removed its roots. It then leaves no root behind and
    raises BrokenPipeError.
    """
    there = open_root(config) is not None
    root = open_root(config, create=True)
    assert root is not None
    if not there and task_cancelled():
        remove_root(config)
        raise BrokenPipeError("Spark has given up this task")
    return root


def field_of(name: str, column: Rows) -> Field:
    """Return the field of tensors."""
    if isinstance(column, Ragged):
        return Field(name, str(column.dtype), column.item_shape, column.padding)
    return Field(name, str(column.dtype), column.shape[1:])
