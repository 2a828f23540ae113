"""Python values to arrays: numbers, array-likes, tensors; and how messages show them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.data.row_errors import SAME_SHAPE, RowError, finite
from sparkdl.errors import kind_of


def as_array(value: Any, name: str, row: int, float_dtype: str, remedy: str) -> np.ndarray:
    """A Python value as an array: floats in ``float_dtype``, integers and booleans as they are.

    Raises :class:`RowError` for what is not numbers or masked, for NaN and inf, and for emptiness.
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
            array = array.astype(float_dtype, copy=False)
        if np.isnan(array).any():
            raise RowError(name, row, "holds NaN", remedy)
        if np.isinf(array).any():
            raise RowError(name, row, "holds inf", finite(float_dtype))
    elif _too_large(array):
        raise RowError(name, row, "holds a whole number beyond the 64 bits of int64", remedy)
    elif array.dtype.kind == "u":
        array = array.astype(np.int64)
    elif array.dtype.kind not in "ib":
        what = f"is {kind_of(value)}"
        raise RowError(name, row, f"{what}, not a number or an array of numbers", remedy)
    if array.size == 0:
        raise RowError(name, row, "is an empty array", remedy)
    return array


def masked(value: Any) -> bool:
    """Whether an element of this array, or of one in this list, is masked: ``np.asarray`` drops the
    mask, and takes the number that happens to lie under it."""
    if isinstance(value, (list, tuple)):
        kinds = (list, tuple, np.ma.MaskedArray)
        return any(issubclass(kind, kinds) for kind in set(map(type, value))) and any(
            map(masked, value)
        )
    return isinstance(value, np.ma.MaskedArray) and bool(np.any(np.ma.getmaskarray(value)))


def _plain(value: Any) -> np.ndarray:
    """Any array-like, tensor, or ``pyspark.ml.linalg`` vector or matrix."""
    if hasattr(value, "toArray"):
        value = value.toArray()
    elif hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value)


def _too_large(array: np.ndarray) -> bool:
    """Whether these are whole numbers, and not all of them int64's."""
    if array.dtype == np.uint64 and array.size:
        return int(array.max()) > np.iinfo(np.int64).max
    return bool(array.dtype == object and array.size and all(type(v) is int for v in array.flat))


def shorten(value: Any, limit: int = 60) -> str:
    """A value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def described(array: np.ndarray) -> str:
    """Its dtype and shape, in a message."""
    return f"{array.dtype}{list(array.shape)}"
