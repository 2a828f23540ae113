"""Predictions: a column of a DataFrame, or an RDD parallel to an RDD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame, functions

from sparkdl.compat import arrow_udf
from sparkdl.data.arrow_tasks import check_new_columns, check_unambiguous
from sparkdl.data.columns.base import Column, Specs
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.ragged import Rows
from sparkdl.data.records import (
    Names,
    Sample,
    check_alike,
    feature_names,
    named,
    record_field,
    stack_records,
)
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import columns_of, quoted
from sparkdl.errors import DataError
from sparkdl.infer.output import Output, as_numpy, pieces, to_arrow
from sparkdl.infer.shipped_module import Dimensions, ShippedModule, run_batches
from sparkdl.model.recipe import BY_POSITION, Signature
from sparkdl.spark.worker import finish_task, mistakes_told_briefly
from sparkdl.usercode import accompanied

_GIVE = "Give values of the form that it was trained on."
Finish = Callable[[torch.Tensor], torch.Tensor] | None
"""The user's ``postprocess``, or None."""
Body = Callable[[Iterator[Any]], Iterator[pa.Array]]
"""The work on a partition: Arrow arrays in (tuples of several columns), predictions out."""


@dataclass(frozen=True)
class PredictColumn:
    """The body of the Arrow UDF: feature columns in, the prediction column out."""

    module: ShippedModule
    columns: tuple[Column, ...]
    batch_size: int
    finish: Finish
    dimensions: Dimensions = (None, None)
    signature: Signature = BY_POSITION

    def __call__(self, batches: Iterator[tuple[pa.Array, ...] | pa.Array]) -> Iterator[pa.Array]:
        module = self.module.load()
        seen = 0
        with mistakes_told_briefly():
            for batch in batches:
                columns = batch if isinstance(batch, tuple) else (batch,)
                yield from self._predict(module, columns, seen)
                seen += len(columns[0])
        finish_task()

    def _predict(self, module: Any, columns: Sequence[pa.Array], seen: int) -> Iterator[pa.Array]:
        """Yield the predictions for one Arrow batch.

        Columns that grow when they are decoded are taken in smaller parts. Each batch of the module
        is yielded at once: an output may be much larger than its input, and Spark counts the rows,
        whatever the batches.
        """
        count = len(columns[0])
        rows = self.batch_size if any(column.grows for column in self.columns) else count
        for start in range(0, count, max(1, rows)):
            parts = [array.slice(start, rows) for array in columns]
            arrays = self._arrays(parts, seen + start)
            found = run_batches(
                module, arrays, self.batch_size, self.finish, self.dimensions, self.signature
            )
            for output, _ in found:
                yield from map(to_arrow, pieces(as_numpy(output)))

    def _arrays(self, columns: Sequence[pa.Array], first_row: int) -> list[Rows]:
        try:
            return [
                to_numpy(array, column, first_row)
                for array, column in zip(columns, self.columns, strict=True)
            ]
        except RowError as error:
            raise DataError(error.problem.message(_place())) from None


@dataclass(frozen=True)
class PredictRecords:
    """The task over an RDD: one prediction (a number or an array) per record, in order."""

    module: ShippedModule
    names: Names
    num_features: int
    float_dtype: str
    batch_size: int
    finish: Finish
    specs: Specs | None = None
    fields: Sequence[Field] = ()
    dimensions: Dimensions = (None, None)
    signature: Signature = BY_POSITION

    def __call__(self, records: Iterable[Any]) -> Iterator[Any]:
        module = self.module.load()
        waiting: list[list[np.ndarray]] = []
        with mistakes_told_briefly():
            for row, record in enumerate(records):
                waiting.append(self.inputs(record, row, waiting))
                if len(waiting) == self.batch_size:
                    yield from self._predict(module, waiting)
                    waiting = []
            if waiting:
                yield from self._predict(module, waiting)
        finish_task()

    def inputs(
        self, record: Any, row: int, before: Sequence[Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        """Return the features of a record, which must be like those before it in its batch."""
        try:
            features = self.names.in_order(self._features(record, row), row)
            parts = [
                (name, record_field(value, name, row, self.float_dtype, self.specs, field))
                for (name, value), field in with_fields(named("features", features), self.fields)
            ]
            for (name, value), field in with_fields(parts, self.fields):
                if name not in (self.specs or {}) and _another_form(value.ndim, field):
                    found = f"{value.dtype}{list(value.shape) or ''}"
                    raise RowError(
                        name, row, f"is {found}, and the model was trained on {field}", _GIVE
                    )
            check_alike(parts, before, row, self.specs)
            return [value for _, value in parts]
        except RowError as error:
            raise DataError(error.problem.message(_place(), "field")) from None

    def _features(self, record: Any, row: int) -> Any:
        """Return the features of a record that may also have labels."""
        record = self.names.sample(record, row, self.num_features)
        if isinstance(record, Sample):
            return record.features
        if isinstance(record, tuple) and len(record) == 2:
            by_keyword = bool(self.names.inputs) and isinstance(record[0], Mapping)
            pair = self.num_features == 1 or isinstance(record[0], tuple) or by_keyword
            return record[0] if pair else record
        return record

    def _predict(self, module: Any, waiting: list[list[np.ndarray]]) -> Iterator[Any]:
        arrays = stack_records(feature_names(len(waiting[0])), waiting, self.specs)
        found = run_batches(
            module, arrays, self.batch_size, self.finish, self.dimensions, self.signature
        )
        for output, _ in found:
            for value in as_numpy(output):
                yield value if value.ndim else value.item()


def _another_form(dimensions: int, field: Field | None) -> bool:
    """Return whether values are numbers and the field that the model was trained with arrays, or
    the other way round: a batch of one then passes for one row of the other."""
    return field is not None and not field.ragged and bool(dimensions) != bool(field.shape)


def _place() -> str:
    """Return the current partition in words, for a message."""
    context = TaskContext.get()
    return "the partition" if context is None else f"partition {context.partitionId()}"


def predict_dataframe(
    data: DataFrame,
    module: ShippedModule,
    features: Sequence[str],
    output: Output,
    float_dtype: str,
    prediction_col: str,
    batch_size: int,
    finish: Finish,
    specs: Specs | None = None,
    fields: Sequence[Field] = (),
    dimensions: Dimensions = (None, None),
    signature: Signature = BY_POSITION,
) -> DataFrame:
    """Return ``data`` with the column ``prediction_col``; lazy, and possible for streams."""
    inputs, _ = columns_of(data.schema, features, (), float_dtype, specs, fields)
    check_unambiguous(data, features)
    for column, field in with_fields(inputs, fields):
        if column.spec is None and _another_form(column.depth + column.vector, field):
            kind = data.schema[column.name].dataType.simpleString()
            raise DataError(
                f'feature column "{column.name}" is of type {kind}, and the model was trained on '
                f"{field}. {_GIVE}"
            )
    check_new_columns(data, [prediction_col], " with prediction_col=")
    body: PredictColumn = accompanied(
        PredictColumn(module, inputs, batch_size, finish, dimensions, signature)
    )
    # not deterministic: Spark would compute it again for each filter on a prediction
    types = [data.schema[column.name].dataType for column in inputs]
    udf = arrow_udf(body, types, output.sql_type).asNondeterministic()
    return data.withColumn(prediction_col, udf(*[functions.col(quoted(c.name)) for c in inputs]))
