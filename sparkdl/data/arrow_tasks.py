"""Spark tasks that write a DataFrame's Arrow batches into slabs, or ship them to the driver."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from sparkdl.data.columns.base import Column, suited
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field, zero_row
from sparkdl.data.partition_writer import (
    PART_BYTES,
    PartitionWriter,
    WrittenRows,
    field_of,
    join_partition,
)
from sparkdl.data.ragged import Rows, concatenate
from sparkdl.data.row_errors import AS_ERRORS, BadRow, Handling, InvalidRow, RowError
from sparkdl.data.schema import quoted
from sparkdl.errors import DataError, in_quotes, raise_all
from sparkdl.session import is_connected
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.frames import send
from sparkdl.spark.worker import finish_task

FIRST_PART = 16
"""Number of rows in the first part; the writer learns the size of a row from it."""


@dataclass(frozen=True)
class WriteDataFrame:
    """A ``mapInArrow`` task that writes one partition into slabs and yields its handle."""

    config: SlabConfig
    columns: tuple[Column, ...]
    handling: Handling = AS_ERRORS

    @property
    def names(self) -> list[str]:
        """The columns of :func:`select_columns`."""
        keys = [] if self.handling.key is None else [KEY]
        return [*(f"c{i}" for i in range(len(self.columns))), *keys]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = PartitionWriter(self.config, weighted=self.columns[-1].weight)
        handle = writer.filled(lambda: self.write(batches, writer))
        yield pa.RecordBatch.from_pydict({"handle": [pickle.dumps(handle)]})
        finish_task()

    def write(self, batches: Iterable[pa.RecordBatch], writer: PartitionWriter) -> None:
        """Write the rows of ``batches``.

        A batch may have more columns than :attr:`columns`: the keys of rows, if :attr:`handling` has a
        column for them, and then the partition of each row.
        """
        names = [column.name for column in self.columns]
        labels = [i for i, column in enumerate(self.columns) if column.label]
        place = len(names) + (self.handling.key is not None)
        for batch in batches:
            for part in self._parts(batch, writer):
                partitions = part.column(place).to_numpy() if part.num_columns > place else None
                first = writer.rows_read
                try:
                    arrays, kept = self._read(part, writer)
                    if kept is not None and partitions is not None:
                        partitions = partitions[kept]
                    writer.add(names, arrays, partitions, labels)
                except RowError as error:
                    name, row = error.problem.column, error.problem.row - first
                    if name in names and row in range(part.num_rows):
                        error.note_value(part.column(names.index(name))[row].as_py())
                    raise

    def _read(
        self, part: pa.RecordBatch, writer: PartitionWriter
    ) -> tuple[list[Rows], np.ndarray | None]:
        """Return the tensors of rows, and which rows these are if some were left out."""
        first, way = writer.rows_read, self.handling.way
        arrays = part.columns[: len(self.columns)]
        columns = [
            adapted(array, column, number, writer)
            for number, (array, column) in enumerate(zip(arrays, self.columns, strict=True))
        ]
        with contextlib.suppress(*(() if way == "error" else (RowError,))):
            return [to_numpy(a, c, first) for a, c in zip(arrays, columns, strict=True)], None
        reasons = [dict(bad_rows(a, c)) for a, c in zip(arrays, columns, strict=True)]
        keyed = self.handling.key is not None
        keys = part.column(len(arrays)).to_pylist() if keyed else [None] * part.num_rows
        invalid: dict[int, InvalidRow] = {}
        for column, bad in zip(columns, reasons, strict=True):
            for row, reason in bad.items():
                invalid.setdefault(row, InvalidRow(keys[row], column.name, reason, first + row))
        kept = np.setdiff1d(np.arange(part.num_rows), np.fromiter(invalid, np.int64))
        fields = writer.fields or [None] * len(arrays)
        rows = [
            to_numpy(array.take(pa.array(kept)), column, first)
            if way == "skip"
            else _with_zeros(array, column, bad, field, first)
            for array, column, bad, field in zip(arrays, columns, reasons, fields, strict=True)
        ]
        writer.note_invalid([invalid[row] for row in sorted(invalid)], way == "skip")
        return rows, kept if way == "skip" else None

    def _parts(self, batch: pa.RecordBatch, writer: PartitionWriter) -> Iterator[pa.RecordBatch]:
        """Cut the batch where its tensors may be much larger than its columns, as for images."""
        start = 0
        while start < batch.num_rows:
            rows = batch.num_rows
            if any(column.grows for column in self.columns):
                rows = PART_BYTES // writer.row_bytes if writer.num_rows else FIRST_PART
            part = batch.slice(start, max(1, rows))
            yield part
            start += part.num_rows


def adapted(array: pa.Array, column: Column, number: int, writer: PartitionWriter) -> Column:
    """Return a column as it is read from here on: as before, or as its values ask for."""
    column = writer.adapted.get(number, column)
    other = suited(column, array)
    if other is None:
        return column
    problem = None
    if column.label:
        try:
            to_numpy(array, column, writer.rows_read)
        except RowError as error:
            problem = error.problem
    writer.adapt(number, other, problem)
    return other


def bad_rows(array: pa.Array, column: Column, first: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the number of each row that cannot be read by itself, and why."""
    try:
        to_numpy(array, column)
        return
    except RowError as error:
        if len(array) == 1:
            yield first, error.problem.text
            return
    if array.null_count:  # all are alike
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        nulls, others = np.flatnonzero(is_null).tolist(), np.flatnonzero(~is_null).tolist()
        for _, text in bad_rows(array.slice(nulls[0], 1), column):
            yield from ((first + row, text) for row in nulls)
        for row, text in bad_rows(array.take(pa.array(others, pa.int64())), column):
            yield first + others[row], text
        return
    half = len(array) // 2
    yield from bad_rows(array.slice(0, half), column, first)
    yield from bad_rows(array.slice(half), column, first + half)


def _with_zeros(
    array: pa.Array, column: Column, bad: Mapping[int, str], field: Field | None, first_row: int
) -> Rows:
    """Return the tensors of rows, with zeros for the bad ones; of varying length, one zero.

    ``field`` is that of the rows before. A label or a weight has no such stand-in.
    """
    good = np.setdiff1d(np.arange(len(array)), np.fromiter(bad, np.int64))
    read = to_numpy(array.take(pa.array(good)), column, first_row) if len(good) else None
    field = field if read is None else field_of(column.name, read)
    remedy = "" if field else "No row before it shows the shape of the zeros"
    if column.label or column.weight:
        remedy = "Zeros take the place of features alone"
    if bad and (remedy or field is None):
        row = min(bad)
        remedy = f'{remedy}: use handle_invalid="skip".'
        raise RowError(column.name, first_row + row, bad[row], remedy)
    assert field is not None
    places = np.zeros(len(array), np.int64)  # of a zero, followed by what was read
    places[good] = 1 + np.arange(len(good))
    return concatenate([zero_row(field), *([] if read is None else [read])])[places]


@dataclass(frozen=True)
class WriteParts:
    """A ``mapInArrow`` task that writes rows which belong to several partitions.

    The last column of a batch holds the partition of each row. The task yields the number and the
    pickled :class:`WrittenRows` of each of ``count`` partitions.
    """

    table: WriteDataFrame
    count: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for partition, part in enumerate(self.parts(context.partitionId(), batches)):
            yield _numbered(partition, pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
        finish_task()

    def parts(self, source: int, batches: Iterable[pa.RecordBatch]) -> list[WrittenRows]:
        """Return the rows of each partition.

        If a row of ``source`` is wrong, return only a failed first part.
        """
        writer = PartitionWriter(self.table.config, source, self.table.columns[-1].weight)
        try:
            self.table.write(batches, writer)
            return list(writer.parts(self.count))
        except RowError as error:
            return [writer.failed_part(error.problem)]


def _numbered(number: int, content: bytes) -> pa.RecordBatch:
    """Return the row of a number and what belongs to it."""
    columns = [pa.array([number], pa.int32()), pa.array([content], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["number", "content"])


def address_parts(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """Send each part that :class:`WriteParts` yields to its partition (a Spark task)."""
    for target, part in rows:
        yield from send(target, bytes(part))


def join_frames(config: SlabConfig, partition: int, parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join the parts of a partition on the node that holds them; yield its handle (a Spark task)."""
    yield pickle.dumps(join_partition(config, [pickle.loads(part) for part in parts]))


def select_columns(data: DataFrame, columns: Sequence[Column], key: str | None = None) -> DataFrame:
    """Return the columns in this order, under generated names, and the ``key`` of each row as text.

    The names are generated because one column may be both an input and a label.
    """
    if data.isStreaming:
        raise DataError(
            "the DataFrame is a stream, which never ends: write it to a table and pass that, or pass "
            "each of its batches, in writeStream.foreachBatch. Only predictions work on a stream."
        )
    keys = [] if key is None else [key]
    check_unambiguous(data, [*(name for column in columns for name in column.names), *keys])
    named = [functions.col(quoted(name)).cast("string").alias(KEY) for name in keys]
    return data.select(*numbered(columns), *named)


def numbered(columns: Sequence[Column]) -> list[SparkColumn]:
    """Return the columns as c0, c1, ...; one of several columns is a struct of them."""
    found = []
    for i, column in enumerate(columns):
        first, *others = [functions.col(quoted(name)) for name in column.names]
        found.append((functions.struct(first, *others) if others else first).alias(f"c{i}"))
    return found


def of_structs(arrays: Sequence[Any], columns: Sequence[Column]) -> list[Any]:
    """Return an Arrow array for each of the columns, given those of :attr:`Column.names`."""
    rest, found = iter(arrays), []
    for column in columns:
        first, *others = [next(rest) for _ in column.names]
        names = [f"_{i}" for i, _ in enumerate(column.names)]
        found.append(pa.StructArray.from_arrays([first, *others], names) if others else first)
    return found


KEY = "sparkdl_key"
"""The column of keys, which name rows that cannot be read."""


PATH = "path"
"""The column with the path of a row's file, as ``spark.read.format("binaryFile")`` names it."""


def files_of(data: DataFrame, problem: BadRow) -> str:
    """Return the paths of the rows that have the value of a bad row, in brackets; "" if none is known.

    They are in a column :data:`PATH`, or Spark knows from which file it reads a row.
    """
    if problem.digest is None:
        return ""
    value = functions.sha2(functions.col(quoted(problem.column)), 256)
    strings = [field.name for field in data.schema if field.dataType.typeName() == "string"]
    path = PATH if PATH in strings else "_metadata.file_path"
    try:
        rows = data.where(value == problem.digest).select(path).limit(4).collect()
    except (PySparkException, Py4JError):  # it was not read from files, or cannot be read again
        return ""
    paths = [str(row[0]) for row in rows if row[0] is not None]
    return f" ({', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''})" if paths else ""


def columns_named(data: DataFrame, name: str, among: Sequence[str] | None = None) -> list[str]:
    """Return the columns, or those ``among`` others, that Spark matches with ``name``.

    By default, Spark ignores case.
    """
    names = data.columns if among is None else among
    if data.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
        return [column for column in names if column == name]
    return [column for column in names if column.lower() == name.lower()]


def check_new_columns(data: DataFrame, names: Sequence[str], how: str, who: str = "") -> None:
    """Raise :class:`DataError` for a new column with the name of another, as Spark compares them.

    ``who`` begins the message, and ``how`` ends its advice to choose another name.
    """
    for name in names:
        if taken := columns_named(data, name):
            found = f'the DataFrame already has a column "{taken[0]}": drop it, or'
        elif len(same := columns_named(data, name, names)) > 1:
            found = f"new columns would have one name, {' and '.join(map(in_quotes, same))}:"
        else:
            continue
        raise DataError(f"{who}{found} choose another name{how}.")


def check_unambiguous(data: DataFrame, names: Sequence[str]) -> None:
    """Raise :class:`DataError` for each name that matches several columns, as Spark compares names."""
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
    """Yield each batch as one IPC stream, with its partition (a ``mapInArrow`` task)."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield _numbered(context.partitionId(), sink.getvalue().to_pybytes())


def content_hash(data: DataFrame) -> SparkColumn:
    """Return a hash of whole rows.

    Spark does not hash maps, so a map is hashed as the array of its entries. Keys do not count.
    """
    fields = [field for field in data.schema if field.name != KEY]
    return functions.xxhash64(
        *[_hashable(functions.col(quoted(field.name)), field.dataType) for field in fields]
    )


def _hashable(column: SparkColumn, kind: DataType) -> SparkColumn:
    """Return ``column`` with each map in it replaced by the array of its entries."""
    if "map<" not in kind.simpleString():
        return column
    if isinstance(kind, MapType):
        entry = StructType([StructField("key", kind.keyType), StructField("value", kind.valueType)])
        return _hashable(functions.map_entries(column), ArrayType(entry))
    if isinstance(kind, ArrayType):
        return functions.transform(column, lambda item: _hashable(item, kind.elementType))
    if not isinstance(kind, StructType):  # of a user's type, whose name says anything
        return column
    return functions.struct(*[_hashable(column.getField(f.name), f.dataType) for f in kind.fields])


def partition_of(data: DataFrame, count: int) -> SparkColumn:
    """Return the partition into which ``data.repartition(count, content_hash(data))`` puts a row.

    Spark's HashPartitioning is the Murmur3 hash (seed 42) of the expression, modulo ``count``.
    """
    return functions.pmod(functions.hash(content_hash(data)), functions.lit(count))


def partitions_of_rdds(data: DataFrame) -> int | None:
    """Return the number of partitions of a DataFrame that reads only RDDs and shuffles nothing.

    Return None for any other DataFrame: the number of partitions into which Spark reads files, for
    example, depends on the cores of the session. In a session of Spark Connect nobody can tell.
    """
    if is_connected(data):
        return None
    execution = data._jdf.queryExecution()
    leaves = execution.withCachedData().collectLeaves()  # before the query is planned
    kinds = {leaves.apply(i).getClass().getSimpleName() for i in range(leaves.size())}
    if not kinds <= {"LogicalRDD", "InMemoryRelation"}:
        return None
    return execution.toRdd().getNumPartitions() if _of_rdds(execution.executedPlan()) else None


def _of_rdds(plan: Any) -> bool:
    """Return whether a plan reads only RDDs and shuffles nothing, adaptively or not.

    Cached data counts as the plan that was cached.
    """
    kind, inputs = plan.getClass().getSimpleName(), plan.children()
    if kind == "InMemoryTableScanExec":
        return _of_rdds(plan.relation().cachedPlan())
    if not inputs.size():
        return bool(plan.nodeName() == "Scan ExistingRDD")
    return "Exchange" not in kind and all(_of_rdds(inputs.apply(i)) for i in range(inputs.size()))


def first_field(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield the one binary field of each row (a Spark task)."""
    for row in rows:
        yield bytes(row[0])


FILES_PER_SLOT = 4
"""Most tasks per slot that read a table whose rows stay on one node; each writes its own files."""


def in_few_tasks(chosen: DataFrame, replicas: int) -> DataFrame:
    """Add the partition of each row, and read with few tasks: all processes map each task's files."""
    slots = 1 if is_connected(chosen) else chosen.sparkSession._sc.defaultParallelism
    tasks = FILES_PER_SLOT * max(replicas, slots)
    target = partition_of(chosen, replicas).alias("partition")
    return chosen.select("*", target).coalesce(tasks)
