"""The column type of labels of which some are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from sparkdl.data.columns.base import Column, DataType
from sparkdl.data.columns.convert import as_array
from sparkdl.data.columns.numeric import NumericSpec, check_finite, nested

IGNORED = -100
"""The label that torch's losses ignore by default; it stands for a missing whole number."""


@dataclass(frozen=True)
class Masked(NumericSpec):
    """A specification of a label of which some values are missing: null or NaN.

    The column is a number, or an array of numbers with one for each task. What is missing is NaN in
    the target, or -100 if the column holds whole numbers; booleans become floats. Use
    :class:`sparkdl.MaskedLoss`, or a loss of your own that leaves these out. With such a loss a fit on
    a DataFrame reads numbers in this way by itself where some are missing.
    """

    kind = "masked"
    takes_missing = True
    for_records = True

    @classmethod
    def suited(cls, column: Column, array: pa.Array) -> Column | None:
        """Return a label of numbers with this specification, if some are missing."""
        if not column.label or column.vector or column.spec is not None or column.dtype == "bool":
            return None
        for _ in range(column.depth):
            if array.null_count:  # a whole array
                return None
            array = array.flatten()
        missing = bool(array.null_count)
        if pa.types.is_floating(array.type):
            missing |= bool(pa.compute.any(pa.compute.is_nan(array)).as_py())
        return replace(column, spec=cls()) if missing else None

    def problems(self, role: str) -> Iterator[str]:
        """Yield a problem if it is for a feature."""
        if role == "feature":
            yield (
                "is a sparkdl.Masked, which is for labels: a model gets no missing value. Fill the "
                "column with df.fillna, or with pyspark.ml.feature.Imputer."
            )

    def of_numbers(self, column: Column, data_type: DataType, float_dtype: str) -> Column | str:
        """Return the column, or an error text if it holds no numbers that may be missing."""
        if column.vector:
            return (
                f"is of type {data_type.simpleString()}: a sparkdl.Masked is a number or an array; "
                "pyspark.ml.functions.vector_to_array makes one."
            )
        dtype = float_dtype if column.dtype == "bool" else column.dtype
        return replace(column, dtype=dtype, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> np.ndarray:
        """Return the labels, with a mark where one is missing."""
        if not len(array):
            return np.zeros((0,) * (1 + column.depth), column.dtype)
        floats = np.dtype(column.dtype).kind == "f"
        with np.errstate(over="ignore"):
            values = nested(array, column, first_row, np.nan if floats else IGNORED)
        check_finite(values, column, first_row, missing=True)
        return values

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Return the label of a record, in which None is missing, too."""
        if value is None:
            value = np.nan
        elif isinstance(value, (list, tuple)):
            value = [np.nan if item is None else item for item in value]
        return as_array(value, name, row, float_dtype, missing=True)
