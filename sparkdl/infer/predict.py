"""Predictions: a column on a DataFrame, or an RDD beside an RDD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame, functions

from sparkdl.data.arrow_tasks import check_unambiguous, columns_named
from sparkdl.data.columns.base import Column, Specs
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.ragged import Rows
from sparkdl.data.record_tasks import (
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
from sparkdl.model.signature import BY_POSITION, Signature
from sparkdl.spark.worker import finish_task
from sparkdl.usercode import accompanied

Finish = Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class PredictColumn:
    """Body of the Arrow UDF: feature columns in, the prediction column out."""

    module: ShippedModule
    columns: tuple[Column, ...]
    batch_size: int
    finish: Finish
    dimensions: Dimensions = (None, None)
    signature: Signature = BY_POSITION

    def __call__(self, batches: Iterator[tuple[pa.Array, ...] | pa.Array]) -> Iterator[pa.Array]:
        module = self.module.load()
        seen = 0
        for batch in batches:
            columns = batch if isinstance(batch, tuple) else (batch,)
            yield from self._predict(module, columns, seen)
            seen += len(columns[0])
        finish_task()

    def _predict(self, module: Any, columns: Sequence[pa.Array], seen: int) -> Iterator[pa.Array]:
        """Predictions for one Arrow batch; what grows when decoded is taken in smaller parts.

        Each of the module's batches is given away at once: an output may be much larger than its
        input, and Spark looks at the rows, not at how they are cut.
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
    """Task over an RDD: one prediction (a number, or an array) a record, in order."""

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
        """The features of a record, found alike those of the records ``before``."""
        try:
            features = self.names.in_order(self._features(record, row), row)
            parts = [
                (name, record_field(value, name, row, self.float_dtype, self.specs, field))
                for (name, value), field in with_fields(named("features", features), self.fields)
            ]
            check_alike(parts, before, row, self.specs)
            return [value for _, value in parts]
        except RowError as error:
            raise DataError(error.problem.message(_place(), "field")) from None

    def _features(self, record: Any, row: int) -> Any:
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


def _place() -> str:
    """The partition that this process is at, in a message."""
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
    """``data`` with the column ``prediction_col``; lazy, and on a streaming DataFrame too. ``fields``:
    see :func:`sparkdl.data.schema.columns_of`."""
    inputs, _ = columns_of(data.schema, features, (), float_dtype, specs, fields)
    check_unambiguous(data, features)
    if taken := columns_named(data, prediction_col):
        raise DataError(
            f'the DataFrame already has a column "{taken[0]}": drop it, or choose another '
            "name with prediction_col=."
        )
    body: PredictColumn = accompanied(
        PredictColumn(module, inputs, batch_size, finish, dimensions, signature)
    )
    udf = functions.arrow_udf(
        _over_columns(body) if len(inputs) > 1 else _over_column(body),  # type: ignore[call-overload]
        returnType=output.sql_type,
    )
    return data.withColumn(prediction_col, udf(*[functions.col(quoted(c.name)) for c in inputs]))


def _over_column(body: PredictColumn) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    def predict(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return body(batches)

    return predict


def _over_columns(
    body: PredictColumn,
) -> Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]:
    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return body(batches)

    return predict
