"""Reading a partition: its files are mapped into this process, and rows are gathered on demand.

A partition may be larger than memory, because nothing is loaded as a whole: the kernel brings in the
pages that a mini-batch touches, and drops them again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sparkdl.data.fields import Field, RowFile, SampleHandle
from sparkdl.data.partition_files import MappedColumn, map_file, segment_files
from sparkdl.data.ragged import Rows
from sparkdl.data.row_order import row_contents
from sparkdl.errors import StaleReferenceError
from sparkdl.slab.pool import released


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

    def _take(self, places: np.ndarray) -> list[Rows]:
        files = None
        if len(self.starts) > 1:
            files = np.searchsorted(self.starts, places, side="right") - 1
            places = places - self.starts[files]
        return [column.take(files, places) for column in self.columns]


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
