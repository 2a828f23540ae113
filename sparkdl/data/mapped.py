"""Reading a partition: its files mapped into this process, rows gathered as they are asked for.

Nothing is loaded as a whole, so a partition may be larger than memory: the kernel brings in the
pages that a mini-batch touches, and drops them again.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdl.data.handle import Field, SampleHandle
from sparkdl.data.order import row_contents
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import StaleReferenceError


@dataclass(frozen=True)
class MappedPartition:
    """A partition mapped into this process: no copy until a batch is gathered."""

    chunks: tuple[tuple[Rows, ...], ...]
    """For each file, the rows of each field."""
    starts: np.ndarray
    order: np.ndarray
    fields: tuple[Field, ...]
    name: str = ""
    """Of this very write of the partition: the path of its order."""

    @staticmethod
    def map(paths: tuple[str, ...], order_path: str, fields: tuple[Field, ...]) -> MappedPartition:
        """Map the files. Raises :class:`StaleReferenceError` where one was deleted."""
        try:
            chunks = tuple(_map_chunk(path, fields) for path in paths)
            order = np.load(order_path, mmap_mode="r") if order_path else np.zeros(0, np.int64)
        except FileNotFoundError:
            gone = [path for path in (*paths, order_path) if path and not os.path.exists(path)]
            raise StaleReferenceError(f"sample slab {', '.join(gone)} was deleted") from None
        rows = [len(chunk[0]) for chunk in chunks]
        return MappedPartition(chunks, np.cumsum([0, *rows])[:-1], order, fields, order_path)

    def gather(self, rows: np.ndarray) -> list[Rows]:
        """The rows (numbers in canonical order), one entry a field.

        A new array of shape (len(rows), *shape), or a :class:`Ragged` with memory of its own.
        """
        return self._take(self.order[rows])

    def contents(self, places: np.ndarray) -> np.ndarray:
        """The bytes of some rows, by their places in the files; see :func:`row_contents`."""
        return row_contents(self._take(places))

    def lengths(self) -> np.ndarray | None:
        """Of each row in canonical order, all fields of varying length added up (int64).

        None where there is no such field.
        """
        ragged = [number for number, field in enumerate(self.fields) if field.ragged]
        if not ragged or not self.chunks:
            return None
        total = np.zeros(len(self.order), dtype=np.int64)
        for number in ragged:
            columns = [chunk[number] for chunk in self.chunks]
            total += np.concatenate([c.lengths for c in columns if isinstance(c, Ragged)])
        return total[self.order]

    def _take(self, places: np.ndarray) -> list[Rows]:
        if len(self.chunks) == 1:
            return [
                column[places] if isinstance(column, Ragged) else np.take(column, places, axis=0)
                for column in self.chunks[0]
            ]
        chunk_of = np.searchsorted(self.starts, places, side="right") - 1
        within = places - self.starts[chunk_of] if self.chunks else places
        parts = [(int(c), np.flatnonzero(chunk_of == c)) for c in np.unique(chunk_of)]
        return [self._join(number, parts, within) for number in range(len(self.fields))]

    def _join(self, number: int, parts: list[tuple[int, np.ndarray]], within: np.ndarray) -> Rows:
        """Rows of one field out of several files, back in the order they were asked in."""
        field = self.fields[number]
        if field.padding is None:
            result = np.empty((len(within), *field.shape), dtype=field.dtype)
            for chunk, chosen in parts:
                column = self.chunks[chunk][number]
                assert isinstance(column, np.ndarray)
                result[chosen] = column[within[chosen]]
            return result
        lengths = np.zeros(len(within), dtype=np.int64)
        found: list[tuple[np.ndarray, Ragged]] = []
        for chunk, chosen in parts:
            rows = self.chunks[chunk][number][within[chosen]]
            assert isinstance(rows, Ragged)
            lengths[chosen] = rows.lengths
            found.append((chosen, rows))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        values = np.empty((int(offsets[-1]), *field.shape), dtype=field.dtype)
        for chosen, rows in found:
            shift = np.repeat(offsets[chosen] - rows.offsets[:-1], rows.lengths)
            values[np.arange(len(rows.values)) + shift] = rows.values
        return Ragged(values, offsets, field.padding)


@functools.lru_cache(maxsize=64)
def _open(
    token: str, paths: tuple[str, ...], order_path: str, fields: tuple[Field, ...]
) -> MappedPartition:
    return MappedPartition.map(paths, order_path, fields)


def open_partition(handle: SampleHandle) -> MappedPartition:
    """Map the handle's files, or find them mapped already (paths are never used twice)."""
    return _open(handle.token, handle.paths, handle.order_path, handle.fields)


def close_partitions() -> None:
    """Let go of every mapping of this process."""
    _open.cache_clear()


def to_arrow(column: Rows) -> pa.Array:
    """One field of a chunk as it is written: numbers, lists of fixed size, or large lists."""
    if isinstance(column, Ragged):
        offsets = pa.array(column.offsets - column.offsets[0])
        return pa.LargeListArray.from_arrays(offsets, to_arrow(column.used))
    if column.ndim == 1:
        return _flat(column)
    return pa.FixedSizeListArray.from_arrays(_flat(column), int(np.prod(column.shape[1:])))


def _flat(values: np.ndarray) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.array(flat.view(np.uint8) if flat.dtype == np.bool_ else flat)


def _map_chunk(path: str, fields: tuple[Field, ...]) -> tuple[Rows, ...]:
    with pa.memory_map(path) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    columns: list[Rows] = []
    for array, field in zip(batch.columns, fields, strict=True):
        inner = array.values if field.ragged else array
        inner = inner.flatten() if field.shape else inner
        values = inner.to_numpy(zero_copy_only=True).view(field.dtype).reshape(-1, *field.shape)
        if field.padding is not None:
            offsets = array.offsets.to_numpy(zero_copy_only=True)
            columns.append(Ragged(values, offsets, field.padding))
        else:
            columns.append(values)
    return tuple(columns)
