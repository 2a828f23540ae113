"""A DataFrame or an RDD of samples -> the sample RDD: one handle a partition, persisted."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame, functions

from sparkdl.data.partition import Field, PartitionWriter, SampleHandle
from sparkdl.data.preview import Preview
from sparkdl.data.schema import (
    SAME_SHAPE,
    Column,
    RowProblem,
    columns_of,
    quoted,
    to_numpy,
)
from sparkdl.errors import DataError
from sparkdl.frames import collect_frames, map_frames, stage_name
from sparkdl.slab.root import SlabConfig
from sparkdl.worker import settle_worker

_RDD_BATCH = 1024
_MEND = "Filter such records out, or mend them with rdd.map."


@dataclass(frozen=True)
class Sample:
    """One training sample of an RDD.

    ``features``: a number, an array-like, a tensor, or a tuple of these for a model with several
    inputs. ``label``: likewise, or None.
    """

    features: Any
    label: Any = None


@dataclass(frozen=True)
class SampleSet:
    """The persisted sample RDD and what the driver knows of it.

    ``rdd`` holds one frame a partition, a pickled :class:`SampleHandle`; None where the samples
    are in this process (``handles``). ``fields`` describes a sample: the ``num_features`` inputs
    first, then the labels. ``preview`` holds a few rows to try the model on, one array a field.
    """

    rdd: RDD | None
    handles: tuple[SampleHandle, ...]
    fields: tuple[Field, ...]
    num_features: int
    preview: list[np.ndarray]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each partition."""
        return tuple(handle.num_rows for handle in self.handles)


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
                if batch.num_rows:
                    writer.add(
                        names,
                        [
                            to_numpy(batch.column(i), column, writer.num_rows)
                            for i, column in enumerate(self.columns)
                        ],
                    )
            handle = writer.finish()
        except RowProblem as error:
            handle = writer.fail(error.problem)
        yield pa.RecordBatch.from_pydict({"handle": [pickle.dumps(handle)]})
        settle_worker()


@dataclass(frozen=True)
class WriteRecords:
    """Task over an RDD of ``(features, label)`` pairs or :class:`Sample`: likewise."""

    config: SlabConfig
    labelled: bool
    float_dtype: str

    def __call__(self, partition: int, records: Iterable[Any]) -> Iterator[bytes]:
        writer = PartitionWriter(self.config)
        names: list[str] = []
        waiting: list[list[np.ndarray]] = []
        try:
            for record in records:
                parts = self._parts(record, writer.num_rows + len(waiting))
                names = names or [name for name, _ in parts]
                self._compare(names, waiting, parts, writer.num_rows)
                waiting.append([value for _, value in parts])
                if len(waiting) == _RDD_BATCH:
                    writer.add(names, [np.stack(c) for c in zip(*waiting, strict=True)])
                    waiting = []
            if waiting:
                writer.add(names, [np.stack(c) for c in zip(*waiting, strict=True)])
            handle = writer.finish()
        except RowProblem as error:
            handle = writer.fail(error.problem)
        yield pickle.dumps(handle)
        settle_worker()

    def _parts(self, record: Any, row: int) -> list[tuple[str, np.ndarray]]:
        features, label = split_record(record, self.labelled, row)
        parts = []
        for role, value in [("features", features), ("label", label)][: 1 + self.labelled]:
            values = value if isinstance(value, tuple) else (value,)
            for i, item in enumerate(values):
                name = role if len(values) == 1 else f"{role}[{i}]"
                parts.append((name, record_array(item, name, row, self.float_dtype)))
        return parts

    def content_hash(self, record: Any) -> int:
        """CRC-32 of the record's numbers. Its pickle would not do: a tensor's holds an address."""
        try:
            values = [value for _, value in self._parts(record, 0)]
        except RowProblem:
            return 0  # reported by the task that writes the record
        crc = 0
        for value in values:
            crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        return crc

    @staticmethod
    def _compare(
        names: list[str],
        waiting: list[list[np.ndarray]],
        parts: list[tuple[str, np.ndarray]],
        first_row: int,
    ) -> None:
        row = first_row + len(waiting)
        if [name for name, _ in parts] != names:
            found = ", ".join(name for name, _ in parts)
            text = f"has {found} where row 0 has {', '.join(names)}"
            raise RowProblem(names[0], row, text, SAME_SHAPE)
        for (name, value), first in zip(parts, waiting[0] if waiting else (), strict=False):
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                raise RowProblem(
                    name,
                    row,
                    f"is {value.dtype}{list(value.shape)} where row {first_row} is "
                    f"{first.dtype}{list(first.shape)}",
                    SAME_SHAPE,
                )


def split_record(record: Any, labelled: bool, row: int) -> tuple[Any, Any]:
    """(features, label) of an RDD's record. Without a label a bare value is the features."""
    if isinstance(record, Sample):
        if labelled and record.label is None:
            raise RowProblem(
                "label", row, "is None", "Give Sample(features, label), or train with label=None."
            )
        return record.features, record.label if labelled else None
    if not labelled:
        return record, None
    if isinstance(record, tuple) and len(record) == 2:
        return record
    size = f" of {len(record)}" if isinstance(record, tuple) else ""
    raise RowProblem(
        "record",
        row,
        f"is a {type(record).__name__}{size}",
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
    )


def record_array(value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
    """A sample's value as an array: floats in ``float_dtype``, integers and booleans as they are."""
    if hasattr(value, "toArray"):
        value = value.toArray()  # pyspark.ml.linalg vectors and matrices
    elif hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        raise RowProblem(name, row, "is ragged: its parts differ in length", SAME_SHAPE) from None
    if array.dtype.kind == "f":
        array = array.astype(float_dtype, copy=False)
        if np.isnan(array).any():
            raise RowProblem(name, row, "holds NaN", _MEND)
    elif array.dtype.kind in "iu" and array.dtype != np.uint64:
        array = array.astype(np.int64) if array.dtype.kind == "u" else array
    elif array.dtype.kind != "b":
        what = "is None" if value is None else f"is a {type(value).__name__}"
        raise RowProblem(name, row, f"{what}, not a number or an array of numbers", _MEND)
    if array.size == 0:
        raise RowProblem(name, row, "is an empty array", _MEND)
    return array


@dataclass(frozen=True)
class Source:
    """What to make samples of, and how: data, column names, M, the model's floating dtype."""

    data: DataFrame | RDD
    features: tuple[str, ...]
    label: tuple[str, ...]
    replicas: int
    float_dtype: str
    slab: SlabConfig

    @property
    def records_task(self) -> WriteRecords:
        return WriteRecords(self.slab, bool(self.label), self.float_dtype)

    @property
    def noun(self) -> str:
        """What messages call a part of a sample."""
        return "column" if isinstance(self.data, DataFrame) else "field"


def materialize(source: Source, persist: Callable[[RDD], RDD]) -> SampleSet:
    """Write the data into slabs as ``source.replicas`` partitions, checking every row on the way.

    Data that already has as many partitions keeps them. Other data is redistributed by the content
    of its rows, so that the result does not depend on how the source happened to be split.
    ``persist`` persists an RDD and answers for unpersisting it. Raises
    :class:`sparkdl.errors.DataError`.
    """
    if isinstance(source.data, DataFrame):
        chosen, columns = _chosen(source)
        task = WriteDataFrame(source.slab, columns)
        rows = chosen.mapInArrow(task, "handle binary").rdd  # type: ignore[arg-type]
        rdd = map_frames(rows, _first_field)
    else:
        rdd = map_frames(_redistribute(source), source.records_task)
    persist(rdd)
    with stage_name(rdd.ctx, "write samples into slabs"):
        handles = [pickle.loads(frame) for frame in collect_frames(rdd)]
    check_handles(handles, source.noun)
    preview = Preview.of(handles)
    with stage_name(rdd.ctx, "look at the first samples"):
        parts = rdd.ctx.runJob(rdd, preview, list(preview.rows))
    return _sample_set(source, rdd, handles, Preview.join(parts))


def materialize_here(source: Source) -> SampleSet:
    """Likewise, with every partition brought to this process (for the local engine)."""
    if isinstance(source.data, DataFrame):
        chosen, columns = _chosen(source)
        shipped = chosen.mapInArrow(_ship_batches, "partition int, batches binary")
        parts: dict[int, list[pa.RecordBatch]] = {m: [] for m in range(source.replicas)}
        for row in shipped.collect():
            parts[row[0]] += pa.ipc.open_stream(bytes(row[1])).read_all().to_batches()
        task = WriteDataFrame(source.slab, columns)
        handles = [
            pickle.loads(next(task(parts[m])).column(0)[0].as_py()) for m in range(source.replicas)
        ]
    else:
        collected = _redistribute(source).glom().collect()
        task_of_records = source.records_task
        handles = [pickle.loads(next(task_of_records(m, part))) for m, part in enumerate(collected)]
    check_handles(handles, source.noun)
    preview = Preview.of(handles)
    first = [preview.read(partition, handles[partition]) for partition in preview.rows]
    return _sample_set(source, None, handles, Preview.join(first))


def _sample_set(
    source: Source, rdd: RDD | None, handles: list[SampleHandle], rows: list[np.ndarray]
) -> SampleSet:
    fields = next(handle.fields for handle in handles if handle.num_rows)
    if isinstance(source.data, DataFrame):
        num_features = len(source.features)
    else:
        num_features = sum(field.name.startswith("features") for field in fields)
    return SampleSet(rdd, tuple(handles), fields, num_features, rows)


def _chosen(source: Source) -> tuple[DataFrame, tuple[Column, ...]]:
    """The input and label columns, in M partitions."""
    data = source.data
    assert isinstance(data, DataFrame)
    inputs, labels = columns_of(data.schema, source.features, source.label, source.float_dtype)
    columns = (*inputs, *labels)
    chosen = select_columns(data, columns)
    if _partitions_without_running(chosen) != source.replicas:
        chosen = chosen.repartition(source.replicas, functions.xxhash64(*chosen.columns))
    return chosen, columns


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


def _ship_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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


def _partitions_without_running(data: DataFrame) -> int | None:
    """The number of partitions, or None where only running the query would tell (its shuffles)."""
    execution = data._jdf.queryExecution()
    if "AdaptiveSparkPlan" in execution.executedPlan().nodeName():
        return None
    return execution.toRdd().getNumPartitions()


def _redistribute(source: Source) -> RDD:
    records = source.data
    assert isinstance(records, RDD)
    if records.getNumPartitions() == source.replicas:
        return records
    keyed = records.keyBy(source.records_task.content_hash)
    return keyed.partitionBy(source.replicas, _identity).values()


def _identity(key: int) -> int:
    return key


def _first_field(partition: int, rows: Iterable[Any]) -> Iterator[bytes]:
    for row in rows:
        yield bytes(row[0])
    settle_worker()


def check_handles(handles: Sequence[SampleHandle], noun: str) -> None:
    """Raise :class:`DataError` for what is wrong with a partition, or with all of them."""
    for partition, handle in enumerate(handles):
        if handle.problem is not None:
            raise DataError(handle.problem.message(f"partition {partition}", noun))
    filled = [(i, handle) for i, handle in enumerate(handles) if handle.num_rows]
    if not filled:
        raise DataError("the data is empty: there is no row to train on.")
    first_partition, first = filled[0]
    for partition, handle in filled[1:]:
        names, wanted_names = ([field.name for field in h.fields] for h in (handle, first))
        if names != wanted_names:
            raise DataError(
                f"row 0 of partition {partition} has {', '.join(names)} where row 0 of partition "
                f"{first_partition} has {', '.join(wanted_names)}. {SAME_SHAPE}"
            )
        for found, wanted in zip(handle.fields, first.fields, strict=True):
            if found != wanted:
                raise DataError(
                    f'{noun} "{found.name}", row 0 of partition {partition}: is {found} where row '
                    f"0 of partition {first_partition} is {wanted}. {SAME_SHAPE}"
                )
