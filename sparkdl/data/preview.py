"""The rows that the model is tried on before anything trains.

The first rows of the data, and for each integer field the rows with its smallest and its largest
value: a class number or an embedding index that is out of range shows there or nowhere. Likewise the
shortest and the longest row of a field of varying length: positions may run out.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pyspark import TaskContext

from sparkdl.data.handle import Extreme, SampleHandle
from sparkdl.data.mapped import open_partition
from sparkdl.data.ragged import Rows, concatenate

FIRST_ROWS = 2


@dataclass(frozen=True)
class Preview:
    """Task over the sample RDD: the rows to try, one array (or :class:`Ragged`) a field.

    ``rows``: for each partition to look at, the numbers of its rows in canonical order.
    """

    rows: Mapping[int, Sequence[int]]

    @staticmethod
    def of(handles: Sequence[SampleHandle]) -> Preview:
        """Choose among the partitions of ``handles``; one of them must have rows."""
        first = next(i for i, handle in enumerate(handles) if handle.num_rows)
        rows = {first: [i % handles[first].num_rows for i in range(FIRST_ROWS)]}
        best: dict[tuple[int, int, bool], tuple[int, Extreme]] = {}
        for partition, handle in enumerate(handles):
            for found in handle.extremes:
                key = (found.field, found.sign, found.of_length)
                if key not in best or found.exceeds(best[key][1].value):
                    best[key] = (partition, found)
        for partition, extreme in best.values():
            chosen = rows.setdefault(partition, [])
            if extreme.row not in chosen:
                chosen.append(extreme.row)
        return Preview(rows)

    def read(self, partition: int, handle: SampleHandle) -> list[Rows]:
        """The chosen rows of one partition, which is on this node."""
        return open_partition(handle).gather(np.array(self.rows[partition]))

    def __call__(self, frames: Iterable[bytes]) -> list[list[Rows]]:
        context = TaskContext.get()
        assert context is not None
        return [self.read(context.partitionId(), pickle.loads(frame)) for frame in frames]

    @staticmethod
    def join(parts: Sequence[Sequence[Rows]]) -> list[Rows]:
        """What was read from several partitions, as one array a field."""
        return [concatenate(arrays) for arrays in zip(*parts, strict=True)]
