"""Joining the rows that tasks wrote into a partition: canonical order, checksum and handle."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from sparkdl.data.fields import Extreme, Field, RowFile, SampleHandle
from sparkdl.data.partition_files import write_all
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.data.row_errors import SAME_SHAPE, BadRow
from sparkdl.data.row_order import canonical_order, checksum, ties
from sparkdl.errors import SlabFullError
from sparkdl.slab.root import Root, SlabConfig, open_private, open_root

COMPARE_BYTES = 64 << 20
"""Bytes of rows with equal hashes that are held at a time to sort them."""
Extremes = dict[tuple[int, int, bool], Extreme]
_T = TypeVar("_T")


@dataclass(frozen=True)
class WrittenRows:
    """Rows of one partition, as one task wrote them."""

    node_id: str
    segments: tuple[RowFile, ...]
    fields: tuple[Field, ...]
    places: np.ndarray  # of these rows in the segments, one after another (int64)
    hashes: np.ndarray
    extremes: tuple[Extreme, ...] = ()  # the row of each is its place
    row_bytes: int = 1
    problem: BadRow | None = None
    source: int = 0  # the number of the task


def join_partition(config: SlabConfig, parts: Sequence[WrittenRows]) -> SampleHandle:
    """Join the rows of all ``parts`` into a partition; the rows stay in their files on this node.

    Write the canonical order of the rows. This takes about 40 bytes of memory a row.
    """
    root = open_root(config, create=True)
    assert root is not None
    parts = sorted(parts, key=lambda part: part.source)
    problem = next((part.problem for part in parts if part.problem), None) or _differing(parts)
    if problem is not None:
        return SampleHandle(root.node_id, (), "", 0, 0, (), problem=problem)
    parts = [part for part in parts if len(part.places)]
    segments = tuple(segment for part in parts for segment in part.segments)
    lengths = [sum(segment.num_rows for segment in part.segments) for part in parts]
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    places = _joined([part.places + begin for part, begin in zip(parts, begins, strict=True)])
    hashes = _joined([part.hashes for part in parts]).astype(np.uint64, copy=False)
    fields = parts[0].fields if parts else ()
    rows = MappedPartition.map(segments, "", fields)
    at_once = COMPARE_BYTES // max((part.row_bytes for part in parts), default=1) or 1
    ranking = canonical_order(hashes, lambda numbers: rows.contents(places[numbers]), at_once)
    order = places[ranking]
    repeats = tuple(_repeats(hashes, ranking, lambda where: rows.contents(order[where]), at_once))
    del ranking
    extremes: Extremes = {}
    for part, begin in zip(parts, begins, strict=True):
        for extreme in part.extremes:
            keep_extreme(extremes, replace(extreme, row=extreme.row + begin))
    order_path = where_there_is_room(
        root, lambda folder: save_order(folder, order), len(order), order.nbytes
    )
    return SampleHandle(
        node_id=root.node_id,
        segments=segments,
        order_path=order_path,
        num_rows=len(order),
        checksum=checksum(hashes),
        fields=fields,
        extremes=tuple(replace(e, row=int(np.argmax(order == e.row))) for e in extremes.values()),
        repeats=repeats,
    )


REPEATED = 1024
"""Equal rows are told of that are more than one of so many equal portions of their partition."""


def _repeats(
    hashes: np.ndarray,
    ranking: np.ndarray,
    contents: Callable[[np.ndarray], np.ndarray],
    rows_at_once: int,
) -> Iterator[tuple[int, int]]:
    """Yield the places and numbers of :attr:`SampleHandle.repeats`.

    A run of equal hashes is sorted by content, so its rows are equal if the first and the last are.
    """
    starts, stops = ties(hashes, ranking)
    many = (stops - starts) * REPEATED > len(ranking)
    starts, stops = starts[many], stops[many]
    step = max(1, rows_at_once // 2)
    for begin in range(0, len(starts), step):
        some = slice(begin, begin + step)
        equal = contents(starts[some]) == contents(stops[some] - 1)
        for start, stop in zip(
            starts[some][equal].tolist(), stops[some][equal].tolist(), strict=True
        ):
            yield start, stop - start


def keep_extreme(extremes: Extremes, found: Extreme) -> None:
    """Keep ``found`` if it is the most extreme of its kind so far."""
    key = (found.field, found.sign, found.of_length)
    known = extremes.get(key)
    if known is None or found.exceeds(known.value):
        extremes[key] = found


def where_there_is_room(root: Root, write: Callable[[Path], _T], num_rows: int, nbytes: int) -> _T:
    """Return ``write(directory)`` for the first directory of the slab root that has room."""
    for directory in root.directories_for(nbytes):
        try:
            return write(directory)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    raise SlabFullError(
        f"there is not enough room for the samples in {', '.join(map(str, root.directories))} "
        f"after row {num_rows:,}. Free space there, or point spark.sparkdl.slab.dir at a larger "
        "directory."
    )


def _differing(parts: Sequence[WrittenRows]) -> BadRow | None:
    """Return the problem if tasks found rows of different shapes."""
    filled = [part for part in parts if part.fields]
    for part in filled[1:]:
        for found, wanted in zip(part.fields, filled[0].fields, strict=True):
            if found != wanted:
                text = f"is {found} where row 0 of partition {filled[0].source} is {wanted}"
                return BadRow(found.name, 0, text, SAME_SHAPE, part.source)
    return None


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def save_order(folder: Path, order: np.ndarray) -> str:
    """Write the order of a partition's rows into a new file of a slab root, and return its path."""
    path = folder / f"samples-{secrets.token_hex(8)}.order"
    with open(path, "xb", buffering=0, opener=open_private) as file:
        try:
            write_all(file, order)
        except OSError:
            path.unlink()
            raise
    return str(path)
