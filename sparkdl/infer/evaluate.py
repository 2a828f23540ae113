"""Evaluation of the loss and metrics over a DataFrame or an RDD, computed on the executors."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import RDD, cloudpickle
from pyspark.sql import DataFrame

from sparkdl.data.arrow_tasks import select_columns
from sparkdl.data.columns.base import Column, Specs
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.ragged import Rows, dense
from sparkdl.data.records import (
    Names,
    check_alike,
    named,
    record_field,
    split_record,
    stack_records,
)
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import columns_of
from sparkdl.errors import DataError, ParameterError, TrainingError, UserError, cannot_travel
from sparkdl.infer.shipped_module import ShippedModule, device_of, run_batches
from sparkdl.metrics.base import Metric
from sparkdl.metrics.scorer import Scorer, States
from sparkdl.model.recipe import BY_POSITION, Signature
from sparkdl.replica.compute import to_tensors
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.worker import finish_task
from sparkdl.usercode import accompanied


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Raise :class:`ParameterError` if a metric cannot be pickled."""
    for metric in metrics:
        try:
            pickle.loads(cloudpickle.dumps(metric))
        except Exception as error:
            what = f'metric "{metric.name}"'
            remedy = "Use a function or class of an importable module, with no open resource in it."
            raise ParameterError(cannot_travel(what, error, remedy)) from None


@dataclass(frozen=True)
class Evaluation:
    """The work on each partition: run the module, then the scorer on its output."""

    module: ShippedModule
    scorer: Scorer
    num_features: int  # the first columns; labels follow
    batch_size: int
    signature: Signature = BY_POSITION
    keywords: tuple[str, ...] = ()

    def update(self, states: States, arrays: Sequence[Any]) -> States:
        """Return ``states`` with some more rows, which come as one array per column, features first."""
        module = self.module.load()
        device = device_of(module)
        scorer = self.scorer.on(device)
        inputs, labels = arrays[: self.num_features], arrays[self.num_features :]
        own, signature = (self.scorer.loss, labels), self.signature
        returned = run_batches(module, inputs, self.batch_size, signature=signature, own=own)
        for output, rows in returned:
            targets = to_tensors(dense([label[rows] for label in labels]), device)
            count = len(inputs[0][rows])
            states = scorer.update(states, output, targets, samples=count)
        return states

    def _updated(self, states: States, arrays: Sequence[Any]) -> States:
        """Return :meth:`update`; any error but a UserError becomes a TrainingError."""
        try:
            return self.update(states, arrays)
        except UserError:
            raise
        except Exception as error:
            raise TrainingError(f"{type(error).__name__}: {error}") from error

    def packed(self, parts: Iterable[Sequence[Any]]) -> bytes:
        """Return the pickled states of a partition, given its rows in parts.

        A :class:`UserError` is returned pickled, for the driver to raise; Spark would retry a failed
        task. Raises :class:`TrainingError` for any other failure of the module or the scorer.
        """
        states = self.scorer.start()
        try:
            for arrays in parts:
                states = self._updated(states, arrays)
        except UserError as error:
            return pickle.dumps(type(error)(str(error)))
        return bytes(cloudpickle.dumps(states))  # classes of a user's session by value


@dataclass(frozen=True)
class EvaluateDataFrame:
    """The task of ``mapInArrow``: one row per partition, with its number and its pickled states."""

    evaluation: Evaluation
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        packed = self.evaluation.packed(self._parts(batches, context.partitionId()))
        yield pa.RecordBatch.from_arrays(
            [pa.array([context.partitionId()], pa.int32()), pa.array([packed], pa.binary())],
            names=["partition", "states"],
        )
        finish_task()

    def _parts(self, batches: Iterable[pa.RecordBatch], partition: int) -> Iterator[list[Any]]:
        seen = 0
        for batch in batches:
            # columns that grow when they are decoded are taken in smaller parts
            grows = any(column.grows for column in self.columns)
            rows = self.evaluation.batch_size if grows else max(1, batch.num_rows)
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                yield _arrays(part, self.columns, seen + start, partition)
            seen += batch.num_rows


@dataclass(frozen=True)
class EvaluateRecords:
    """The task over an RDD: one pair of (partition, pickled states) per partition."""

    evaluation: Evaluation
    names: Names
    float_dtype: str
    specs: Specs
    fields: Sequence[Field]

    def __call__(self, partition: int, records: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        yield partition, self.evaluation.packed(self._parts(records, partition))
        finish_task()

    def _parts(self, records: Iterable[Any], partition: int) -> Iterator[list[Rows]]:
        waiting: list[list[np.ndarray]] = []
        names: list[str] = []
        for row, record in enumerate(records):
            try:
                fields = self._fields(record, row)
                names = names or [name for name, _ in fields]
                check_alike(fields, waiting, row, self.specs, names)
            except RowError as error:
                raise DataError(error.problem.message(f"partition {partition}", "field")) from None
            waiting.append([value for _, value in fields])
            if len(waiting) == self.evaluation.batch_size:
                yield stack_records(names, waiting, self.specs)
                waiting = []
        if waiting:
            yield stack_records(names, waiting, self.specs)

    def _fields(self, record: Any, row: int) -> list[tuple[str, np.ndarray]]:
        """Return the names and arrays of a record, features first, then labels."""
        labelled = bool(self.names.label)
        record = self.names.sample(record, row, 0 if labelled else None)
        features, label = split_record(record, labelled, row)
        features = self.names.in_order(features, row)
        parts = [*named("features", features), *(named("label", label) if labelled else ())]
        return [
            (name, record_field(value, name, row, self.float_dtype, self.specs, field))
            for (name, value), field in with_fields(parts, self.fields)
        ]


def evaluate(
    data: DataFrame | RDD,
    evaluation: Evaluation,
    features: Sequence[str],
    label: Sequence[str],
    float_dtype: str,
    specs: Specs | None = None,
    fields: Sequence[Field] = (),
) -> dict[str, float]:
    """Return the mean loss and the metrics over ``data``, merged in the order of its partitions."""
    with reading_explained("evaluating the model"):
        if isinstance(data, DataFrame):
            inputs, labels = columns_of(data.schema, features, label, float_dtype, specs, fields)
            columns = (*inputs, *labels)
            chosen = select_columns(data, columns)
            task = accompanied(EvaluateDataFrame(evaluation, columns))
            schema = "partition int, states binary"
            rows = [tuple(row) for row in chosen.mapInArrow(task, schema).collect()]
        else:
            names = Names(tuple(features), tuple(label), inputs=evaluation.keywords)
            of_records = EvaluateRecords(evaluation, names, float_dtype, specs or {}, fields)
            rows = data.mapPartitionsWithIndex(accompanied(of_records)).collect()
    many = []
    for _, packed in sorted(rows):
        states = pickle.loads(packed)
        if isinstance(states, UserError):
            raise states
        many.append(states)
    scorer = evaluation.scorer
    merged = scorer.merge(many)
    if scorer.is_empty(merged):
        raise DataError("the data is empty: there are no rows to evaluate.")
    return scorer.values(merged)


def _arrays(
    batch: pa.RecordBatch, columns: Sequence[Column], seen: int, partition: int
) -> list[Rows]:
    """Return an array for each column of an Arrow batch. Raises DataError that names the bad row."""
    try:
        return [to_numpy(batch.column(i), column, seen) for i, column in enumerate(columns)]
    except RowError as error:
        raise DataError(error.problem.message(f"partition {partition}")) from None
