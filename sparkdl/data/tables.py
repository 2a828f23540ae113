"""Samples of a DataFrame: the tasks that turn Arrow batches into slabs, or bring them here."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions
from pyspark.sql.types import MapType

from sparkdl.data.partition import PartitionWriter
from sparkdl.data.problems import RowProblem
from sparkdl.data.schema import Column, quoted
from sparkdl.data.values import to_numpy
from sparkdl.errors import DataError
from sparkdl.slab.root import SlabConfig
from sparkdl.worker import settle_worker

PART_BYTES = 16 << 20
"""How much of what grows when it is decoded is held at a time."""
FIRST_PART = 16
"""Rows of the first part, by which the size of a row is learned."""


@dataclass(frozen=True)
class WriteDataFrame:
    """Task of ``mapInArrow``: one partition of Arrow batches into slabs, out comes its handle."""

    config: SlabConfig
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = PartitionWriter(self.config)
        names = [column.name for column in self.columns]
        try:
            for batch in batches:
                for part in self._parts(batch, writer):
                    writer.add(
                        names,
                        [
                            to_numpy(part.column(i), column, writer.num_rows)
                            for i, column in enumerate(self.columns)
                        ],
                    )
            handle = writer.finish()
        except RowProblem as error:
            handle = writer.fail(error.problem)
        yield pa.RecordBatch.from_pydict({"handle": [pickle.dumps(handle)]})
        settle_worker()

    def _parts(self, batch: pa.RecordBatch, writer: PartitionWriter) -> Iterator[pa.RecordBatch]:
        """The batch, cut where its tensors may be much larger than its columns: images, say."""
        start = 0
        while start < batch.num_rows:
            rows = batch.num_rows
            if any(column.grows for column in self.columns):
                rows = PART_BYTES // writer.row_bytes if writer.num_rows else FIRST_PART
            part = batch.slice(start, max(1, rows))
            yield part
            start += part.num_rows


def select_columns(data: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """The columns in this order, under names of their own (one may be an input and a label)."""
    if data.isStreaming:
        raise DataError(
            "the DataFrame is a stream, which has no end: write it to a table, and use that table. "
            "trained.transform does work on a stream."
        )
    return data.select(
        *[functions.col(quoted(c.name)).alias(f"c{i}") for i, c in enumerate(columns)]
    )


def ship_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Task of ``mapInArrow``: the partition's batches as one IPC stream each, with its number."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([context.partitionId()], pa.int32()),
                pa.array([sink.getvalue().to_pybytes()], pa.binary()),
            ],
            names=["partition", "batches"],
        )


def content_hash(data: DataFrame) -> SparkColumn:
    """A hash of whole rows. A map, which Spark does not hash, goes in as the array of its entries."""
    return functions.xxhash64(
        *[
            functions.map_entries(field.name) if isinstance(field.dataType, MapType) else field.name
            for field in data.schema
        ]
    )


def first_field(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """Task: the one binary field of each row."""
    for row in rows:
        yield bytes(row[0])
    settle_worker()
