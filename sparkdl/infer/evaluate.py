"""Evaluation of the loss and metrics over a DataFrame or an RDD, computed on the executors."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import RDD, TaskContext, cloudpickle
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import select_columns
from sparkdl.data.columns.base import masked_of
from sparkdl.data.ragged import dense
from sparkdl.data.row_errors import FIRST
from sparkdl.errors import (
    DataError,
    ParameterError,
    TrainingError,
    UserError,
    counted,
    pickling,
    raise_all,
    shown,
    wrong_data,
)
from sparkdl.infer.forward import ShippedModule, device_of, in_halves, run_batches, sender_to
from sparkdl.infer.manifest import ModelData
from sparkdl.infer.read import ReadColumns, Reader
from sparkdl.infer.score import source_of, whole_batch
from sparkdl.metrics.base import Metric
from sparkdl.metrics.named import Metrics, resolve, suited
from sparkdl.metrics.scorer import MetricOf, Scorer, States
from sparkdl.model.loss import check_averages, is_own_loss
from sparkdl.model.recipe import Part, Signature, problems_of_part
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
class EvaluatePartition:
    """The task: run the module, then the scorer on its output; yield the partition and its states."""

    module: ShippedModule
    scorer: Scorer
    reader: Reader
    num_features: int  # the first columns; labels follow
    batch_size: int
    signature: Signature
    skips: bool  # rows that cannot be read, or that the model fails on, are left out

    def __call__(self, items: Iterable[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        if isinstance(self.reader, ReadColumns):
            packed = self._packed(batch.columns for batch in items)
            yield pa.RecordBatch.from_pydict({"partition": [partition], "states": [packed]})
        else:
            yield partition, self._packed(items)
        finish_task()

    def _packed(self, rows: Iterable[Any]) -> bytes:
        """Return the pickled states of a partition, and why some of its rows were left out.

        A :class:`UserError` is returned pickled, for the driver to raise; Spark would retry a failed
        task. Raises :class:`TrainingError` for any other failure of the module or the scorer.
        """
        states, reasons = self.scorer.start(), Counter[str]()
        try:
            for window in self.reader.windows(rows, self.skips):
                for text in window.problems.values():
                    _note(reasons, text)
                for group in window.groups:
                    states = self._updated(states, group.arrays, reasons)
        except UserError as error:
            return pickle.dumps(type(error)(str(error)))
        # classes of a user's session by value
        return bytes(cloudpickle.dumps((states, reasons)))

    def _updated(self, states: States, arrays: Sequence[Any], reasons: Counter[str]) -> States:
        """Return ``states`` with some more rows, which come as one array per column, features first."""
        try:
            module = self.module.load()
            device = device_of(module)
            scorer = self.scorer.on(device)
            for start in range(0, len(arrays[0]), self.batch_size):
                batch = [array[start : start + self.batch_size] for array in arrays]
                for rows, output in self._outputs(module, batch, reasons):
                    targets = to_tensors(dense(rows[self.num_features :]), device)
                    states = scorer.update(states, output, targets, samples=len(rows[0]))
            return states
        except UserError:
            raise
        except Exception as error:
            raise TrainingError(f"{type(error).__name__}: {error}") from error

    def _outputs(
        self, module: nn.Module, arrays: Sequence[Any], reasons: Counter[str]
    ) -> Iterator[tuple[Sequence[Any], Any]]:
        """Yield the rows of a batch with the output for them, see :func:`in_halves`."""

        def output_of(rows: Sequence[Any]) -> Any:
            inputs, own = rows[: self.num_features], (self.scorer.loss, rows[self.num_features :])
            ((output, _),) = run_batches(
                module, inputs, len(inputs[0]), signature=self.signature, own=own
            )
            return output

        def some(rows: Sequence[Any], chosen: np.ndarray) -> Sequence[Any]:
            return [array[chosen] for array in rows]

        bad = (lambda _, reason: _note(reasons, reason)) if self.skips else None
        return in_halves(arrays, len(arrays[0]), output_of, some, bad)


def _note(reasons: Counter[str], text: str) -> None:
    """Count one more row that is left out for this reason."""
    known = text in reasons or len(reasons) < MOST_REASONS
    reasons[text if known else OTHERS] += 1


def evaluate(
    trained: ModelData,
    data: DataFrame | RDD,
    metrics: Metrics,
    batch_size: int,
    output: Part,
    handle_invalid: str,
) -> dict[str, Any]:
    """Return the mean loss and the metrics over ``data``, merged in the order of its partitions."""
    if not isinstance(data, (DataFrame, RDD)):
        raise wrong_data("evaluate", data, "a DataFrame or an RDD")
    raise_all(ParameterError, problems_of_part(output))
    if handle_invalid not in ("error", "skip"):
        raise ParameterError(f"handle_invalid={shown(handle_invalid)}: use one of error, skip.")
    resolved = suited(resolve(metrics), trained.loss, trained.judging)
    if trained.loss is None and not resolved:
        raise ParameterError(
            "there is nothing to evaluate: a loaded model, and one of with_module, has no loss. "
            "Name metrics, or load it with sparkdl.load(path, loss=...)."
        )
    if trained.loss is not None:
        check_averages(trained.loss, "batches")
    if len(trained.label) != 1 and not all(isinstance(one, MetricOf) for one in resolved):
        raise ParameterError(
            f"metrics need one label; the model has {len(trained.label)}. "
            "sparkdl.MetricOf(metric, label=..., output=...) is of one of them."
        )
    check_metrics(resolved)
    size, inputs = whole_batch(batch_size), source_of(trained).inputs
    assert inputs is not None
    usual = trained.signature.part
    part = usual if output is None else output
    known = trained.output if part == usual else None
    scorer = Scorer(
        trained.loss,
        resolved,
        known.dimensions if known else None,
        part=part,
        loss_part=None if is_own_loss(trained.loss) else usual,
        labels=trained.label,
        masked=masked_of(trained.columns),
    )
    before, sender = ShippedModule.before(trained.module), sender_to(data)
    module = ShippedModule.of(trained.module, sender, trained.model, trained.seed, keep=False)
    try:
        with reading_explained("evaluating the model"):
            reader, skips = inputs.reader(data, size, trained), handle_invalid == "skip"
            count, signature = trained.num_features, inputs.signature
            task = accompanied(
                EvaluatePartition(module, scorer, reader, count, size, signature, skips)
            )
            if isinstance(data, RDD):
                packed = data.mapPartitions(task).collect()
            else:
                assert isinstance(reader, ReadColumns)
                chosen = select_columns(data, reader.columns)
                packed = chosen.mapInArrow(task, "partition long, states binary").collect()
    finally:
        if module is not before:
            module.destroy()
    return _merged(scorer, packed)


def _merged(scorer: Scorer, packed: Iterable[Any]) -> dict[str, Any]:
    """Return the values of what the partitions have yielded."""
    many, reasons = [], Counter[str]()
    for _, states in sorted(map(tuple, packed)):
        one = pickle.loads(states)
        if isinstance(one, UserError):
            raise one
        many.append(one[0])
        reasons += one[1]
    merged = scorer.merge(many)
    each = ", ".join(f"{text.rstrip('.')} ({n:,})" for text, n in reasons.most_common(FIRST))
    told = f"{counted(reasons.total(), 'row')} cannot be read: {each}."
    if scorer.is_empty(merged):
        raise DataError(told if reasons else "the data is empty: there are no rows to evaluate.")
    if reasons:
        logger.warning("evaluate leaves out what it cannot read. %s", told)
    return scorer.values(merged)
