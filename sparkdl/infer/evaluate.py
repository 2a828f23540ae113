"""Evaluation of the loss and metrics over a DataFrame or an RDD, computed on the executors."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import RDD, TaskContext, cloudpickle
from pyspark.sql import DataFrame

from sparkdl.data.arrow_tasks import select_columns
from sparkdl.data.columns.base import Specs
from sparkdl.data.fields import Field
from sparkdl.data.ragged import dense
from sparkdl.data.records import Names
from sparkdl.data.row_errors import FIRST
from sparkdl.data.schema import columns_of
from sparkdl.errors import DataError, TrainingError, UserError, counted, pickling
from sparkdl.infer.forward import ShippedModule, device_of, run_batches
from sparkdl.infer.read import ReadColumns, Reader, ReadRecords, record_specs
from sparkdl.metrics.base import Metric
from sparkdl.metrics.scorer import Scorer, States
from sparkdl.model.recipe import BY_POSITION, Signature
from sparkdl.replica.compute import to_tensors
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.worker import finish_task
from sparkdl.usercode import accompanied

logger = logging.getLogger("sparkdl")
MOST_REASONS, OTHERS = 100, "other reasons"


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Raise :class:`ParameterError` if a metric cannot be pickled."""
    for metric in metrics:
        remedy = "Use a function or class of an importable module, with no open resource in it."
        with pickling(f'metric "{metric.name}"', remedy):
            pickle.loads(cloudpickle.dumps(metric))


@dataclass(frozen=True)
class Evaluation:
    """The work on each partition: run the module, then the scorer on its output."""

    module: ShippedModule
    scorer: Scorer
    num_features: int  # the first columns; labels follow
    batch_size: int
    signature: Signature = BY_POSITION
    skips: bool = False  # rows that cannot be read are left out

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

    def packed(self, windows: Iterable[Any]) -> bytes:
        """Return the pickled states of a partition, given its rows, and why some were left out.

        A :class:`UserError` is returned pickled, for the driver to raise; Spark would retry a failed
        task. Raises :class:`TrainingError` for any other failure of the module or the scorer.
        """
        states, reasons = self.scorer.start(), Counter[str]()
        try:
            for window in windows:
                for text in window.problems.values():
                    told = text in reasons or len(reasons) < MOST_REASONS
                    reasons[text if told else OTHERS] += 1
                for group in window.groups:
                    states = self._updated(states, group.arrays)
        except UserError as error:
            return pickle.dumps(type(error)(str(error)))
        # classes of a user's session by value
        return bytes(cloudpickle.dumps((states, reasons)))

    def _updated(self, states: States, arrays: Sequence[Any]) -> States:
        """Return :meth:`update`; any error but a UserError becomes a TrainingError."""
        try:
            return self.update(states, arrays)
        except UserError:
            raise
        except Exception as error:
            raise TrainingError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class EvaluatePartition:
    """The task: the number of a partition, and its pickled states."""

    evaluation: Evaluation
    reader: Reader

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        partition, by_row = context.partitionId(), isinstance(self.reader, ReadRecords)
        rows = items if by_row else (batch.columns for batch in items)
        packed = self.evaluation.packed(self.reader.windows(rows, self.evaluation.skips))
        if by_row:
            yield partition, packed
        else:
            arrays = [pa.array([partition], pa.int32()), pa.array([packed], pa.binary())]
            yield pa.RecordBatch.from_arrays(arrays, names=["partition", "states"])
        finish_task()


def evaluate(
    data: DataFrame | RDD,
    evaluation: Evaluation,
    names: Names,
    float_dtype: str,
    specs: Specs,
    fields: Sequence[Field],
) -> dict[str, Any]:
    """Return the mean loss and the metrics over ``data``, merged in the order of its partitions."""
    size = evaluation.batch_size
    reader: Reader
    with reading_explained("evaluating the model"):
        if isinstance(data, DataFrame):
            inputs, labels = columns_of(
                data.schema, names.features, names.label, float_dtype, specs, fields
            )
            columns = (*inputs, *labels)
            chosen = select_columns(data, columns)
            reader = ReadColumns.of(columns, size)
            task = accompanied(EvaluatePartition(evaluation, reader))
            packed = chosen.mapInArrow(task, "partition int, states binary").collect()
        else:
            by_field = record_specs([f.name for f in fields], evaluation.num_features, specs)
            reader = ReadRecords(
                names, evaluation.num_features, float_dtype, size, by_field, fields
            )
            packed = data.mapPartitions(
                accompanied(EvaluatePartition(evaluation, reader))
            ).collect()
    many, reasons = [], Counter[str]()
    for _, part in sorted(map(tuple, packed)):
        one = pickle.loads(part)
        if isinstance(one, UserError):
            raise one
        many.append(one[0])
        reasons += one[1]
    scorer = evaluation.scorer
    merged = scorer.merge(many)
    each = ", ".join(f"{text.rstrip('.')} ({n:,})" for text, n in reasons.most_common(FIRST))
    told = f"{counted(reasons.total(), 'row')} cannot be read: {each}."
    if scorer.is_empty(merged):
        raise DataError(told if reasons else "the data is empty: there are no rows to evaluate.")
    if reasons:
        logger.warning("evaluate leaves out what it cannot read. %s", told)
    return scorer.values(merged)
