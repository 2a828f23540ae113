"""The rows that the model is tried on before training starts.

They are the first rows of the data and, for each integer field, the rows with its smallest and its
largest value, because only those show a class number or an embedding index that is out of range. The
shortest and the longest row of a field of varying length are there too: position embeddings may be
too few.

A few more rows follow, on which a user's own loss is compared with the sum of its parts: a rare label,
or a rule for whole batches, shows only on many rows.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark import TaskContext

from sparkdl.data.fields import Extreme, Field, SampleHandle
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.ragged import Rows, concatenate

FIRST_ROWS = 2
MORE_ROWS, MORE_BYTES = 37, 8 << 20
"""The number of rows including the additional ones, if they take no more than ``MORE_BYTES``.

It is a prime number, because a dimension of the model is hardly ever that long.
"""


Work = Callable[[int, SampleHandle], Any]
"""A function of the number and the handle of a partition, which is called where its files are."""
Run = Callable[[str, Work, Sequence[int]], Sequence[Any]]
"""A function that returns what work returns for some partitions; the text says what is being done."""


@dataclass(frozen=True)
class OnHandles:
    """A Spark task over the sample RDD that does the work for each of its partitions."""

    work: Work

    def __call__(self, frames: Iterable[bytes]) -> list[Any]:
        context = TaskContext.get()
        assert context is not None
        return [self.work(context.partitionId(), pickle.loads(frame)) for frame in frames]


@dataclass(frozen=True)
class Preview:
    """The rows to try, which :meth:`read` reads in each partition, one array or Ragged a field."""

    rows: Mapping[int, Sequence[int]]  # by partition, in canonical order
    more: int = 0  # how many of the last rows of the first partition are additional

    @staticmethod
    def of(handles: Sequence[SampleHandle]) -> Preview:
        """Choose rows among the partitions of ``handles``, at least one of which must have rows."""
        first = next(i for i, handle in enumerate(handles) if handle.num_rows)
        rows = {first: [i % handles[first].num_rows for i in range(FIRST_ROWS)]}
        best: dict[tuple[int, int, bool], tuple[int, Extreme]] = {}
        for partition, handle in enumerate(handles):
            for found in (extreme for extreme in handle.extremes if extreme.tried):
                key = (found.field, found.sign, found.of_length)
                if key not in best or found.exceeds(best[key][1].value):
                    best[key] = (partition, found)
        for partition, extreme in best.values():
            chosen = rows.setdefault(partition, [])
            if extreme.row not in chosen:
                chosen.append(extreme.row)
        some = sum(map(len, rows.values()))
        wanted = min(MORE_ROWS, MORE_BYTES // max(1, row_bytes(handles[first].fields))) - some
        others = (i for i in range(handles[first].num_rows) if i not in rows[first])
        more = list(itertools.islice(others, max(0, wanted)))
        return Preview({**rows, first: [*rows[first], *more]}, len(more))

    def read(self, partition: int, handle: SampleHandle) -> list[Rows]:
        """Return the chosen rows of one partition, which is on this node."""
        return open_partition(handle).gather(np.array(self.rows.get(partition, ()), np.int64))

    def join(self, parts: Sequence[Sequence[Rows]]) -> tuple[list[Rows], list[Rows]]:
        """Return the rows to try, one array a field, and these followed by the additional ones."""
        first, *others = parts
        tried = [rows[: len(rows) - self.more] for rows in first]
        followed = [rows[len(rows) - self.more :] for rows in first]
        preview = [concatenate(arrays) for arrays in zip(tried, *others, strict=True)]
        if not self.more:
            return preview, preview
        return preview, [concatenate(pair) for pair in zip(preview, followed, strict=True)]


def looked_at(handles: Sequence[SampleHandle], run: Run) -> tuple[list[Rows], list[Rows]]:
    """Return :meth:`Preview.join` of samples in place."""
    preview = Preview.of(handles)
    return preview.join(run("look at the first samples", preview.read, [*preview.rows]))


def row_bytes(fields: Sequence[Field]) -> int:
    """Return the bytes of a row; a field of varying length is assumed to have 1,024 elements.

    The entries of a vector count as the vector, which the model may get.
    """
    return sum(
        math.prod(field.item_shape)
        * np.dtype(field.dtype).itemsize
        * (1024 if field.ragged and field.item_shape == field.shape else 1)
        for field in fields
    )
