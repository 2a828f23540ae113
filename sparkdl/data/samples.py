"""The sample RDD, made from a DataFrame or an RDD of samples: one handle a partition, persisted."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import RDD
from pyspark.sql import DataFrame, functions

from sparkdl.data.arrow_tasks import (
    PATH,
    WriteDataFrame,
    WriteParts,
    address_parts,
    columns_named,
    content_hash,
    files_of,
    first_field,
    in_few_tasks,
    join_frames,
    partitions_of_rdds,
    select_columns,
    ship_batches,
)
from sparkdl.data.columns.base import Column, Specs
from sparkdl.data.equal_rows import SPREAD, SpreadRows, delete_partition
from sparkdl.data.fields import (
    Field,
    SampleHandle,
    adapted_specs,
    check_handles,
    check_total_weight,
)
from sparkdl.data.partition_writer import WrittenRows, join_partition
from sparkdl.data.preview import OnHandles, Run, Work, looked_at
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.records import Names, WriteRecords
from sparkdl.data.row_errors import AS_ERRORS, BadRow, Handling, columns_with
from sparkdl.data.sampling import Draws, Sampling
from sparkdl.data.schema import sample_columns
from sparkdl.errors import DataError, StaleReferenceError, StateLostError, TrainingError, nearest
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.frames import (
    collect_frames,
    compute_again,
    forget_last_shuffle,
    is_local,
    map_frames,
    shuffle_frames,
    stage_name,
)
from sparkdl.usercode import accompanied

logger = logging.getLogger("sparkdl")
MAX_READINGS = 8
"""The number of times that samples are written if their slabs are deleted each time."""


@dataclass(frozen=True)
class SampleSet:
    """The persisted sample RDD and the driver's description of it."""

    rdd: RDD | None  # pickled handles, one frame a partition; None: samples of this process
    handles: tuple[SampleHandle, ...]
    fields: tuple[
        Field, ...
    ]  # inputs, labels, the field to draw by and the weight, as far as given
    num_features: int
    preview: list[Rows]
    num_labels: int = 0
    weighted: bool = False
    more: list[Rows] = field(default_factory=list)  # those of preview and some others
    draws: Draws | None = None
    columns: Specs = field(default_factory=dict)  # by which rows were read

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the rows of an epoch in each partition."""
        if self.draws is not None:
            return self.draws.counts
        return tuple(handle.num_rows for handle in self.handles)

    @property
    def model_fields(self) -> tuple[Field, ...]:
        """Return the fields without that to draw by."""
        end = self.num_features + self.num_labels
        return (*self.fields[:end], *(self.fields[-1:] if self.weighted else ()))


_LEFT = 'Sequence(padding=-100, padding_side="left")'


def check_sides(fields: Sequence[Field], rows: Sequence[Rows]) -> None:
    """Raise DataError for columns that are as long as each other in every row, as tokens and their
    labels, and padded on different sides."""
    varying = [
        (one, one.padding.side, values.lengths.tolist())
        for one, values in zip(fields, rows, strict=True)
        if one.padding is not None and isinstance(values, Ragged)
    ]
    for (one, side, lengths), (other, others, same) in itertools.combinations(varying, 2):
        if side != others and lengths == same and len({*lengths}) > 1:
            raise DataError(
                f'"{one.name}" is padded on the {side} and "{other.name}" on the {others}, and both '
                "are equally long in each row, so their elements would not be side by side: give both "
                f"the same padding_side=, as in {columns_with('labels', _LEFT)}."
            )


def fields_of_handles(handles: Sequence[SampleHandle]) -> tuple[Field, ...]:
    """Return the fields of the samples, at least one of which must be there."""
    return next(handle.fields for handle in handles if handle.num_rows)


def sample_set(
    rdd: RDD | None,
    handles: Sequence[SampleHandle],
    run: Run,
    num_features: int,
    weighted: bool,
    noun: str = "column",
    sampled: bool = False,
    columns: Specs | None = None,
) -> SampleSet:
    """Return the description of samples in place, some rows of which are looked at.

    If ``sampled``, there is a field to draw by. ``columns`` are the specifications to read by.
    """
    fields = fields_of_handles(handles)
    if weighted:
        check_total_weight(handles, len(fields) - 1, f'{noun} "{fields[-1].name}"')
    num_labels = len(fields) - num_features - weighted - sampled
    preview, more = looked_at(handles, run)
    check_sides(fields, more)
    return SampleSet(
        *(rdd, tuple(handles), fields, num_features, preview, num_labels, weighted, more),
        columns={**(columns or {}), **adapted_specs(handles)},
    )


@dataclass(frozen=True)
class Source:
    """The data to make samples of, and how to make them."""

    data: DataFrame | RDD
    features: tuple[str, ...]
    label: tuple[str, ...]
    replicas: int  # the number of partitions to make
    float_dtype: str
    slab: SlabConfig
    columns: Specs = field(default_factory=dict)  # of an RDD: all for_records
    weight: str | None = None
    fields: tuple[Field, ...] = ()
    inputs: tuple[str, ...] = ()
    sampling: Sampling | None = None
    handle_invalid: str = "error"
    key: str | None = None
    adapts: tuple[str, ...] = ()
    """The kinds of columns, "vector", "feature" and "label", that are read by other specifications if
    values ask for it."""

    @property
    def handling(self) -> Handling:
        """Return the way to handle rows that cannot be read, with the column that names them."""
        if self.handle_invalid == "error":
            return AS_ERRORS
        key = self.key
        if key is None and isinstance(self.data, DataFrame):
            kinds = {field.name: field.dataType.typeName() for field in self.data.schema}
            key = PATH if kinds.get(PATH) == "string" else None
        return Handling(self.handle_invalid, key)

    @property
    def records_task(self) -> WriteRecords:
        return WriteRecords(
            self.slab,
            bool(self.label),
            self.float_dtype,
            self.columns,
            self.weight is not None,
            self.fields,
            Names(self.features, self.label, self.weight, self.inputs),
            self.sampling,
            self.handling,
        )

    @property
    def noun(self) -> str:
        """Return the word by which messages call a part of a sample."""
        return "column" if isinstance(self.data, DataFrame) else "field"

    def place_of(self, problem: BadRow) -> str:
        """Return the files of a bad row; see :func:`sparkdl.data.arrow_tasks.files_of`."""
        return files_of(self.data, problem) if isinstance(self.data, DataFrame) else ""


def materialize(source: Source, persist: Callable[[RDD], RDD]) -> SampleSet:
    """Write the data into slabs as ``source.replicas`` partitions, and check every row on the way.

    An RDD that already has this number of partitions keeps them, and so does a DataFrame made of
    one. Other data is redistributed by the content of its rows, so that the result does not depend
    on how the source was split. ``persist`` returns a persisted RDD and unpersists it later.
    """
    if isinstance(source.data, DataFrame):
        written, moved = _write_table(source)
    else:
        _check_specs(source)
        records = _redistribute(source)
        written, moved = (
            map_frames(records, accompanied(source.records_task)),
            records is not source.data,
        )
    rdd, to_spread = persist(written), moved

    def read() -> SampleSet:
        nonlocal rdd, to_spread
        handles = _handles(rdd)
        if to_spread:
            run = _run_on(rdd, handles)
            spread = SpreadRows.of(source.slab, handles, run)
            if spread is not None:  # partitions are written again from the same shuffle
                stay = isinstance(source.data, DataFrame) and is_local(rdd.ctx)  # see join_frames
                run(SPREAD, partial(delete_partition, not stay), range(len(handles)))
                rdd.unpersist()
                rdd = persist(map_frames(written, spread))
                handles = _handles(rdd)
            to_spread = False
        if moved:
            forget_last_shuffle(rdd)  # so that a recomputed partition writes its own files
        return _sample_set(source, rdd, handles, _run_on(rdd, handles))

    for _ in range(MAX_READINGS):
        try:
            with reading_explained():
                return read()
        except StateLostError as lost:
            logger.warning("%s. The data is read again.", str(lost).partition("\n")[0].rstrip("."))
            compute_again(rdd)
    raise deleted_without_end("reading the data", source.slab)


def _run_on(rdd: RDD, handles: Sequence[SampleHandle]) -> Run:
    """Return the way to do work where samples are; in local mode the driver does it itself."""

    def run(doing: str, work: Work, partitions: Sequence[int]) -> Sequence[Any]:
        if not is_local(rdd.ctx):
            with stage_name(rdd.ctx, doing):
                return rdd.ctx.runJob(rdd, OnHandles(work), partitions)
        try:
            return _run_here(handles, doing, work, partitions)
        except (StaleReferenceError, FileNotFoundError) as gone:
            raise StateLostError(f"looking at the first samples: {gone}") from None

    return run


def _run_here(
    handles: Sequence[SampleHandle], doing: str, work: Work, partitions: Sequence[int]
) -> list[Any]:
    return [work(partition, handles[partition]) for partition in partitions]


def _handles(rdd: RDD) -> list[SampleHandle]:
    with stage_name(rdd.ctx, "write samples into slabs"):
        return [pickle.loads(frame) for frame in collect_frames(rdd)]


def materialize_here(source: Source) -> SampleSet:
    """Write every partition in this process, for the local engine.

    Otherwise like :func:`materialize`.
    """
    for _ in range(MAX_READINGS):
        with contextlib.suppress(StaleReferenceError, FileNotFoundError):
            return _read_here(source)
    raise deleted_without_end("reading the data", source.slab)


def _read_here(source: Source) -> SampleSet:
    if isinstance(source.data, DataFrame):
        handles, moved = _bring_table(source)
    else:
        _check_specs(source)
        records = _redistribute(source)
        collected, moved = records.glom().collect(), records is not source.data
        task_of_records = source.records_task
        handles = [pickle.loads(next(task_of_records(m, part))) for m, part in enumerate(collected)]
    run = partial(_run_here, handles)
    spread = SpreadRows.of(source.slab, handles, run) if moved else None
    if spread is not None:
        handles = run("", spread.changed, range(len(handles)))
    return _sample_set(source, None, handles, partial(_run_here, handles))


def deleted_without_end(doing: str, slab: SlabConfig) -> TrainingError:
    """Return the error to raise if samples are gone each time that they have been written."""
    return TrainingError(
        f"{doing}: again and again, tasks did not find the samples that had been written into "
        f'spark.sparkdl.slab.dir="{slab.directory}". If something deletes the folders "sparkdl-*" '
        "there, exclude them, or name another directory; if tasks run on another node each time, "
        "raise spark.locality.wait."
    )


def _sample_set(
    source: Source, rdd: RDD | None, handles: list[SampleHandle], run: Run
) -> SampleSet:
    check_handles(handles, source.noun, source.place_of)
    weighted, sampled = source.weight is not None, source.sampling is not None
    if isinstance(source.data, DataFrame):
        num_features = len(source.features)
    else:
        fields = fields_of_handles(handles)
        num_features = sum(field.name.startswith("features") for field in fields)
        unknown = [name for name in source.columns if name not in [f.name for f in fields]]
        if unknown:
            raise DataError(
                f'columns names "{unknown[0]}", which is not a field of the records. They have: '
                f"{', '.join(f.name for f in fields)}."
            )
    return sample_set(
        rdd, handles, run, num_features, weighted, source.noun, sampled, source.columns
    )


def _check_specs(source: Source) -> None:
    """Raise :class:`DataError` for specifications that only a DataFrame's columns may have."""
    if source.handle_invalid == "keep":
        raise DataError(
            'handle_invalid="keep" is for DataFrames, whose columns say what zeros a row can have: use '
            '"skip", or mend the records with rdd.map.'
        )
    for name, spec in source.columns.items():
        if not spec.for_records:
            raise DataError(
                f'columns["{name}"] is a sparkdl.{type(spec).__name__}, which is for DataFrames: '
                "records of an RDD must hold numbers and arrays already. Convert them with rdd.map."
            )


def _write_table(source: Source) -> tuple[RDD, bool]:
    """Return the RDD of a DataFrame's handles, and whether rows changed partitions."""
    chosen, columns = chosen_columns(source)
    task = WriteDataFrame(source.slab, columns, source.handling)
    context = chosen.sparkSession._sc
    stay = partitions_of_rdds(chosen) == source.replicas
    if stay or not is_local(context):
        if not stay:
            chosen = chosen.repartition(source.replicas, content_hash(chosen))
        rows = chosen.mapInArrow(accompanied(task), "handle binary").rdd
        return map_frames(rows, first_field), not stay
    # Every process can map every file: rows stay where they are read; only row numbers move.
    written = in_few_tasks(chosen, source.replicas).mapInArrow(
        accompanied(WriteParts(task, source.replicas)), "partition int, part binary"
    )
    addressed = map_frames(written.rdd, address_parts)
    sent = shuffle_frames(addressed, source.replicas)
    return map_frames(sent, partial(join_frames, source.slab)), True


def _bring_table(source: Source) -> tuple[list[SampleHandle], bool]:
    """Write a DataFrame's partitions in this process; return their handles, and whether rows changed
    partitions."""
    chosen, columns = chosen_columns(source)
    stay = partitions_of_rdds(chosen) == source.replicas
    if stay:
        chosen = chosen.select("*", functions.spark_partition_id().alias("partition"))
    else:
        chosen = in_few_tasks(chosen, source.replicas)
    shipped = chosen.mapInArrow(ship_batches, "source int, batches binary")
    batches: dict[int, list[pa.RecordBatch]] = {}
    for row in shipped.collect():
        batches.setdefault(row[0], []).extend(pa.ipc.open_stream(bytes(row[1])))
    task = WriteParts(WriteDataFrame(source.slab, columns, source.handling), source.replicas)
    parts: list[list[WrittenRows]] = [[] for _ in range(source.replicas)]
    for number, found in batches.items():
        for partition, part in enumerate(task.parts(number, found)):
            parts[partition].append(part)
    return [join_partition(source.slab, some) for some in parts], not stay


def chosen_columns(source: Source) -> tuple[DataFrame, tuple[Column, ...]]:
    """Select the columns of a sample from a DataFrame."""
    data = source.data
    assert isinstance(data, DataFrame)
    unknown = [name for name in source.columns if name not in (*source.features, *source.label)]
    if unknown:
        raise DataError(
            f'columns names "{unknown[0]}", a field of an RDD\'s records, but the data is a '
            f"DataFrame: name one of its columns, {', '.join((*source.features, *source.label))}."
        )
    columns = sample_columns(
        *(data.schema, source.features, source.label, source.weight, source.float_dtype),
        *(source.columns, source.sampling, source.fields),
    )
    key = source.handling.key
    if key is not None and not columns_named(data, key):
        raise DataError(
            f'the key column "{key}" is missing.{nearest(key, data.columns)} The DataFrame has: '
            f"{', '.join(data.columns)}."
        )
    columns = tuple(replace(column, adapts=_kind(column) in source.adapts) for column in columns)
    return select_columns(data, columns, key), columns


def _kind(column: Column) -> str:
    return "label" if column.label else "vector" if column.vector else "feature"


def _redistribute(source: Source) -> RDD:
    records = source.data
    assert isinstance(records, RDD)
    if records.getNumPartitions() == source.replicas:
        return records
    keyed = records.keyBy(source.records_task.content_hash)
    return keyed.partitionBy(source.replicas, _identity).values()


def _identity(key: int) -> int:
    return key
