"""Arrow arrays to NumPy arrays, with every row checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Convert, Image, Sequence
from sparkdl.data.columns.convert import as_array, described, shorten
from sparkdl.data.columns.image import decode_images
from sparkdl.data.fields import dtype_as
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import (
    INSIDE_ARRAYS,
    INSIDE_VECTORS,
    NO_VALUES,
    SAME_SHAPE,
    RowError,
    drop,
    finite,
    varying,
)

if TYPE_CHECKING:
    from sparkdl.data.columns.base import Column


def to_numpy(array: pa.Array, column: Column, first_row: int = 0) -> Rows:
    """Return the array as a C-contiguous NumPy array of shape (rows, *shape of one row).

    A :class:`sparkdl.Sequence` becomes a :class:`Ragged`.

    Args:
        array: The Arrow array.
        column: Its description.
        first_row: The number of the array's row 0 in its partition, for messages.

    Raises:
        RowError: A row is null, holds NaN or a number that is infinite in ``column.dtype``, differs in
            shape from row 0, is a damaged image or an invalid weight, or its function fails.
    """
    if isinstance(column.spec, Image):
        return decode_images(array, column.name, column.spec, column.dtype, first_row)
    if isinstance(column.spec, Sequence):
        return _sequences(array, column, column.spec, first_row)
    if isinstance(column.spec, Convert):
        return _converted(array, column, column.spec.function, first_row)
    if not len(array):
        return np.zeros((0,) * (1 + column.depth), column.dtype)
    with np.errstate(over="ignore"):  # what is too large becomes inf, which is reported below
        values = (_vectors if column.vector else _nested)(array, column, first_row)
    if column.weight:
        check_weights(values, column.name, first_row)
    _check_finite(values, column, first_row)
    return values


def _check_finite(values: np.ndarray, column: Column, first_row: int) -> None:
    """Raise :class:`RowError` for NaN and infinite numbers."""
    if values.dtype.kind != "f" or not values.size:
        return
    low, high = values.min(), values.max()  # both propagate NaN, and allocate nothing
    if np.isfinite(low) and np.isfinite(high):
        return
    nan = bool(np.isnan(low))
    wrong = np.isnan(values) if nan else np.isinf(values)
    row = int(np.flatnonzero(wrong.reshape(len(values), -1).any(axis=1))[0])
    verb = "is" if values.ndim == 1 else "holds"
    if not nan:
        raise RowError(column.name, first_row + row, f"{verb} inf", finite(column.dtype))
    remedy = INSIDE_VECTORS if column.vector else INSIDE_ARRAYS
    remedy = drop(column.name) if values.ndim == 1 else remedy
    raise RowError(column.name, first_row + row, f"{verb} NaN", remedy)


def check_weights(values: np.ndarray, name: str, first_row: int) -> None:
    """Check the weights of consecutive rows.

    Args:
        values: The weights, (rows,).
        name: The name of their column, for messages.
        first_row: The number of the first row, for messages.

    Raises:
        RowError: A weight is infinite or below 0.
    """
    wrong = np.flatnonzero(np.isinf(values) | (values < 0))
    if len(wrong):
        row = int(wrong[0])
        raise RowError(
            name,
            first_row + row,
            f"is {values[row]}, and a weight is a finite number of at least 0",
            "Filter such rows, or mend their weights.",
        )


_INSIDE = {
    "is null": "holds a null",
    "is NaN": "holds NaN",
    "is inf": "holds inf",
    "is an empty array": "holds an empty one",
}
"""Problem of an item -> problem of the row that contains the item."""


def _sequences(array: pa.Array, column: Column, spec: Sequence, first_row: int) -> Ragged:
    """Convert rows of varying length; below the outermost level, all rows must have one shape."""
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(column.name, first_row + row, "is null", drop(column.name))
    lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise RowError(column.name, first_row + row, "is an empty array", NO_VALUES)
    inner = replace(column, depth=column.depth - 1, spec=None)
    try:
        values = to_numpy(array.flatten(), inner)
    except RowError as error:
        item = error.problem.row
        row = int(np.searchsorted(offsets, item, side="right")) - 1
        text = _INSIDE.get(error.problem.text, error.problem.text)
        if text.startswith("has "):
            text = text.replace("has ", "has an item of ", 1).replace("row 0", "the first item")
            raise RowError(column.name, first_row + row, text, SAME_SHAPE) from None
        remedy = error.problem.remedy if text == "holds inf" else INSIDE_ARRAYS
        raise RowError(column.name, first_row + row, text, remedy) from None
    assert isinstance(values, np.ndarray)
    rows = Ragged(values, offsets, spec.rule)
    return rows if spec.max_length is None else rows.cut(spec.max_length)


def _converted(
    array: pa.Array, column: Column, function: Callable[[Any], Any], first_row: int
) -> np.ndarray:
    """Apply ``function`` to the Python value of each row."""
    results: list[np.ndarray] = []
    for row, value in enumerate(array.to_pylist(), start=first_row):
        try:
            result = function(value)
        except Exception as error:
            raise RowError(
                column.name,
                row,
                f"the function of this column raised {type(error).__name__}: {error}",
                f"It was given {shorten(value)}. Mend the function, or filter such rows.",
            ) from None
        results.append(as_array(result, column.name, row, column.dtype, _MEND))
        first = results[0]
        if (results[-1].shape, results[-1].dtype) != (first.shape, first.dtype):
            raise RowError(
                column.name,
                row,
                f"became {described(results[-1])} where row {first_row} became {described(first)}",
                SAME_SHAPE,
            )
    if not results:
        return np.zeros(0, column.dtype)
    return np.stack(results).astype(dtype_as(results[0].dtype.name, column.trained), copy=False)


_MEND = "Mend the function of this column, or filter such rows."


def _nested(array: pa.Array, column: Column, first_row: int) -> np.ndarray:
    shape: list[int] = []
    rows_per_item = 1  # how many items of the current level make one row
    for level in range(column.depth + 1):
        if array.null_count:
            item = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + item // rows_per_item
            if level == 0:
                raise RowError(column.name, row, "is null", drop(column.name))
            raise RowError(column.name, row, "holds a null", INSIDE_ARRAYS)
        if level == column.depth:
            break
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        length = int(lengths[0]) if len(lengths) else 0
        ragged = np.flatnonzero(lengths != length)
        if len(ragged):
            item = int(ragged[0])
            raise RowError(
                column.name,
                first_row + item // rows_per_item,
                f"has {int(lengths[item])} values where row {first_row} has {length}",
                varying(column.name) if level == 0 else SAME_SHAPE,
            )
        shape.append(length)
        rows_per_item *= length
        array = array.flatten()
        if length == 0:
            raise RowError(column.name, first_row, "is an empty array", NO_VALUES)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    flat = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(flat, dtype=column.dtype).reshape(-1, *shape)


def _vectors(array: pa.Array, column: Column, first_row: int) -> np.ndarray:
    """Convert ml.linalg vectors, which arrive as struct<type, size, indices, values>.

    Type 0 is sparse.
    """
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(column.name, first_row + row, "is null", drop(column.name))
    kinds, sizes, indices, values = array.flatten()
    sparse = kinds.to_numpy(zero_copy_only=False) == 0
    counts = values.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.where(sparse, sizes.fill_null(0).to_numpy(zero_copy_only=False), counts)
    width = int(lengths[0]) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != width)
    if len(wrong):
        row = int(wrong[0])
        raise RowError(
            column.name,
            first_row + row,
            f"has {int(lengths[row])} values where row {first_row} has {width}",
            SAME_SHAPE,
        )
    if width == 0:
        raise RowError(column.name, first_row, "is an empty vector", NO_VALUES)
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
