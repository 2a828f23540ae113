"""A canonical order for the rows of a partition, independent of the order of arrival.

A shuffle delivers its blocks in any order, so a partition that is recomputed may hold the same rows in
another order. Training must not depend on that, so rows are numbered in the order of their content.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sparkdl.data.epoch import STEP, mixed
from sparkdl.data.ragged import Ragged, Rows


def row_hashes(columns: Sequence[Rows]) -> np.ndarray:
    """Return a hash of each row over all columns (with equally many rows); uint64, (rows,).

    The hash is the sum of a row's 32-bit words, each times a random 64-bit number for its place: the
    multilinear family of Lemire & Kaser, "Strongly universal string hashing is fast", 2014
    (https://arxiv.org/abs/1202.4961). It takes one pass in numpy. The bits are mixed afterwards, so
    that a sum over rows distinguishes more than a sum over words. A row of varying length enters as
    the CRC-32 of its length and its bytes, so that no two columns can trade values; the entries of a
    vector as the vector itself, whose zeros add nothing.
    """
    hashes = np.zeros(len(columns[0]), dtype=np.uint64)
    for number, column in enumerate(columns):
        if isinstance(column, Ragged) and column.padding.entries_of is not None:
            hashes += _sums_of_entries(number, column, column.padding.entries_of)
            continue
        words = _words(column)
        hashes += np.einsum(
            "ij,j->i", words, _keys(number, words.shape[1]), dtype=np.uint64, casting="unsafe"
        )
    return mixed(hashes + STEP)


def _sums_of_entries(number: int, column: Ragged, size: int) -> np.ndarray:
    """Return the sum of the words of each row's vector, each times the number of its place."""
    entries, offsets = column.flat
    values = np.ascontiguousarray(entries[:, 1])
    words = values.view(np.uint32).reshape(len(values), values.itemsize // 4)
    keys = _keys(number, size * words.shape[1]).reshape(size, -1)[entries[:, 0].astype(np.int64)]
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum((words * keys).sum(1, dtype=np.uint64), out=sums[1:])
    return np.diff(sums[offsets])


def _words(column: Rows) -> np.ndarray:
    """Return each row's bytes as unsigned words of 4 bytes, or of 2 or 1 if 4 do not divide a row."""
    if isinstance(column, Ragged):
        return np.array([[zlib.crc32(piece)] for piece in _pieces(column)], dtype=np.uint32)
    if not column.size:
        return np.zeros((len(column), 1), dtype=np.uint32)
    values = np.ascontiguousarray(column).reshape(len(column), -1)
    width = values.shape[1] * values.itemsize
    return values.view(np.uint32 if width % 4 == 0 else np.uint16 if width % 2 == 0 else np.uint8)


@functools.lru_cache(maxsize=64)
def _keys(column: int, count: int) -> np.ndarray:
    """Return odd random numbers (uint64, read-only), the same in every process."""
    keys = np.random.PCG64(0x5DA7 + column).random_raw(count) | np.uint64(1)
    keys.flags.writeable = False
    return keys


def _pieces(column: Rows) -> Iterator[memoryview | bytes]:
    """Yield the bytes of each row of one column."""
    if isinstance(column, Ragged):
        for row in column:
            held = b"".join(_pieces(row)) if isinstance(row, Ragged) else row.tobytes()
            yield len(row).to_bytes(8, "little") + held
        return
    data = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
    width = len(data) // len(column) if len(column) else 0
    for i in range(len(column)):
        yield data[i * width : (i + 1) * width]


def row_contents(columns: Sequence[Rows]) -> np.ndarray:
    """Return the bytes of each row over all columns; shape (rows,), to sort and compare.

    The dtype is void; it is object (bytes) if a column is of varying length.
    """
    num_rows = len(columns[0])
    if any(isinstance(column, Ragged) for column in columns):
        contents = np.empty(num_rows, dtype=object)
        contents[:] = [b"".join(row) for row in zip(*map(_pieces, columns), strict=True)]
        return contents
    parts = [np.ascontiguousarray(c).reshape(num_rows, -1).view(np.uint8) for c in columns]
    joined = np.concatenate(parts, axis=1)
    return joined.view(np.dtype((np.void, joined.shape[1]))).reshape(num_rows)


def canonical_order(
    hashes: np.ndarray, contents: Callable[[np.ndarray], np.ndarray], rows_at_once: int = 1 << 16
) -> np.ndarray:
    """Return the permutation (int64) that sorts rows by hash, and those of equal hash by bytes.

    ``contents`` (:func:`row_contents` by row numbers) is called for ties only, with at most
    ``rows_at_once``, since the partition may be larger than memory.
    """
    order = np.argsort(hashes)
    starts, stops = ties(hashes, order)
    groups = np.cumsum(stops - starts) // rows_at_once
    for some in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(groups)) + 1):
        sizes = stops[some] - starts[some]
        tie = np.repeat(np.arange(len(some)), sizes)
        places = np.arange(len(tie)) + (starts[some] - np.cumsum(sizes) + sizes)[tie]
        rows = order[places]
        known, numbers = dict[Any, int](), np.empty(len(rows), np.int32)
        for begin in range(0, len(rows), rows_at_once):
            found = contents(rows[begin : begin + rows_at_once]).tolist()
            for content in set(found):
                known.setdefault(content, len(known))
            numbers[begin : begin + rows_at_once] = [known[content] for content in found]
        if len(known) <= 1:  # a tie is nearly always one row that is repeated
            continue
        ranks = np.empty(len(known), np.int64)
        ranks[[known[content] for content in sorted(known)]] = np.arange(len(known))
        order[places] = rows[np.lexsort((ranks[numbers], tie))]
    return order


def ties(hashes: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of equal hashes, of two rows or more, start and stop in the ``order``."""
    ranked = hashes[order]
    tied = np.zeros(len(order) + 1, dtype=np.int8)  # whether a row ties with the one before it
    np.equal(ranked[1:], ranked[:-1], out=tied[1:-1].view(bool))
    steps = np.diff(tied)
    return np.flatnonzero(steps == 1), np.flatnonzero(steps == -1) + 1


def checksum(hashes: np.ndarray) -> int:
    """Return a checksum of the multiset of rows: the same for any order of the same rows."""
    return int(hashes.sum(dtype=np.uint64))
