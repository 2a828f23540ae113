"""Trials of a model on the driver with a few rows, which show what predictions will hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pyspark import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import select_columns, ship_batches
from sparkdl.data.columns.base import Specs
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged, Rows, concatenate, model_inputs
from sparkdl.data.records import feature_names, stack_records
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import columns_of
from sparkdl.errors import DataError, ModelError, ParameterError, UserError, counted
from sparkdl.infer.output import Output
from sparkdl.infer.predict import Finish, PredictRecords
from sparkdl.infer.shipped_module import Dimensions, device_of
from sparkdl.model.recipe import Signature, described, for_example
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating, to_tensors
from sparkdl.spark.failures import reading_explained

Found: TypeAlias = tuple[Output, Dimensions]
"""The description of one prediction, and the dimensions of a batch's output and of its predictions."""
ROWS = 2


@dataclass(frozen=True)
class Trial:
    """A trial of a model."""

    module: nn.Module
    signature: Signature
    finish: Finish

    def run(
        self,
        known: Output | None,
        fields: Sequence[Field],
        first_rows: Callable[[], list[Rows] | None],
    ) -> Found:
        """Return the description of the predictions.

        Unless ``known``, the module is run on zeros like ``fields``; only if that fails
        ``first_rows`` is called, since the rows may have other lengths.
        """
        try:
            if known is not None:
                dtype = getattr(torch, known.dtype)
                return self._finished(torch.zeros(ROWS, *known.shape, dtype=dtype), ROWS)
            return self._of(zeros_like(fields))
        except _Failed as failed:
            rows = first_rows()
            if rows is None:
                raise failed.error from failed.__cause__
        try:
            return self._of(rows)
        except _Failed as failed:
            raise failed.error from failed.__cause__

    def _of(self, arrays: Sequence[Rows]) -> Found:
        """Return the description of the predictions for these rows."""
        inputs = to_tensors(model_inputs(arrays), device_of(self.module))
        with seeded(0), evaluating(self.module), buffers_kept(self.module):
            try:
                returned = self.signature.call(self.module, inputs)
            except Exception as error:
                shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
                text = f"the model fails on a batch of {shapes}: {_reason(error)}."
                raise _Failed(ModelError(text)) from error
            try:
                output = self.signature.output(returned)
            except UserError:
                raise
            except Exception as error:
                text = f"output=, a function, fails on {described(returned)}: {_reason(error)}."
                raise _Failed(ParameterError(text)) from error
            return self._finished(output, len(arrays[0]))

    def _finished(self, output: Any, rows: int) -> Found:
        """Return the description of the predictions made from this output."""
        dimensions = output.ndim if isinstance(output, torch.Tensor) else None
        if self.finish is None:
            if not isinstance(output, torch.Tensor) or not output.ndim or len(output) != rows:
                raise ModelError(
                    f"the model returns {described(output)}, but a prediction must be one tensor "
                    "with a row for each sample. Say which part of it to use: "
                    f"{for_example(output)}; or give postprocess, a function of it that returns "
                    "such a tensor."
                )
            return Output.of(output), (dimensions, dimensions)
        try:
            finished = self.finish(output)
        except Exception as error:
            text = (
                f"postprocess fails on {described(output)}: {_reason(error)}. It gets the model's "
                "output for a batch."
            )
            raise _Failed(ParameterError(text)) from error
        if not isinstance(finished, torch.Tensor) or not finished.ndim or len(finished) != rows:
            raise ParameterError(
                f"postprocess returned {described(finished)} for a batch of {counted(rows, 'row')}: "
                f"it must return a tensor with one value for each row, of shape [{rows}, ...], as "
                "partial(torch.argmax, dim=1) does."
            )
        return Output.of(finished), (dimensions, finished.ndim)


class _Failed(Exception):
    """An error that may be due to the rows that the model was tried on."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('. ')}"


def zeros_like(fields: Sequence[Field]) -> list[Rows]:
    """Return two rows of zeros; a field of varying length has two elements in each."""
    arrays: list[Rows] = []
    for field in fields:
        if field.padding is None:
            arrays.append(np.zeros((ROWS, *field.shape), field.dtype))
        else:
            elements = np.zeros((ROWS, *field.shape), field.dtype)
            arrays.append(Ragged.of([elements] * ROWS, field.padding))
    return arrays


def first_rows_of(
    data: DataFrame,
    features: Sequence[str],
    float_dtype: str,
    specs: Specs,
    fields: Sequence[Field],
) -> list[Rows] | None:
    """Return two rows of the features, by a Spark job; None if there are none, or of a stream."""
    if data.isStreaming:
        return None
    columns, _ = columns_of(data.schema, features, (), float_dtype, specs, fields)
    with reading_explained("looking at the first rows"):
        chosen = select_columns(data, columns).limit(ROWS)
        shipped = chosen.mapInArrow(ship_batches, "source int, batches binary").collect()
    batches = [batch for row in shipped for batch in _batches(bytes(row[1])) if batch.num_rows]
    try:
        rows = [[to_numpy(batch.column(i), c) for batch in batches] for i, c in enumerate(columns)]
    except RowError as error:
        raise DataError(error.problem.message("the data")) from None
    return [concatenate(parts) for parts in rows] if batches else None


def _batches(data: bytes) -> Iterator[pa.RecordBatch]:
    yield from pa.ipc.open_stream(data)


def first_records_of(records: RDD, task: PredictRecords) -> list[Rows] | None:
    """Return the features of the first two records as ``task`` reads them; None for an empty RDD."""
    with reading_explained("looking at the first records"):
        found = records.take(ROWS)
    waiting: list[list[np.ndarray]] = []
    for row, record in enumerate(found):
        waiting.append(task.inputs(record, row, waiting))
    return stack_records(feature_names(len(waiting[0])), waiting, task.specs) if waiting else None
