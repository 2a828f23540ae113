"""A partition of samples as Arrow IPC files in slabs: the writer, the handle, the mapped reader."""

from __future__ import annotations

import errno
import functools
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.order import canonical_order, checksum, row_contents, row_hashes
from sparkdl.data.schema import SAME_SHAPE, Problem, RowProblem
from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.slab.root import SlabConfig, open_root

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Field:
    """What one input or label of a sample looks like: name, NumPy dtype, shape without the rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype


@dataclass(frozen=True)
class Extreme:
    """The smallest (``sign`` -1) or largest (1) ``value`` of an integer field, and a row with it."""

    field: int
    sign: int
    value: int
    row: int

    def exceeds(self, value: int) -> bool:
        """Whether this value is the more extreme one."""
        return self.value * self.sign > value * self.sign


@dataclass(frozen=True)
class SampleHandle:
    """The small record that the sample RDD holds for one partition.

    ``paths`` are Arrow IPC files of this node (the one of ``token``), ``order_path`` the canonical
    order of their rows. ``checksum`` covers the set of rows; ``extremes`` are of its integer fields.
    A partition that could not be written for a reason of the user's has a ``problem`` and no files.
    """

    token: str
    paths: tuple[str, ...]
    order_path: str
    num_rows: int
    checksum: int
    fields: tuple[Field, ...]
    extremes: tuple[Extreme, ...] = ()
    problem: Problem | None = None


class PartitionWriter:
    """Streams rows into Arrow files of about 64 MiB, each one record batch.

    Raises :class:`SlabFullError` where no slab directory has room.
    """

    def __init__(self, config: SlabConfig) -> None:
        root = open_root(config, create=True)
        assert root is not None
        self._root = root
        self._stem = f"samples-{secrets.token_hex(8)}"
        self._names: tuple[str, ...] = ()
        self._fields: tuple[Field, ...] = ()
        self._waiting: list[list[np.ndarray]] = []
        self._waiting_bytes = 0
        self._hashes: list[np.ndarray] = []
        self._paths: list[str] = []
        self._extremes: dict[tuple[int, int], Extreme] = {}
        self.num_rows = 0

    def add(self, names: Sequence[str], columns: list[np.ndarray]) -> None:
        """Append rows: one array of shape (rows, *shape) a column."""
        if len(columns[0]) == 0:
            return
        fields = tuple(
            Field(name, str(column.dtype), column.shape[1:])
            for name, column in zip(names, columns, strict=True)
        )
        self._fields = self._fields or fields
        for field, first in zip(fields, self._fields, strict=True):
            if field != first:
                raise RowProblem(
                    field.name, self.num_rows, f"is {field} where row 0 is {first}", SAME_SHAPE
                )
        for number, column in enumerate(columns):
            if column.dtype.kind == "i":
                self._note_extremes(number, column)
        self._hashes.append(row_hashes(columns))
        self._waiting.append(columns)
        self._waiting_bytes += sum(column.nbytes for column in columns)
        self.num_rows += len(columns[0])
        if self._waiting_bytes >= CHUNK_BYTES:
            self._flush()

    def _note_extremes(self, field: int, column: np.ndarray) -> None:
        values = column.reshape(-1)
        width = len(values) // len(column)
        for sign, place in ((-1, int(values.argmin())), (1, int(values.argmax()))):
            found = Extreme(field, sign, int(values[place]), self.num_rows + place // width)
            known = self._extremes.get((field, sign))
            if known is None or found.exceeds(known.value):
                self._extremes[field, sign] = found

    def finish(self) -> SampleHandle:
        """Write what is left and the canonical order; the partition's handle."""
        self._flush()
        hashes = np.concatenate([np.zeros(0, np.uint32), *self._hashes])
        paths = tuple(self._paths)
        rows = MappedPartition.map(paths, "", self._fields) if paths else None
        order = canonical_order(hashes, rows.contents if rows else None)
        order_path = self._write("order.npy", lambda path: np.save(path, order))
        number_of = np.argsort(order)  # place in the files -> number in canonical order
        return SampleHandle(
            token=self._root.token,
            paths=paths,
            order_path=order_path,
            num_rows=self.num_rows,
            checksum=checksum(hashes),
            fields=self._fields,
            extremes=tuple(
                replace(extreme, row=int(number_of[extreme.row]))
                for extreme in self._extremes.values()
            ),
        )

    def fail(self, problem: Problem) -> SampleHandle:
        """The handle of a partition with a mistake in it; what was written is removed."""
        for path in self._paths:
            os.unlink(path)
        return SampleHandle(self._root.token, (), "", 0, 0, (), problem=problem)

    def _flush(self) -> None:
        if not self._waiting:
            return
        columns = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting, self._waiting_bytes = [], 0
        batch = pa.record_batch(
            [_to_arrow(column) for column in columns], names=[f.name for f in self._fields]
        )

        def write(path: str) -> None:
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)

        self._paths.append(self._write(f"{len(self._paths)}.arrow", write))

    def _write(self, suffix: str, write: Any) -> str:
        """Write a file in the first directory that has room for it."""
        for directory in self._root.directories:
            path = str(directory / f"{self._stem}-{suffix}")
            try:
                write(path)
                return path
            except OSError as error:
                Path(path).unlink(missing_ok=True)
                if error.errno != errno.ENOSPC:
                    raise
        raise SlabFullError(
            "no room for the samples in "
            f"{', '.join(map(str, self._root.directories))} after row {self.num_rows:,}. "
            "Free space there, or point spark.sparkdl.slab.dir at a larger directory."
        )


@dataclass(frozen=True)
class MappedPartition:
    """A partition mapped into this process: no copy until a batch is gathered."""

    chunks: tuple[tuple[np.ndarray, ...], ...]
    """For each file, one array of shape (rows, *shape) a field."""
    starts: np.ndarray
    order: np.ndarray
    fields: tuple[Field, ...]

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
        return MappedPartition(chunks, np.cumsum([0, *rows])[:-1], order, fields)

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        """The rows (numbers in canonical order): a new array of shape (len(rows), *shape) a field."""
        return self._take(self.order[rows])

    def contents(self, places: np.ndarray) -> np.ndarray:
        """The bytes of some rows, by their places in the files; see :func:`row_contents`."""
        return row_contents(self._take(places))

    def _take(self, places: np.ndarray) -> list[np.ndarray]:
        if len(self.chunks) == 1:
            return [np.take(column, places, axis=0) for column in self.chunks[0]]
        chunk_of = np.searchsorted(self.starts, places, side="right") - 1
        result = [np.empty((len(places), *f.shape), dtype=f.dtype) for f in self.fields]
        for chunk in np.unique(chunk_of):
            chosen = np.flatnonzero(chunk_of == chunk)
            within = places[chosen] - self.starts[chunk]
            for out, column in zip(result, self.chunks[chunk], strict=True):
                out[chosen] = column[within]
        return result


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


def _to_arrow(column: np.ndarray) -> pa.Array:
    flat = column.reshape(-1)
    values = pa.array(flat.view(np.uint8) if flat.dtype == np.bool_ else flat)
    if column.ndim == 1:
        return values
    return pa.FixedSizeListArray.from_arrays(values, int(np.prod(column.shape[1:])))


def _map_chunk(path: str, fields: tuple[Field, ...]) -> tuple[np.ndarray, ...]:
    with pa.memory_map(path) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    columns = []
    for array, field in zip(batch.columns, fields, strict=True):
        values = (array.flatten() if field.shape else array).to_numpy(zero_copy_only=True)
        columns.append(values.view(field.dtype).reshape(-1, *field.shape))
    return tuple(columns)
