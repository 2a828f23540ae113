"""Writing a partition of samples: Arrow IPC files in slabs, chunk by chunk."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.handle import Extreme, Field, SampleHandle
from sparkdl.data.mapped import MappedPartition, close_partitions, open_partition, to_arrow
from sparkdl.data.order import canonical_order, checksum, row_hashes
from sparkdl.data.ragged import Ragged, Rows, concatenate
from sparkdl.data.schema import SAME_SHAPE, Problem, RowProblem
from sparkdl.errors import SlabFullError
from sparkdl.slab.root import SlabConfig, open_root

__all__ = [
    "Extreme",
    "Field",
    "MappedPartition",
    "PartitionWriter",
    "SampleHandle",
    "close_partitions",
    "open_partition",
]

CHUNK_BYTES = 64 << 20


class PartitionWriter:
    """Streams rows into Arrow files of about 64 MiB, each one record batch.

    What it holds grows by 4 bytes a row while rows arrive, and by about 20 bytes a row in
    :meth:`finish`; the samples themselves are never held as a whole. Raises
    :class:`SlabFullError` where no slab directory has room.
    """

    def __init__(self, config: SlabConfig) -> None:
        root = open_root(config, create=True)
        assert root is not None
        self._root = root
        self._stem = f"samples-{secrets.token_hex(8)}"
        self._fields: tuple[Field, ...] = ()
        self._waiting: list[Sequence[Rows]] = []
        self._waiting_bytes = 0
        self._written_bytes = 0
        self._hashes: list[np.ndarray] = []
        self._paths: list[str] = []
        self._extremes: dict[tuple[int, int, bool], Extreme] = {}
        self.num_rows = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, on average so far; at least 1."""
        return max(1, (self._written_bytes + self._waiting_bytes) // max(1, self.num_rows))

    def add(self, names: Sequence[str], columns: Sequence[Rows]) -> None:
        """Append rows: for each column an array of shape (rows, *shape), or a :class:`Ragged`."""
        if len(columns[0]) == 0:
            return
        fields = tuple(_field(name, column) for name, column in zip(names, columns, strict=True))
        self._fields = self._fields or fields
        for field, first in zip(fields, self._fields, strict=True):
            if field != first:
                raise RowProblem(
                    field.name, self.num_rows, f"is {field} where row 0 is {first}", SAME_SHAPE
                )
        for number, column in enumerate(columns):
            self._note_extremes(number, column)
        self._hashes.append(row_hashes(columns))
        self._waiting.append(columns)
        self._waiting_bytes += sum(column.nbytes for column in columns)
        self.num_rows += len(columns[0])
        if self._waiting_bytes >= CHUNK_BYTES:
            self._flush()

    def _note_extremes(self, number: int, column: Rows) -> None:
        if isinstance(column, Ragged):
            self._note(number, column.lengths, np.arange(len(column) + 1), of_length=True)
            if column.dtype.kind == "i":
                rest = column.used.reshape(len(column.used), -1)
                ends = (column.offsets - column.offsets[0]) * rest.shape[1]
                self._note(number, rest.reshape(-1), ends)
        elif column.dtype.kind == "i":
            values = column.reshape(-1)
            self._note(number, values, np.arange(len(column) + 1) * (len(values) // len(column)))

    def _note(
        self, number: int, values: np.ndarray, offsets: np.ndarray, of_length: bool = False
    ) -> None:
        """Keep the extremes of ``values``, of which row i has those from ``offsets[i]`` on."""
        for sign, place in ((-1, int(values.argmin())), (1, int(values.argmax()))):
            row = self.num_rows + int(np.searchsorted(offsets, place, side="right")) - 1
            found = Extreme(number, sign, int(values[place]), row, of_length)
            known = self._extremes.get((number, sign, of_length))
            if known is None or found.exceeds(known.value):
                self._extremes[number, sign, of_length] = found

    def finish(self) -> SampleHandle:
        """Write what is left and the canonical order; the partition's handle."""
        self._flush()
        hashes = np.concatenate([np.zeros(0, np.uint64), *self._hashes])
        self._hashes = []
        paths = tuple(self._paths)
        rows = MappedPartition.map(paths, "", self._fields) if paths else None
        at_once = max(1, CHUNK_BYTES // self.row_bytes)
        order = canonical_order(hashes, rows.contents if rows is not None else None, at_once)
        order_path = self._write("order.npy", lambda path: _save(path, order))
        return SampleHandle(
            token=self._root.token,
            paths=paths,
            order_path=order_path,
            num_rows=self.num_rows,
            checksum=checksum(hashes),
            fields=self._fields,
            extremes=tuple(
                replace(extreme, row=int(np.argmax(order == extreme.row)))
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
        columns = [concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._written_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
        batch = pa.record_batch(
            [to_arrow(column) for column in columns], names=[f.name for f in self._fields]
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


def _field(name: str, column: Rows) -> Field:
    if isinstance(column, Ragged):
        return Field(name, str(column.dtype), column.values.shape[1:], column.padding)
    return Field(name, str(column.dtype), column.shape[1:])


def _save(path: str, order: np.ndarray) -> None:
    """As ``np.save``, which would not say that the disk is full, only that less was written."""
    with open(path, "wb") as file:
        header = np.lib.format.header_data_from_array_1_0(order)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(order.data)
