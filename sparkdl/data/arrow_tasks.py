"""Samples of a DataFrame: the tasks that turn Arrow batches into slabs, or bring them here."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.partition_join import WrittenRows, join_partition
from sparkdl.data.partition_writer import PART_BYTES, PartitionWriter
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import quoted
from sparkdl.errors import DataError, raise_all
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.frames import send
from sparkdl.spark.worker import finish_task

FIRST_PART = 16
"""Rows of the first part, by which the size of a row is learned."""


@dataclass(frozen=True)
class WriteDataFrame:
    """Task of ``mapInArrow``: one partition of Arrow batches into slabs, out comes its handle."""

    config: SlabConfig
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = PartitionWriter(self.config, weighted=self.columns[-1].weight)
        try:
            self.write(batches, writer)
            handle = writer.finish()
        except RowError as error:
            handle = writer.fail(error.problem)
        yield pa.RecordBatch.from_pydict({"handle": [pickle.dumps(handle)]})
        finish_task()

    def write(self, batches: Iterable[pa.RecordBatch], writer: PartitionWriter) -> None:
        """Raises :class:`RowError`. A column beyond :attr:`columns` tells rows' partitions."""
        names = [column.name for column in self.columns]
        for batch in batches:
            for part in self._parts(batch, writer):
                arrays = [
                    to_numpy(part.column(i), column, writer.num_rows)
                    for i, column in enumerate(self.columns)
                ]
                split = part.num_columns > len(names)
                writer.add(names, arrays, part.column(len(names)).to_numpy() if split else None)

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


@dataclass(frozen=True)
class WriteParts:
    """Likewise, where the last column tells the partition of each row: a :class:`WrittenRows` of
    each of ``count`` partitions comes out, with its number."""

    table: WriteDataFrame
    count: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for partition, part in enumerate(self.parts(context.partitionId(), batches)):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([partition], pa.int32()),
                    pa.array([pickle.dumps(part, pickle.HIGHEST_PROTOCOL)], pa.binary()),
                ],
                names=["partition", "part"],
            )
        finish_task()

    def parts(self, source: int, batches: Iterable[pa.RecordBatch]) -> list[WrittenRows]:
        """Of each partition; of the first alone, where a row of ``source`` is wrong."""
        writer = PartitionWriter(self.table.config, source, self.table.columns[-1].weight)
        try:
            self.table.write(batches, writer)
            return list(writer.parts(self.count))
        except RowError as error:
            return [writer.failed_part(replace(error.problem, partition=source))]


def address_parts(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """Task over what :class:`WriteParts` gives: each part to its partition."""
    for target, part in rows:
        yield from send(target, bytes(part))
    finish_task()


@dataclass(frozen=True)
class JoinParts:
    """Task over the parts of a partition, on the node where they are: its handle."""

    config: SlabConfig

    def __call__(self, partition: int, parts: Iterable[bytes]) -> Iterator[bytes]:
        yield pickle.dumps(join_partition(self.config, [pickle.loads(part) for part in parts]))
        finish_task()


def select_columns(data: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """The columns in this order, under names of their own (one may be an input and a label)."""
    if data.isStreaming:
        raise DataError(
            "the DataFrame is a stream, which has no end: write it to a table, and use that table. "
            "trained.transform does work on a stream."
        )
    check_unambiguous(data, [column.name for column in columns])
    return data.select(
        *[functions.col(quoted(c.name)).alias(f"c{i}") for i, c in enumerate(columns)]
    )


def columns_named(data: DataFrame, name: str) -> list[str]:
    """The columns that Spark takes ``name`` for: those of its letters in any case, as a rule."""
    if data.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
        return [column for column in data.columns if column == name]
    return [column for column in data.columns if column.lower() == name.lower()]


def check_unambiguous(data: DataFrame, names: Sequence[str]) -> None:
    """Raise :class:`DataError` for a name that several columns have, as Spark compares names."""
    problems = []
    for name in dict.fromkeys(names):
        same = columns_named(data, name)
        if len(same) > 1:
            problems.append(
                f'column "{name}" is ambiguous, the DataFrame has {" and ".join(same)}: rename or '
                "drop all but one."
            )
    raise_all(DataError, problems)


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
        *[_hashable(functions.col(quoted(field.name)), field.dataType) for field in data.schema]
    )


def _hashable(column: SparkColumn, kind: DataType) -> SparkColumn:
    """``column`` without a map in it."""
    if not _has_map(kind):
        return column
    if isinstance(kind, MapType):
        entry = StructType([StructField("key", kind.keyType), StructField("value", kind.valueType)])
        return _hashable(functions.map_entries(column), ArrayType(entry))
    if isinstance(kind, ArrayType):
        return functions.transform(column, lambda item: _hashable(item, kind.elementType))
    assert isinstance(kind, StructType)
    return functions.struct(*[_hashable(column.getField(f.name), f.dataType) for f in kind.fields])


def _has_map(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_map(kind.elementType)
    if isinstance(kind, StructType):
        return any(_has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType)


def partition_of(data: DataFrame, count: int) -> SparkColumn:
    """The partition into which ``data.repartition(count, content_hash(data))`` puts a row.

    Spark's HashPartitioning is the Murmur3 hash (seed 42) of the expression, modulo ``count``.
    """
    return functions.pmod(functions.hash(content_hash(data)), functions.lit(count))


def partitions_of_rdds(data: DataFrame) -> int | None:
    """The number of partitions of a DataFrame made of RDDs alone, without a shuffle since; else None.

    Into how many Spark reads files, say, depends on the cores of the session.
    """
    execution = data._jdf.queryExecution()
    return execution.toRdd().getNumPartitions() if _of_rdds(execution.executedPlan()) else None


def _of_rdds(plan: Any) -> bool:
    """Whether a plan reads RDDs alone and shuffles nothing, adaptive or not; cached data as what was
    cached."""
    kind, inputs = plan.getClass().getSimpleName(), plan.children()
    if kind == "InMemoryTableScanExec":
        return _of_rdds(plan.relation().cachedPlan())
    if not inputs.size():
        return bool(plan.nodeName() == "Scan ExistingRDD")
    return "Exchange" not in kind and all(_of_rdds(inputs.apply(i)) for i in range(inputs.size()))


def first_field(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """Task: the one binary field of each row."""
    for row in rows:
        yield bytes(row[0])
    finish_task()
