"""Columns to tensors: what a DataFrame's schema allows, and Arrow arrays to NumPy arrays.

Numeric columns, arrays and nested arrays of numbers, and ``pyspark.ml.linalg`` vectors, dense and
sparse. Floating columns take the model's floating dtype (float32 or float64); integers stay
integers (int64 in a batch: indices for an embedding, class numbers); booleans stay booleans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparkdl.errors import DataError, nearest, raise_all

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_INTEGERS = {"byte": "int8", "short": "int16", "integer": "int32", "long": "int64"}
_FLOATS = {"float", "double", "decimal"}


@dataclass(frozen=True)
class Column:
    """One input or label column.

    ``dtype``: NumPy name of what a sample holds. ``depth``: how many array levels the column has
    (0: a number). ``vector``: a ``pyspark.ml.linalg`` vector.
    """

    name: str
    dtype: str
    depth: int = 0
    vector: bool = False


@dataclass(frozen=True)
class Problem:
    """What is wrong with one row of one column; found on an executor, raised on the driver."""

    column: str
    row: int
    text: str
    remedy: str

    def message(self, place: str, noun: str = "column") -> str:
        """One line for the user; ``place`` is the partition, ``noun`` what ``column`` names."""
        return f'{noun} "{self.column}", row {self.row} of {place}: {self.text}. {self.remedy}'


class RowProblem(Exception):
    """Carries a :class:`Problem` out of a conversion."""

    def __init__(self, column: str, row: int, text: str, remedy: str) -> None:
        super().__init__(text)
        self.problem = Problem(column, row, text, remedy)


SAME_SHAPE = "Every row must have the same shape: filter, pad or cut such rows."
_NO_VALUES = "Filter such rows, or leave the column out."
_INSIDE_ARRAYS = (
    "dropna does not look into arrays: filter such rows with functions.exists, or fill them with "
    "functions.transform."
)
_INSIDE_VECTORS = (
    "dropna does not look into vectors: mend them where they are made, or turn them into arrays "
    "with pyspark.ml.functions.vector_to_array and filter those with functions.exists."
)


def _drop(column: Column) -> str:
    return f'Drop such rows with df.dropna(subset=["{column.name}"]), or fill them.'


def quoted(name: str) -> str:
    """A column's name as Spark reads it, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def columns_of(
    schema: StructType, features: Sequence[str], label: Sequence[str], float_dtype: str
) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """The feature and label columns of a DataFrame.

    Raises :class:`sparkdl.errors.DataError` that lists every column that is missing or of a type
    that cannot become a tensor.
    """
    problems: list[str] = []
    found: list[list[Column]] = []
    for role, names in (("feature", features), ("label", label)):
        columns = []
        for name in names:
            if name not in schema.names:
                problems.append(
                    f'{role} column "{name}" is missing.{nearest(name, schema.names)} '
                    f"The DataFrame has: {', '.join(schema.names) or 'no columns'}."
                    + (" To train without a label, set label=None." if role == "label" else "")
                )
                continue
            column = _column(name, schema[name].dataType, float_dtype)
            if isinstance(column, str):
                problems.append(f'{role} column "{name}" {column}')
            else:
                columns.append(column)
        found.append(columns)
    raise_all(DataError, problems)
    return tuple(found[0]), tuple(found[1])


def _column(name: str, data_type: DataType, float_dtype: str) -> Column | str:
    """The column, or what is wrong with its type and what to do."""
    kind, depth = data_type, 0
    while kind.typeName() == "array":
        kind, depth = kind.elementType, depth + 1  # type: ignore[attr-defined]
    type_name = kind.typeName()
    if type_name == "vectorudt" or type(kind).__name__ == "VectorUDT":
        if depth:
            return "is an array of vectors: use nested arrays, or one vector a row."
        return Column(name, float_dtype, depth=1, vector=True)
    if type_name in _INTEGERS:
        return Column(name, _INTEGERS[type_name], depth)
    if type_name in _FLOATS or type_name.startswith("decimal"):
        return Column(name, float_dtype, depth)
    if type_name == "boolean":
        return Column(name, "bool", depth)
    shown = data_type.simpleString()
    if type_name in ("string", "varchar", "char"):
        return (
            f"is of type {shown}: turn text into numbers first, for example with "
            "pyspark.ml.feature.StringIndexer, or cast it where it holds numbers."
        )
    return (
        f"is of type {shown}, which cannot become a tensor: use numbers, arrays of numbers or "
        "pyspark.ml.linalg vectors."
    )


def to_numpy(array: pa.Array, column: Column, first_row: int = 0) -> np.ndarray:
    """The array as a C-contiguous NumPy array of shape (rows, *shape of one row).

    Raises :class:`RowProblem` for a null, a NaN, or a row whose shape differs from row 0's;
    ``first_row`` is the number of the array's row 0 in its partition.
    """
    if column.vector:
        values = _vectors(array, column, first_row)
    else:
        values = _nested(array, column, first_row)
    if values.dtype.kind == "f" and np.isnan(values).any():
        row = int(np.flatnonzero(np.isnan(values.reshape(len(values), -1)).any(axis=1))[0])
        if values.ndim == 1:
            raise RowProblem(column.name, first_row + row, "is NaN", _drop(column))
        remedy = _INSIDE_VECTORS if column.vector else _INSIDE_ARRAYS
        raise RowProblem(column.name, first_row + row, "holds NaN", remedy)
    return values


def _nested(array: pa.Array, column: Column, first_row: int) -> np.ndarray:
    shape: list[int] = []
    rows_per_item = 1  # how many items of the current level make one row
    for level in range(column.depth + 1):
        if array.null_count:
            item = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + item // rows_per_item
            if level == 0:
                raise RowProblem(column.name, row, "is null", _drop(column))
            raise RowProblem(column.name, row, "holds a null", _INSIDE_ARRAYS)
        if level == column.depth:
            break
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        length = int(lengths[0]) if len(lengths) else 0
        ragged = np.flatnonzero(lengths != length)
        if len(ragged):
            item = int(ragged[0])
            raise RowProblem(
                column.name,
                first_row + item // rows_per_item,
                f"has {int(lengths[item])} values where row {first_row} has {length}",
                SAME_SHAPE,
            )
        shape.append(length)
        rows_per_item *= length
        array = array.flatten()
        if length == 0:
            raise RowProblem(column.name, first_row, "is an empty array", _NO_VALUES)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    flat = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(flat, dtype=column.dtype).reshape(-1, *shape)


def _vectors(array: pa.Array, column: Column, first_row: int) -> np.ndarray:
    """ml.linalg vectors, which arrive as struct<type, size, indices, values>; type 0 is sparse."""
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowProblem(column.name, first_row + row, "is null", _drop(column))
    kinds, sizes, indices, values = array.flatten()
    sparse = kinds.to_numpy(zero_copy_only=False) == 0
    counts = values.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.where(sparse, sizes.fill_null(0).to_numpy(zero_copy_only=False), counts)
    width = int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != width)
    if len(wrong):
        row = int(wrong[0])
        raise RowProblem(
            column.name,
            first_row + row,
            f"has {int(lengths[row])} values where row {first_row} has {width}",
            SAME_SHAPE,
        )
    if width == 0:
        raise RowProblem(column.name, first_row, "is an empty vector", _NO_VALUES)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    if not sparse.any():
        return np.ascontiguousarray(flat, dtype=column.dtype).reshape(-1, width)
    row_of_value = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    position = within.copy()
    position[sparse[row_of_value]] = indices.flatten().to_numpy(zero_copy_only=False)
    dense = np.zeros((len(lengths), width), dtype=column.dtype)
    dense[row_of_value, position] = flat
    return dense
