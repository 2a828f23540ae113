"""The sample files of a partition, and reading them: files are mapped, rows are gathered on demand.

Each field's rows lie one after another, raw, in a file that only grows. Writing collects and copies
nothing, and reading maps the file and indexes it. A field of varying length has two files, as in Arrow:
the values, and the offsets (int64) at which rows begin. A partition may be larger than memory: the
kernel brings in the pages that a mini-batch touches, and drops them again.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

import numpy as np

from sparkdl.data.fields import Field, RowFile, SampleHandle
from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.data.row_order import row_contents
from sparkdl.errors import StaleReferenceError
from sparkdl.slab.pool import released
from sparkdl.slab.root import open_private


def segment_files(segment: RowFile, fields: Sequence[Field]) -> list[str]:
    """Return the files of a segment: for each field its values, then its offsets if it has any."""
    return [
        f"{segment.path}-{number}.{kind}"
        for number, field in enumerate(fields)
        for kind in ("values", *map(_offsets, range(len(field.rules))))
    ]


def _offsets(level: int) -> str:
    """Return the kind of file with the offsets of a level of lists, the rows at level 0."""
    return f"offsets{level or ''}"


class SegmentWriter:
    """A writer of the files of one segment, begun with some rows; each append writes all or none."""

    def __init__(self, path: str, fields: Sequence[Field], columns: Sequence[Rows]) -> None:
        self._path, self.num_rows = path, 0
        # where the items of each level of each field of varying length end
        self._ends = [[0] * len(field.rules) for field in fields]
        self._files: list[BinaryIO] = []
        try:
            for name in segment_files(self.segment, fields):
                file = open(name, "xb", buffering=0, opener=open_private)  # noqa: SIM115
                self._files.append(file)
            self.append(columns)
        except OSError:
            self.remove()
            raise

    @property
    def segment(self) -> RowFile:
        """Return the segment as written so far."""
        return RowFile(self._path, self.num_rows)

    def append(self, columns: Sequence[Rows]) -> None:
        """Write these rows. If that raises OSError, the files are as they were before."""
        places, ends = [file.tell() for file in self._files], [list(e) for e in self._ends]
        files = iter(self._files)
        try:
            for column, ends_here in zip(columns, self._ends, strict=True):
                values, levels = column, list[np.ndarray]()
                for level, end in enumerate(ends_here):
                    assert isinstance(values, Ragged)
                    offsets = values.offsets + (end - values.offsets[0])
                    levels.append(offsets[1:] if self.num_rows else offsets)
                    ends_here[level] = int(offsets[-1])
                    values = values.used
                assert isinstance(values, np.ndarray)
                for array in (values, *levels):
                    write_all(next(files), array)
        except OSError:
            for file, place in zip(self._files, places, strict=True):
                file.truncate(place)
                file.seek(place)
            self._ends = ends
            raise
        self.num_rows += len(columns[0])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Close and delete the files."""
        self.close()
        for file in self._files:
            os.unlink(file.name)


def write_all(file: BinaryIO, values: np.ndarray) -> None:
    """Write the bytes of an array to an unbuffered file, which may take several writes."""
    left = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    while left:
        left = left[file.write(left) :]


class Items:
    """Items of one shape in several mapped files, from any of which a single gather reads.

    Several files are viewed as one array of overlapping elements. It begins at the lowest of their
    addresses and has an element wherever an item may begin (mappings begin at a page boundary). Only
    elements that are items are ever read. A loop over the files would cost a small batch more than
    reading its rows.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        filled = [array for array in arrays if array.size]  # not if all lists in a file are empty
        first = filled[0] if filled else arrays[0]
        self._dtype, self._shape = first.dtype, first.shape[1:]
        if len(arrays) == 1 or not filled:
            return
        nbytes = first[:1].nbytes
        grain = math.gcd(nbytes, mmap.PAGESIZE)
        low = min(array.ctypes.data for array in filled)
        addresses = [array.ctypes.data if array.size else low for array in arrays]
        high = max(a + array.nbytes for a, array in zip(addresses, arrays, strict=True))
        lowest = next(array for array in filled if array.ctypes.data == low)
        item = lowest[:1].reshape(-1).view(np.dtype((np.void, nbytes)))
        self._window = np.lib.stride_tricks.as_strided(
            item, ((high - low - nbytes) // grain + 1,), (grain,), writeable=False
        )
        self._starts = (np.array(addresses) - low) // grain
        self._step = nbytes // grain

    def take(self, files: np.ndarray | None, places: np.ndarray) -> np.ndarray:
        """Return a new array of the items at ``places`` in ``files`` (file numbers; None: one file)."""
        if files is None or not len(places):
            return np.take(self.arrays[0], places, axis=0)
        found = self._window[self._starts[files] + places * self._step]
        return found.view(self._dtype).reshape(-1, *self._shape)


@dataclass(frozen=True)
class MappedColumn:
    """One field in all files of a partition; it has ``offsets`` if rows vary in length."""

    values: Items | MappedColumn
    offsets: Items | None = None
    padding: Padding | None = None

    @staticmethod
    def map(segments: Sequence[RowFile], number: int, field: Field) -> MappedColumn:
        """Map one field of all ``segments``; a deleted file is a FileNotFoundError."""
        column = MappedColumn(Items([_values(segment, number, field) for segment in segments]))
        for level, rule in reversed(list(enumerate(field.rules))):
            offsets = [
                map_file(f"{segment.path}-{number}.{_offsets(level)}", "int64", (-1,))
                for segment in segments
            ]
            items = column.values if column.offsets is None else column
            column = MappedColumn(items, Items(offsets), rule)
        return column

    def take(self, files: np.ndarray | None, places: np.ndarray) -> Rows:
        """Return a copy of the rows at ``places`` in ``files``."""
        if self.offsets is None or self.padding is None:
            return self.values.take(files, places)
        starts = self.offsets.take(files, places)
        lengths = self.offsets.take(files, places + 1) - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        within = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        files = None if files is None else np.repeat(files, lengths)
        return Ragged(self.values.take(files, within), offsets, self.padding)

    def lengths(self) -> np.ndarray:
        """Return the length of each row, in the order of the files (int64)."""
        assert self.offsets is not None
        return np.concatenate([np.diff(offsets) for offsets in self.offsets.arrays])


def _values(segment: RowFile, number: int, field: Field) -> np.ndarray:
    """Map the rows of a field, or the items of all rows if rows vary in length."""
    rows = -1 if field.ragged else segment.num_rows
    return map_file(f"{segment.path}-{number}.values", field.dtype, (rows, *field.shape))


_mapped: weakref.WeakValueDictionary[str, np.memmap] = weakref.WeakValueDictionary()
"""The current mappings by path (a path is never used twice).

Partitions share files, and each mapping takes a file descriptor.
"""


def map_file(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Map a file of a slab root as an array; one dimension of ``shape`` may be -1."""
    whole = _mapped.get(path)
    if whole is None:
        with open(path, "rb", opener=open_private) as file:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                return np.zeros(0, dtype).reshape(shape)
            whole = _mapped[path] = np.memmap(file, np.uint8, mode="r")
    return np.asarray(whole).view(dtype).reshape(shape)


@dataclass(frozen=True)
class MappedPartition:
    """A partition mapped into this process; nothing is copied until a batch is gathered."""

    columns: tuple[MappedColumn, ...]
    starts: np.ndarray
    """The place of the first row of each segment."""
    order: np.ndarray
    fields: tuple[Field, ...]
    name: str = ""
    """A name unique to this write of the partition: the path of its order file."""

    @staticmethod
    def map(
        segments: Sequence[RowFile], order_path: str, fields: tuple[Field, ...]
    ) -> MappedPartition:
        """Map the files of a partition; ``order_path`` is "" without rows, or before an order."""
        try:
            numbered = enumerate(fields if segments else ())
            columns = tuple(MappedColumn.map(segments, number, field) for number, field in numbered)
            order = map_file(order_path, "int64", (-1,)) if order_path else np.zeros(0, np.int64)
        except FileNotFoundError:
            names = [name for segment in segments for name in segment_files(segment, fields)]
            gone = [path for path in (*names, order_path) if path and not os.path.exists(path)]
            raise StaleReferenceError(f"sample slab {', '.join(gone)} was deleted") from None
        starts = np.cumsum([0, *(segment.num_rows for segment in segments)])[:-1]
        return MappedPartition(columns, starts, order, fields, order_path)

    def gather(self, rows: np.ndarray) -> list[Rows]:
        """Return the rows (numbers in canonical order), one entry a field.

        Each entry is a new array of shape (len(rows), *shape), or a :class:`Ragged` with its own
        memory.
        """
        return self._take(self.order[rows])

    def contents(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes of some rows, by their places in the files; see :func:`row_contents`."""
        return row_contents(self._take(places))

    def lengths(self) -> np.ndarray | None:
        """Return the length of each row in canonical order, summed over all ragged fields (int64).

        Return None if there is no field of varying length.
        """
        ragged = [column.lengths() for column in self.columns if column.padding is not None]
        return sum(ragged[1:], start=ragged[0])[self.order] if ragged else None

    def values(self, field: int) -> Rows:
        """Return one field of all rows, in canonical order."""
        return self.columns[field].take(*self._located(self.order))

    def _take(self, places: np.ndarray) -> list[Rows]:
        located = self._located(places)
        return [column.take(*located) for column in self.columns]

    def _located(self, places: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the file of each place, None if there is one only, and the place in it."""
        if len(self.starts) <= 1:
            return None, places
        files = np.searchsorted(self.starts, places, side="right") - 1
        return files, places - self.starts[files]


_MAX_OPEN = 64
_Key: TypeAlias = tuple[str, tuple[RowFile, ...], str, tuple[Field, ...]]
_opened: OrderedDict[_Key, MappedPartition] = OrderedDict()
_lock = threading.Lock()


def open_partition(handle: SampleHandle) -> MappedPartition:
    """Map the handle's files, or return the existing mapping (paths are never used twice).

    Also drop mappings whose files were deleted, as after a fit has ended: memory in ``/dev/shm`` is
    free only when no process maps it any more.
    """
    key = (handle.node_id, handle.segments, handle.order_path, handle.fields)
    with _lock:
        if key in _opened:
            _opened.move_to_end(key)
            return _opened[key]
    close_deleted()
    found = MappedPartition.map(*key[1:])
    with _lock:
        _opened[key] = found
        while len(_opened) > _MAX_OPEN:
            _opened.popitem(last=False)
    return found


def lies_here(handle: SampleHandle, node_id: str) -> bool:
    """Return whether all of the handle's files are on the node with this ``node_id``."""
    names = [n for part in handle.segments for n in segment_files(part, handle.fields)]
    files = [path for path in (*names, handle.order_path) if path]
    return not handle.num_rows or (handle.node_id == node_id and all(map(os.path.exists, files)))


@released
def close_deleted(_run: str = "") -> None:
    """Drop the mappings of this process whose files were deleted."""
    with _lock:
        for gone in [key for key in _opened if key[2] and not os.path.exists(key[2])]:
            del _opened[gone]


def close_partitions() -> None:
    """Drop every mapping of this process."""
    with _lock:
        _opened.clear()
