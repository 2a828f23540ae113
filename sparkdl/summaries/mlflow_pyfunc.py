"""Trained models as ``mlflow.pyfunc`` calls them, on tables of pandas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from sparkdl.data.arrow_tasks import of_structs
from sparkdl.data.columns.base import names_read
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.row_errors import RowError
from sparkdl.data.schema import columns_of
from sparkdl.errors import DataError
from sparkdl.infer.forward import Forward
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import as_numpy, offered_parts, value_of
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.recipe import Part

BATCH_SIZE = 1024
"""The number of rows of a forward pass."""


class PyFunc:
    """A trained model as ``mlflow.pyfunc`` calls it: tables of pandas in, arrays of NumPy out."""

    def __init__(self, trained: TrainedModel) -> None:
        self.trained = trained

    def predict(self, model_input: Any, params: Any = None) -> np.ndarray | pd.DataFrame:
        """Return the predictions for a table with the feature columns, one for each row.

        A model that returns several tensors by name or place, of which the training took no part,
        gives a table of pandas with a column of each: in ``spark_udf`` a struct.

        Args:
            model_input: A DataFrame of pandas, a mapping of columns, or, if the model has one
                feature, an array of it.
            params: Nothing; MLflow passes it.

        Raises:
            DataError: The table does not fit the model.
        """
        trained = self.trained
        batch = _batch(_table(trained, model_input))
        schema, fields = from_arrow_schema(batch.schema), trained.fields
        columns, _ = columns_of(
            schema, trained.features, (), trained.float_dtype, trained.columns, fields
        )
        forward, part = Forward(trained.module, trained.signature), trained.signature.part
        parts: dict[str, Part] = {} if part is None else {"prediction": part}
        outputs: dict[str, list[np.ndarray]] = {}
        for start in range(0, batch.num_rows, BATCH_SIZE):
            rows = batch.slice(start, BATCH_SIZE)
            try:
                read = [rows.column(name) for column in columns for name in column.names]
                pairs = zip(of_structs(read, columns), columns, strict=True)
                arrays = [to_numpy(array, column, start) for array, column in pairs]
            except RowError as error:
                raise DataError(error.problem.message("the table")) from None
            known = None if trained.output is None else trained.output.dimensions
            returned = forward.returned(arrays)
            parts = parts or offered_parts(returned, rows.num_rows, "prediction")
            for name, one in parts.items():
                output = in_rows(value_of(returned, one), rows.num_rows, known)
                outputs.setdefault(name, []).append(as_numpy(output))
        found = {name: np.concatenate(arrays) for name, arrays in outputs.items()}
        if len(found) < 2:
            return next(iter(found.values()), np.zeros(0, np.float32))
        return pd.DataFrame({name: list(values) for name, values in found.items()})


def _table(trained: TrainedModel, model_input: Any) -> pd.DataFrame:
    """Return the feature columns of the input. Raises DataError."""
    names = names_read(trained.features, trained.columns)
    if isinstance(model_input, np.ndarray) and len(names) == 1:
        return pd.DataFrame({names[0]: list(model_input)})
    table = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise DataError(f"the table has no column {', '.join(missing)}.")
    return table[names]


def _batch(table: pd.DataFrame) -> pa.RecordBatch:
    """Return a table of pandas as Arrow; arrays with dimensions become nested lists."""
    columns = {name: pa.array(list(_cells(table[name]))) for name in table.columns}
    return pa.RecordBatch.from_pydict(columns)


def _cells(column: pd.Series) -> Iterator[Any]:
    for value in column:
        value = value.toArray() if hasattr(value, "toArray") else value  # a vector of Spark
        nested = isinstance(value, np.ndarray) and (value.ndim > 1 or value.dtype == object)
        yield np.stack(list(value)).tolist() if nested and len(value) else value
