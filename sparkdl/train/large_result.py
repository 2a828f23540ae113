"""Results that are too large for the rows of a query: in files, beside the checkpoints of the run.

Rank 0 writes them, and the client reads them with queries of their own, a task for each piece, so that
no task's result is large. Others may be able to write to the folder: the digest of each piece comes
with the rows of the gang's query, which Spark protects, and the client opens no piece that has
another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.store import piece_name, result_name
from sparkdl.errors import CheckpointError
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.worker import finish_task

PIECE_BYTES = 4 << 20
AT_ONCE = 64
"""The number of pieces that one query reads."""
_SCHEMA = "number long, data binary"


@dataclass(frozen=True)
class StoredRows:
    """Rows in files."""

    uri: str
    sizes: Mapping[str, int]  # bytes by kind, in the order in which they are stored
    digests: tuple[bytes, ...]  # SHA-256 of each file

    def fetch(self, session: Any) -> dict[str, bytes]:
        """Read the rows in a session of Spark Connect, and delete the files."""
        data = bytearray()
        pieces = len(self.digests)
        for start in range(0, pieces, AT_ONCE):
            stop = min(start + AT_ONCE, pieces)
            frame = session.range(start, stop, 1, stop - start)
            with reading_explained("fetching the model"):
                table = frame.mapInArrow(_Read(self.uri), _SCHEMA).toArrow()
            for row in sorted(table.to_pylist(), key=lambda row: row["number"]):
                if hashlib.sha256(row["data"]).digest() != self.digests[row["number"]]:
                    raise CheckpointError(
                        f"{Folder(self.uri)}/{piece_name(row['number'])} is not the part of the result "
                        "that rank 0 has written: it is damaged, or somebody else has changed it. Let "
                        "only this user write to the folder of Checkpoint(path), and go on with "
                        'resume="latest".'
                    )
                data += row["data"]
        session.range(0, 1, 1, 1).mapInArrow(_Delete(self.uri, pieces), _SCHEMA).toArrow()
        rows, start = {}, 0
        for kind, nbytes in self.sizes.items():
            rows[kind] = bytes(memoryview(data)[start : start + nbytes])
            start += nbytes
        return rows


def store_rows(path: str | os.PathLike[str], rows: Mapping[str, bytes]) -> StoredRows:
    """Write rows into a new folder in ``path``, which all executors share."""
    folder = Folder.of(path).folder(result_name())
    folder.make()
    data, digests = b"".join(rows.values()), []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        piece = data[start : start + PIECE_BYTES]
        folder.write(piece_name(number), piece)
        digests.append(hashlib.sha256(piece).digest())
    sizes = {kind: len(content) for kind, content in rows.items()}
    return StoredRows(folder.uri, sizes, tuple(digests))


@dataclass(frozen=True)
class _Read:
    """The task that reads the pieces whose numbers it gets."""

    uri: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                data = Folder(self.uri).read(piece_name(number))
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
                folder.delete(piece_name(number))
            folder.delete_empty()
        finish_task()
        yield from ()
