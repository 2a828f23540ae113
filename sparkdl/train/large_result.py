"""Results that are too large for the rows of a query: in files, beside the checkpoints of the run.

Rank 0 writes them, and the client reads them with queries of their own, a task for each piece, so that
no task's result is large.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.checkpoint.files import Folder
from sparkdl.errors import CheckpointError
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.worker import finish_task

PIECE_BYTES = 4 << 20
AT_ONCE = 64
"""The number of pieces that one query reads."""
_SCHEMA = "number long, data binary"


@dataclass(frozen=True)
class StoredRows:
    """Rows in files.

    Attributes:
        uri: The folder.
        sizes: The bytes of each row, by kind, in the order in which they are stored.
    """

    uri: str
    sizes: Mapping[str, int]

    @property
    def pieces(self) -> int:
        """Return the number of files."""
        return -(-sum(self.sizes.values()) // PIECE_BYTES)

    def fetch(self, session: Any) -> dict[str, bytes]:
        """Read the rows in a session of Spark Connect, and delete the files."""
        data = bytearray()
        for start in range(0, self.pieces, AT_ONCE):
            stop = min(start + AT_ONCE, self.pieces)
            frame = session.range(start, stop, 1, stop - start)
            with reading_explained("fetching the model"):
                table = frame.mapInArrow(_Read(self.uri), _SCHEMA).toArrow()
            for row in sorted(table.to_pylist(), key=lambda row: row["number"]):
                data += row["data"]
        session.range(0, 1, 1, 1).mapInArrow(_Delete(self.uri, self.pieces), _SCHEMA).toArrow()
        rows, start = {}, 0
        for kind, nbytes in self.sizes.items():
            rows[kind] = bytes(memoryview(data)[start : start + nbytes])
            start += nbytes
        return rows


def store_rows(path: str | os.PathLike[str], rows: Mapping[str, bytes]) -> StoredRows:
    """Write rows into a new folder in ``path``.

    Args:
        path: A folder that all executors share.
        rows: The rows by kind.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    folder = Folder.of(path).folder(f"result-{secrets.token_hex(8)}")
    folder.make()
    data = b"".join(rows.values())
    stored = StoredRows(folder.uri, {kind: len(content) for kind, content in rows.items()})
    for number in range(stored.pieces):
        folder.write(_name(number), data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
    return stored


def _name(number: int) -> str:
    return f"piece-{number:05d}"


@dataclass(frozen=True)
class _Read:
    """The task that reads the pieces whose numbers it gets."""

    uri: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                data = Folder(self.uri).read(_name(number))
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int64()), pa.array([data], pa.binary())],
                    names=["number", "data"],
                )
        finish_task()


@dataclass(frozen=True)
class _Delete:
    """The task that deletes the files and their folder."""

    uri: str
    pieces: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        folder = Folder(self.uri)
        with contextlib.suppress(CheckpointError):
            for number in range(self.pieces):
                folder.delete(_name(number))
            folder.delete_empty()
        finish_task()
        yield from ()
