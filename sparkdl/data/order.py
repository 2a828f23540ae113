"""A canonical order for the rows of a partition, whatever order they arrived in.

A shuffle delivers its blocks in any order, so a partition that is computed again may hold the same
rows in another order. Training must not depend on that: rows are numbered by the order of their
content, not of their arrival.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np


def row_hashes(columns: Sequence[np.ndarray]) -> np.ndarray:
    """CRC-32 of each row over all columns (arrays of equal first dimension); uint32, (rows,)."""
    num_rows = len(columns[0])
    hashes = [0] * num_rows
    for column in columns:
        data = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
        width = len(data) // num_rows if num_rows else 0
        hashes = [
            zlib.crc32(data[i * width : (i + 1) * width], crc) for i, crc in enumerate(hashes)
        ]
    return np.array(hashes, dtype=np.uint32)


def row_contents(columns: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of each row over all columns, as one value of dtype void; shape (rows,)."""
    num_rows = len(columns[0])
    parts = [np.ascontiguousarray(c).reshape(num_rows, -1).view(np.uint8) for c in columns]
    joined = np.concatenate(parts, axis=1)
    return joined.view(np.dtype((np.void, joined.shape[1]))).reshape(num_rows)


def canonical_order(
    hashes: np.ndarray, contents: Callable[[np.ndarray], np.ndarray] | None
) -> np.ndarray:
    """The permutation (int64) that sorts rows by hash, rows of equal hash by their bytes.

    ``contents`` gives :func:`row_contents` of some rows by their numbers, asked only in a tie.
    """
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    edges = np.flatnonzero(np.diff(ranked)) + 1
    starts = np.concatenate([[0], edges])
    stops = np.concatenate([edges, [len(order)]])
    for start, stop in zip(starts, stops, strict=True):
        if stop - start > 1:
            assert contents is not None
            tied = order[start:stop]
            order[start:stop] = tied[contents(tied).argsort(kind="stable")]
    return order


def checksum(hashes: np.ndarray) -> int:
    """A checksum of the multiset of rows: the same for any order of the same rows."""
    return int(np.bitwise_xor.reduce(hashes * np.uint32(2654435761), initial=np.uint32(0))) ^ (
        int(hashes.sum(dtype=np.uint64)) << 32
    )
