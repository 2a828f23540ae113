"""Rows that many others equal, spread evenly over the partitions.

[Note: equal rows] Rows go to partitions by a hash of their content, so all copies of a row meet in one
partition, and a table of two kinds of rows would leave all but two replicas idle. Whoever joins a
partition sees its equal rows side by side and counts them. Only if some have many copies, the
partitions are written a second time: each keeps its share of the copies, and gets one row of every kind
of which it has a share now; its order names that row several times. Which copy is which does not
matter, as they are equal. So the result depends on the content of the rows alone, and rows that are all
different stay where they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparkdl.data.fields import Field, RowFile, SampleHandle
from sparkdl.data.partition_reader import SegmentWriter, map_file, segment_files
from sparkdl.data.partition_writer import save_order, where_there_is_room
from sparkdl.data.preview import Preview, Run, row_bytes
from sparkdl.data.ragged import Rows, concatenate
from sparkdl.data.row_order import row_hashes
from sparkdl.errors import TrainingError
from sparkdl.slab.root import SlabConfig, open_root

logger = logging.getLogger("sparkdl")

KINDS = 64
"""Rows are spread that have more copies than one of so many equal portions of a partition's mean."""
MOST_KINDS, MOST_BYTES = 4096, 256 << 20
"""The most kinds of rows that are spread, those with the most copies, and the most bytes of one row of
each: they travel through the driver."""
SPREAD = "spread equal rows"
UNEVEN, FEWEST_ROWS = 1.5, 64
"""A share is uneven above so many times the mean. Means of fewer rows vary that much by chance."""


@dataclass(frozen=True)
class SpreadRows:
    """A task over partitions in place that changes which copies of repeated rows they have.

    The kinds of rows to be spread are in the order of their partition, and of their place there.
    """

    slab: SlabConfig
    fields: tuple[Field, ...]
    homes: np.ndarray  # the partition that has all copies
    starts: np.ndarray  # the first of them, in the order of that partition
    counts: np.ndarray
    shares: np.ndarray  # copies that each partition is to have, (kinds, partitions)
    rows: tuple[Rows, ...]  # one of each kind, one entry a field

    @staticmethod
    def of(slab: SlabConfig, handles: Sequence[SampleHandle], run: Run) -> SpreadRows | None:
        """Return what is to be spread among partitions that hashes have made, or None."""
        sizes, partitions = np.array([handle.num_rows for handle in handles]), len(handles)
        least = int(sizes.sum()) // (KINDS * partitions)
        found = [
            (-count, home, start)
            for home, handle in enumerate(handles)
            for start, count in handle.repeats
            if count > least
        ]
        kinds_of_rows = {handle.fields for handle in handles if handle.num_rows}
        wrong = any(handle.problem for handle in handles) or len(kinds_of_rows) > 1
        if partitions == 1 or not found or wrong:  # check_handles says what is wrong
            return None
        (fields,) = kinds_of_rows
        kinds = sorted(found)[: max(1, min(MOST_KINDS, MOST_BYTES // max(1, row_bytes(fields))))]
        counts, homes, starts = np.abs(np.array(kinds, np.int64)).T
        np.subtract.at(sizes, homes, counts)
        shares = np.zeros((len(kinds), partitions), np.int64)
        for share, count, home in zip(shares, counts.tolist(), homes.tolist(), strict=True):
            each, rest = divmod(count, partitions)
            share[:] = each
            if not each:  # one copy stays, since it may be the row of an extreme
                share[home], rest = 1, rest - 1
            smallest = np.lexsort((sizes, share))
            share[smallest[:rest]] += 1
            sizes += share
        by_home = np.lexsort((starts, homes))
        homes, starts, counts, shares = (a[by_home] for a in (homes, starts, counts, shares))
        one = Preview({m: starts[homes == m].tolist() for m in np.unique(homes).tolist()})
        parts = run(SPREAD, one.read, [*one.rows])
        rows = tuple(concatenate(columns) for columns in zip(*parts, strict=True))
        return SpreadRows(slab, fields, homes, starts, counts, shares, rows)

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for frame in frames:
            yield pickle.dumps(self.changed(partition, pickle.loads(frame)))

    def changed(self, partition: int, handle: SampleHandle) -> SampleHandle:
        """Return the handle of the partition with its share of each kind; its old order is deleted."""
        if handle.problem is not None:
            return handle
        shares, counts = self.shares[:, partition], self.counts
        mine = self.homes == partition
        kinds = zip(self.starts[mine].tolist(), counts[mine].tolist(), strict=True)
        if not {*kinds} <= {(start, count) for start, count in handle.repeats}:
            raise TrainingError(
                f"partition {partition} was computed again and holds other rows: the source of the "
                "data is not deterministic. Write it out (df.write.parquet), and fit on that."
            )
        order = np.zeros(0, np.int64)
        if handle.order_path:
            order = np.array(map_file(handle.order_path, "int64", (-1,)))
        kept = np.ones(len(order), bool)
        for start, count, share in zip(
            *(array[mine].tolist() for array in (self.starts, counts, shares)), strict=True
        ):
            kept[start + share : start + count] = False
        places = np.cumsum(kept) - 1  # of a copy that leaves, that of the last one that stays
        extremes = tuple(replace(e, row=int(places[e.row])) for e in handle.extremes)
        root = open_root(self.slab, create=True)
        assert root is not None
        new, segments = np.flatnonzero(~mine & (shares > 0)), handle.segments
        order = order[kept]
        if len(new):
            rows, first = [column[new] for column in self.rows], sum(s.num_rows for s in segments)
            nbytes = sum(column.nbytes for column in rows)
            written = where_there_is_room(root, lambda folder: self._write(folder, rows), 0, nbytes)
            segments = (*segments, written)
            order = np.concatenate([order, np.repeat(first + np.arange(len(new)), shares[new])])
        path = where_there_is_room(
            root, lambda folder: save_order(folder, order), len(order), order.nbytes
        )
        if handle.order_path:
            Path(handle.order_path).unlink(missing_ok=True)
        more = (shares - np.where(mine, counts, 0)).astype(np.uint64)
        change = int((row_hashes(self.rows) * more).sum(dtype=np.uint64))
        return replace(
            handle,
            segments=segments,
            order_path=path,
            num_rows=len(order),
            checksum=(handle.checksum + change) % 2**64,
            fields=self.fields,
            extremes=extremes,
            repeats=(),
        )

    def _write(self, folder: Path, rows: Sequence[Rows]) -> RowFile:
        path = str(folder / f"samples-{secrets.token_hex(8)}-0")
        writer = SegmentWriter(path, self.fields, rows)
        writer.close()
        return writer.segment


def delete_partition(rows: bool, partition: int, handle: SampleHandle) -> None:
    """Delete the order, and if ``rows`` the rows, of a partition that is to be written again."""
    parts = handle.segments if rows else ()
    names = [name for part in parts for name in segment_files(part, handle.fields)]
    for path in (*names, handle.order_path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def tell_of_shares(handles: Sequence[SampleHandle]) -> None:
    """Warn if the largest share of the rows is far above the mean, so that other replicas idle."""
    sizes = [handle.num_rows for handle in handles]
    largest, mean = max(sizes), sum(sizes) / len(sizes)
    if mean >= FEWEST_ROWS and largest > UNEVEN * mean:
        logger.warning(
            "replica %d has %s of the %s rows, %.1f times the mean share of %d replicas, and %d have "
            "none: in each iteration the others wait for it. Data that comes in as many partitions as "
            "replicas keeps them: give it another number of partitions, and rows are spread evenly.",
            sizes.index(largest),
            f"{largest:,}",
            f"{sum(sizes):,}",
            largest / mean,
            len(sizes),
            sizes.count(0),
        )
