"""Loss and metrics over a DataFrame or an RDD, computed where the data is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame

from sparkdl.data.samples import record_array, select_columns, split_record
from sparkdl.data.schema import Column, RowProblem, columns_of, to_numpy
from sparkdl.errors import DataError
from sparkdl.infer.metrics import MeanMetric
from sparkdl.infer.predictor import ShippedModule, run_batches
from sparkdl.step.compute import call_loss, to_tensors
from sparkdl.worker import settle_worker


@dataclass(frozen=True)
class Evaluation:
    """Task: batches of a partition -> sums of (loss, count) and of each metric, one flat list."""

    module: ShippedModule
    loss: Callable[..., torch.Tensor] | None
    metrics: tuple[MeanMetric, ...]
    num_features: int
    batch_size: int

    def sums(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Of some rows (features first, then labels): shape (1 + metrics, 2), float64."""
        total = np.zeros((1 + len(self.metrics), 2))
        module = self.module.load()
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        inputs, labels = arrays[: self.num_features], arrays[self.num_features :]
        for output, rows in run_batches(module, inputs, self.batch_size):
            targets = to_tensors([label[rows] for label in labels], device)
            count = len(inputs[0][rows])
            if self.loss is not None:
                total[0] += (float(call_loss(self.loss, output, targets)) * count, count)
            for i, metric in enumerate(self.metrics):
                total[1 + i] += metric.sums(output, targets[0])
        return total


@dataclass(frozen=True)
class EvaluateDataFrame:
    """Task of ``mapInArrow``: one row a partition, its number and its sums."""

    evaluation: Evaluation
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        total, seen = np.zeros((1 + len(self.evaluation.metrics), 2)), 0
        for batch in batches:
            if batch.num_rows:
                arrays = _arrays(batch, self.columns, seen)
                total += self.evaluation.sums(arrays)
                seen += batch.num_rows
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([context.partitionId()], pa.int32()),
                pa.array([total.reshape(-1).tolist()], pa.list_(pa.float64())),
            ],
            names=["partition", "sums"],
        )
        settle_worker()


@dataclass(frozen=True)
class EvaluateRecords:
    """Task over an RDD: one (partition, sums) a partition."""

    evaluation: Evaluation
    labelled: bool
    float_dtype: str

    def __call__(self, partition: int, records: Iterable[Any]) -> Iterator[tuple[int, list[float]]]:
        total = np.zeros((1 + len(self.evaluation.metrics), 2))
        waiting: list[list[np.ndarray]] = []
        for row, record in enumerate(records):
            waiting.append(self._arrays(record, row))
            if len(waiting) == self.evaluation.batch_size:
                total += self.evaluation.sums([np.stack(c) for c in zip(*waiting, strict=True)])
                waiting = []
        if waiting:
            total += self.evaluation.sums([np.stack(c) for c in zip(*waiting, strict=True)])
        yield partition, total.reshape(-1).tolist()
        settle_worker()

    def _arrays(self, record: Any, row: int) -> list[np.ndarray]:
        try:
            features, label = split_record(record, self.labelled, row)
            values = [*_tuple(features), *(_tuple(label) if self.labelled else ())]
            return [record_array(v, "record", row, self.float_dtype) for v in values]
        except RowProblem as error:
            raise DataError(error.problem.message("the partition", "field")) from None


def evaluate(
    data: DataFrame | RDD,
    evaluation: Evaluation,
    features: Sequence[str],
    label: Sequence[str],
    float_dtype: str,
) -> dict[str, float]:
    """Mean loss and metrics over all of ``data``, summed in the order of its partitions."""
    if isinstance(data, DataFrame):
        inputs, labels = columns_of(data.schema, features, label, float_dtype)
        columns = (*inputs, *labels)
        chosen = select_columns(data, columns)
        task = EvaluateDataFrame(evaluation, columns)
        schema = "partition int, sums array<double>"
        rows = [tuple(row) for row in chosen.mapInArrow(task, schema).collect()]  # type: ignore[arg-type]
    else:
        records_task = EvaluateRecords(evaluation, bool(label), float_dtype)
        rows = data.mapPartitionsWithIndex(records_task).collect()
    total = np.zeros((1 + len(evaluation.metrics), 2))
    for _, sums in sorted(rows):
        total += np.array(sums).reshape(-1, 2)
    if not total[:, 1].any():
        raise DataError("the data is empty: there is no row to evaluate.")
    names = ["loss", *(metric.name for metric in evaluation.metrics)]
    return {
        name: float(value / count)
        for name, (value, count) in zip(names, total, strict=True)
        if count
    }


def _arrays(batch: pa.RecordBatch, columns: Sequence[Column], seen: int) -> list[np.ndarray]:
    try:
        return [to_numpy(batch.column(i), column, seen) for i, column in enumerate(columns)]
    except RowProblem as error:
        raise DataError(error.problem.message("the partition")) from None


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
