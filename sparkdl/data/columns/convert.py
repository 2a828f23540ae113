"""The column type of any column that a function converts; Python values as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import (
    Column,
    ColumnSpec,
    DataType,
    NamedFunction,
    check_values,
    name_of,
)
from sparkdl.data.fields import Field, dtype_as
from sparkdl.data.row_errors import MEND_RECORDS, SAME_SHAPE, RowError, finite
from sparkdl.errors import kind_of, known_arguments

_MEND = "Fix the function of this column, or filter out such rows."


@known_arguments
@dataclass(frozen=True)
class Convert(ColumnSpec):
    """A specification that applies ``function(value) -> number or array`` to each row on the executors.

    It fits any column. ``value`` is the Python value (a string, a dict for a struct, None for a
    null). All results must have one shape. Floats become the model's floats, unsigned integers
    int64.
    """

    kind = "convert"
    grows = True

    function: Callable[[Any], Any]

    def __post_init__(self) -> None:
        rule = "function: give a function of one value that returns a number or an array."
        check_values(self, (rule, callable(self.function)))

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column: any type will do."""
        return Column(name, float_dtype, spec=self, trained=trained)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> np.ndarray:
        """Apply the function to the Python value of each row."""
        results: list[np.ndarray] = []
        for row, value in enumerate(array.to_pylist(), start=first_row):
            try:
                result = self.function(value)
            except Exception as error:
                raise RowError(
                    column.name,
                    row,
                    f"the function of this column raised {type(error).__name__}: {error}",
                    f"It was given {shorten(value)}. Fix the function, or filter out such rows.",
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

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the name of the function."""
        return {"function": name_of(self.function, f'of column "{name}"')}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NamedFunction:
        """Return the named function, of which a ``Convert`` is made once it is imported."""
        return NamedFunction(name=values["function"], make=cls)


def as_array(
    value: Any, name: str, row: int, dtype: str, remedy: str = MEND_RECORDS, missing: bool = False
) -> np.ndarray:
    """Return a value as a finite array: floats in ``dtype``, integers and booleans as is.

    If values may be ``missing``, NaN is allowed.
    """
    if masked(value):
        raise RowError(name, row, "holds a masked value", remedy)
    try:
        array = _plain(value)
    except ValueError:
        raise RowError(name, row, "is ragged: its parts differ in length", SAME_SHAPE) from None
    except Exception as error:
        text = f"is {kind_of(value)} that cannot become an array ({error})"
        raise RowError(name, row, text, remedy) from None
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(dtype, copy=False)
        if not missing and np.isnan(array).any():
            raise RowError(name, row, "holds NaN", remedy)
        if np.isinf(array).any():
            raise RowError(name, row, "holds inf", finite(dtype))
    elif _too_large(array):
        raise RowError(name, row, "holds a whole number that does not fit into int64", remedy)
    elif array.dtype.kind == "u":
        array = array.astype(np.int64)
    elif array.dtype.kind not in "ib":
        what = f"is {kind_of(value)}"
        raise RowError(name, row, f"{what}, not a number or an array of numbers", remedy)
    if array.size == 0:
        raise RowError(name, row, "is an empty array", remedy)
    return array


def masked(value: Any) -> bool:
    """Return whether an element of this array, or of an array in this list, is masked.

    ``np.asarray`` would drop the mask and take the number that happens to lie under it.
    """
    if isinstance(value, (list, tuple)):
        kinds = (list, tuple, np.ma.MaskedArray)
        return any(issubclass(kind, kinds) for kind in set(map(type, value))) and any(
            map(masked, value)
        )
    return isinstance(value, np.ma.MaskedArray) and bool(np.any(np.ma.getmaskarray(value)))


def _plain(value: Any) -> np.ndarray:
    """Convert any array-like, tensor, or ``pyspark.ml.linalg`` vector or matrix."""
    if hasattr(value, "toArray"):
        value = value.toArray()
    elif hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value)


def _too_large(array: np.ndarray) -> bool:
    """Return whether these are integers, not all of which fit int64."""
    if array.dtype == np.uint64 and array.size:
        return int(array.max()) > np.iinfo(np.int64).max
    return bool(array.dtype == object and array.size and all(type(v) is int for v in array.flat))


def shorten(value: Any, limit: int = 60) -> str:
    """Return a value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def described(array: np.ndarray) -> str:
    """Return the dtype and shape of an array as a message shows them."""
    return f"{array.dtype}{list(array.shape)}"
