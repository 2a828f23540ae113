"""Writing partitions of samples into slabs.

A task writes its rows in the order in which they arrive. They form one partition, or parts of several
partitions. In the second case a partition is an order of rows in the files of many tasks, and no row
moves.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparkdl.data.fields import Extreme, Field, SampleHandle
from sparkdl.data.partition_files import SegmentWriter
from sparkdl.data.partition_join import (
    Extremes,
    WrittenRows,
    join_partition,
    keep_extreme,
    where_there_is_room,
)
from sparkdl.data.partition_reader import MappedPartition, close_partitions, open_partition
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import SAME_SHAPE, SAME_TYPE, BadRow, RowError
from sparkdl.data.row_order import row_hashes
from sparkdl.slab.root import Root, SlabConfig, open_root, remove_root
from sparkdl.spark.worker import task_cancelled

__all__ = [
    "Extreme",
    "Field",
    "MappedPartition",
    "PartitionWriter",
    "SampleHandle",
    "close_partitions",
    "open_partition",
]

CHECKED_BYTES = 16 << 20
"""Bytes that are written before the remaining memory is checked again."""
PART_BYTES = 16 << 20
"""Limit on the decoded bytes, and on the bytes of an RDD's records, that are held at a time."""


class PartitionWriter:
    """A writer that streams rows into files; it holds no samples, only 8 to 12 bytes a row.

    Its methods raise :class:`sparkdl.errors.SlabFullError` if no slab directory has room.
    ``source`` is the number of the task; if ``weighted``, the last field is the weight.
    """

    def __init__(self, config: SlabConfig, source: int = 0, weighted: bool = False) -> None:
        root = _root_of_a_task(config)
        self._config, self._root, self._source = config, root, source
        self._stem = f"samples-{secrets.token_hex(8)}"
        self._weighted = weighted
        self._fields: tuple[Field, ...] = ()
        self._writers: list[SegmentWriter] = []
        self._hashes: list[np.ndarray] = []
        self._partitions: list[np.ndarray] = []
        self._extremes: Extremes = {}
        self._nbytes = self._unchecked = 0
        self.num_rows = 0

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
        fields = tuple(_field(name, column) for name, column in zip(names, columns, strict=True))
        self._fields = self._fields or fields
        for field, first in zip(fields, self._fields, strict=True):
            if field != first:
                text = f"is {field} where row 0 is {first}"
                remedy = SAME_TYPE if field.shape == first.shape else SAME_SHAPE
                raise RowError(field.name, self.num_rows, text, remedy)
        for number, column in enumerate(columns):
            self._note_extremes(number, column, number in labels)
        if self._weighted:
            weights = columns[-1]
            assert isinstance(weights, np.ndarray)
            self._note(len(columns) - 1, weights, np.arange(len(weights) + 1))
        self._hashes.append(row_hashes(columns))
        if partitions is not None:
            self._partitions.append(
                partitions.copy()
            )  # a view would keep the whole Arrow batch alive
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
            writer = SegmentWriter(path, self._fields)
            try:
                writer.append(columns)
            except OSError:
                writer.remove()
                raise
            return writer

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

    def _note_extremes(self, number: int, column: Rows, label: bool) -> None:
        tried = column.dtype.kind == "i"
        noted = tried or (label and column.dtype.kind == "f")
        if isinstance(column, Ragged):
            self._note(number, column.lengths, np.arange(len(column) + 1), of_length=True)
            if noted:
                rest = column.used.reshape(len(column.used), -1)
                ends = (column.offsets - column.offsets[0]) * rest.shape[1]
                self._note(number, rest.reshape(-1), ends, tried=tried)
        elif noted:
            values = column.reshape(-1)
            ends = np.arange(len(column) + 1) * (len(values) // len(column))
            self._note(number, values, ends, tried=tried)

    def _note(
        self,
        number: int,
        values: np.ndarray,
        offsets: np.ndarray,
        of_length: bool = False,
        tried: bool = True,
    ) -> None:
        """Keep the extremes of ``values``; the values of row i begin at ``offsets[i]``."""
        for sign, place in ((-1, int(values.argmin())), (1, int(values.argmax()))):
            row = self.num_rows + int(np.searchsorted(offsets, place, side="right")) - 1
            value = values[place].item()
            keep_extreme(self._extremes, Extreme(number, sign, value, row, of_length, tried))

    def finish(self) -> SampleHandle:
        """Join all rows into one partition and return its handle."""
        hashes = self._close()
        return join_partition(self._config, [self._part(np.arange(self.num_rows), hashes)])

    def parts(self, count: int) -> Iterator[WrittenRows]:
        """Yield the rows of each of ``count`` partitions."""
        hashes = self._close()
        partitions = np.concatenate([np.zeros(0, np.int32), *self._partitions])
        places = np.argsort(partitions, kind="stable")
        ends = np.cumsum(np.bincount(partitions, minlength=count))[:-1]
        for partition, chosen in enumerate(np.split(places, ends)):
            part = self._part(chosen, hashes[chosen])
            mine = [e for e in part.extremes if partitions[e.row] == partition]
            yield replace(part, extremes=tuple(mine))

    def fail(self, problem: BadRow) -> SampleHandle:
        """Remove what was written and return a failed handle; call it instead of :meth:`finish`."""
        return join_partition(self._config, [self.failed_part(problem)])

    def failed_part(self, problem: BadRow) -> WrittenRows:
        """Remove what was written and return a failed part; call it instead of :meth:`parts`."""
        for writer in self._writers:
            writer.remove()
        self._writers, self._fields, self._extremes = [], (), {}
        none = self._part(np.zeros(0, np.int64), np.zeros(0, np.uint64))
        return replace(none, problem=problem)

    def _close(self) -> np.ndarray:
        """Close the files and return the hashes of all rows."""
        for writer in self._writers:
            writer.close()
        return np.concatenate([np.zeros(0, np.uint64), *self._hashes])

    def _part(self, places: np.ndarray, hashes: np.ndarray) -> WrittenRows:
        return WrittenRows(
            node_id=self._root.node_id,
            segments=tuple(writer.segment for writer in self._writers),
            fields=self._fields,
            places=places,
            hashes=hashes,
            extremes=tuple(self._extremes.values()),
            row_bytes=self.row_bytes,
            source=self._source,
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


def _field(name: str, column: Rows) -> Field:
    if isinstance(column, Ragged):
        return Field(name, str(column.dtype), column.values.shape[1:], column.padding)
    return Field(name, str(column.dtype), column.shape[1:])
