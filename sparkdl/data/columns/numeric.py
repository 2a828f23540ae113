"""Arrow arrays to NumPy arrays, with every row checked."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, ColumnSpec, DataType
from sparkdl.data.columns.convert import as_array
from sparkdl.data.fields import Field, dtype_as
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import (
    INSIDE_ARRAYS,
    INSIDE_VECTORS,
    MEND_RECORDS,
    NO_VALUES,
    SAME_SHAPE,
    RowError,
    columns_with,
    drop,
    finite,
    refuse_nulls,
    varying,
)

_INTEGERS = {"byte": "int8", "short": "int16", "integer": "int32", "long": "int64"}
_CONVERTIBLE = ("timestamp", "date", "time", "struct", "map", "daytime", "yearmonth", "matrixudt")
"""Prefixes of the names of types whose values a function can turn into numbers."""


def numeric_column(
    name: str, data_type: DataType, float_dtype: str, trained: Field | None
) -> Column | str:
    """Return the column of numbers, arrays or vectors, or what is wrong with it and what to do.

    Integers become floats if the ``trained`` field has floats.
    """
    kind, depth = data_type, 0
    while kind.typeName() == "array":
        kind, depth = kind.elementType, depth + 1
    type_name = kind.typeName()
    vector = type_name == "vectorudt" or type(kind).__name__ == "VectorUDT"
    if vector and depth:
        return "is an array of vectors: use nested arrays, or one vector a row."
    if type_name in _INTEGERS:
        dtype = _INTEGERS[type_name]
    elif vector or type_name in ("float", "double") or type_name.startswith("decimal"):
        dtype = float_dtype
    elif type_name == "boolean":
        dtype = "bool"
    elif type_name in ("string", "varchar", "char"):
        return (
            f"is of type {data_type.simpleString()}: tokenize text with columns={{...: "
            "sparkdl.Text(tokenizer)}, number categories with pyspark.ml.feature.StringIndexer, or "
            "cast it if it holds numbers."
        )
    else:
        wrong = (
            f"is of type {data_type.simpleString()}, which cannot become a tensor: use numbers, arrays "
            "of numbers or pyspark.ml.linalg vectors."
        )
        if not type_name.startswith(_CONVERTIBLE):
            return wrong
        return (
            f"{wrong} Take a number of it in Spark, such as a field or the days since a start "
            f"(functions.datediff), or give {columns_with(name, 'Convert(function)')}, a function of "
            "its Python value."
        )
    return Column(name, dtype_as(dtype, trained), 1 if vector else depth, vector)


class NumericSpec(ColumnSpec):
    """The base of column types that read numbers, arrays or vectors in a way of their own."""

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column as this type reads it, or an error text."""
        column = numeric_column(name, data_type, float_dtype, trained)
        return (
            column if isinstance(column, str) else self.of_numbers(column, data_type, float_dtype)
        )

    @abstractmethod
    def of_numbers(self, column: Column, data_type: DataType, float_dtype: str) -> Column | str:
        """Return a column that holds numbers as this type reads it, or an error text."""


def weight_column(
    name: str, data_type: DataType, float_dtype: str, trained: Field | None
) -> Column | str:
    """Return the column of the samples' weights, or what is wrong; see :func:`numeric_column`."""
    column = numeric_column(name, data_type, float_dtype, trained)
    if isinstance(column, str) or column.depth or column.dtype == "bool":
        return (
            f"is of type {data_type.simpleString()}: a weight is one number. Cast the column, or "
            "compute a number in Spark."
        )
    return Column(name, float_dtype, weight=True)


def to_numpy(array: pa.Array, column: Column, first_row: int = 0) -> Rows:
    """Return the array as a C-contiguous NumPy array of shape (rows, *shape of one row).

    A :class:`sparkdl.Sequence` becomes a :class:`Ragged`. ``first_row`` is the number of row 0 in
    its partition, for the :class:`RowError` of a row that cannot be converted.
    """
    if column.spec is not None:
        return column.spec.convert(array, column, first_row)
    if not len(array):
        return np.zeros((0,) * (1 + column.depth), column.dtype)
    with np.errstate(over="ignore"):  # what is too large becomes inf, which is reported below
        values = (_vectors if column.vector else nested)(array, column, first_row)
    if column.weight:
        check_weights(values, column.name, first_row)
    check_finite(values, column, first_row)
    return values


def check_finite(values: np.ndarray, column: Column, first_row: int, missing: bool = False) -> None:
    """Raise :class:`RowError` for infinite numbers, and for NaN if no values may be ``missing``."""
    if values.dtype.kind != "f" or not values.size:
        return
    low, high = values.min(), values.max()  # both propagate NaN, and allocate nothing
    if np.isfinite(low) and np.isfinite(high):
        return
    nan = bool(np.isnan(low)) and not missing
    wrong = np.isnan(values) if nan else np.isinf(values)
    rows = np.flatnonzero(wrong.reshape(len(values), -1).any(axis=1))
    if not len(rows):
        return
    verb, row = "is" if values.ndim == 1 else "holds", first_row + int(rows[0])
    if not nan:
        raise RowError(column.name, row, f"{verb} inf", finite(column.dtype))
    remedy = INSIDE_VECTORS if column.vector else INSIDE_ARRAYS
    remedy = drop(column.name) if values.ndim == 1 else remedy
    raise RowError(column.name, row, f"{verb} NaN", remedy)


def check_weights(values: np.ndarray, name: str, first_row: int) -> None:
    """Raise :class:`RowError` for an infinite or negative weight; row 0 is ``first_row``."""
    wrong = np.flatnonzero(np.isinf(values) | (values < 0))
    if len(wrong):
        row = int(wrong[0])
        raise RowError(
            name,
            first_row + row,
            f"is {values[row]}, but a weight must be a finite number of at least 0",
            "Filter out such rows, or fix their weights.",
        )


def weight_array(value: Any, name: str, row: int, dtype: str) -> np.ndarray:
    """Return the weight of a record, shape ()."""
    array = as_array(value, name, row, dtype)
    if array.ndim or array.dtype.kind == "b":
        raise RowError(name, row, f"is {value!r}, not one number", MEND_RECORDS)
    array = array.astype(dtype)
    check_weights(array.reshape(1), name, row)
    return array


def nested(
    array: pa.Array, column: Column, first_row: int, missing: float | None = None
) -> np.ndarray:
    """Return numbers, or arrays of them that have one shape; ``missing`` takes the place of nulls."""
    shape: list[int] = []
    rows_per_item = 1  # how many items of the current level make one row
    for level in range(column.depth + 1):
        if level == column.depth and missing is not None:
            kind = pa.int64() if isinstance(missing, int) else pa.float64()
            array = array.cast(kind).fill_null(missing)
        if array.null_count:
            item = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + item // rows_per_item
            if level == 0:
                raise RowError(column.name, row, "is null", drop(column.name))
            raise RowError(column.name, row, "holds a null", INSIDE_ARRAYS)
        if level == column.depth:
            break
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        remedy = varying(column.name) if level == 0 else SAME_SHAPE
        length = _one_length(lengths, column, first_row, remedy, rows_per_item)
        shape.append(length)
        rows_per_item *= length
        array = array.flatten()
        if length == 0:
            raise RowError(column.name, first_row, "is an empty array", NO_VALUES)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    flat = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(flat, dtype=column.dtype).reshape(-1, *shape)


def _one_length(
    lengths: np.ndarray, column: Column, first_row: int, remedy: str, per_row: int = 1
) -> int:
    """Return the length that all items have, ``per_row`` of which make a row. Raises RowError."""
    length = int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != length)
    if len(wrong):
        item = int(wrong[0])
        text = f"has {int(lengths[item])} values where row {first_row} has {length}"
        raise RowError(column.name, first_row + item // per_row, text, remedy)
    return length


def vector_entries(
    array: pa.Array, column: Column, first_row: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return row, index and value of each entry of ml.linalg vectors, and the size of each vector.

    They arrive as struct<type, size, indices, values>; type 0 is sparse.
    """
    refuse_nulls(array, column.name, first_row)
    kinds, sizes, indices, values = array.flatten()
    sparse = kinds.to_numpy(zero_copy_only=False) == 0
    counts = values.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.where(sparse, sizes.fill_null(0).to_numpy(zero_copy_only=False), counts)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    row_of_value = np.repeat(np.arange(len(lengths)), counts)
    position = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    position[sparse[row_of_value]] = indices.flatten().to_numpy(zero_copy_only=False)
    return row_of_value, position, flat, lengths


def _vectors(array: pa.Array, column: Column, first_row: int) -> np.ndarray:
    """Convert ml.linalg vectors."""
    row_of_value, position, flat, lengths = vector_entries(array, column, first_row)
    width = _one_length(lengths, column, first_row, SAME_SHAPE)
    if width == 0:
        raise RowError(column.name, first_row, "is an empty vector", NO_VALUES)
    if len(flat) == len(lengths) * width and (position == np.arange(len(flat)) % width).all():
        return np.ascontiguousarray(flat, dtype=column.dtype).reshape(-1, width)
    dense = np.zeros((len(lengths), width), dtype=column.dtype)
    dense[row_of_value, position] = flat
    return dense
