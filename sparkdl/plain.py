"""Conversion of values of NumPy, pandas and torch to Python's own types, and tests of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np


def plain(value: Any) -> Any:
    """Return ``value`` as Python numbers, lists and dicts.

    A NumPy scalar, or an array or tensor without dimensions, becomes a number. An array or tensor
    with dimensions and a pandas Index become a list, and a Series becomes a dict by its index.
    Mappings, lists and tuples are converted recursively; anything else is returned unchanged.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping) or _is_series(value):
        return {plain(key): plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if _is_array(value) else value


def plain_list(value: Any) -> Any:
    """Return :func:`plain` of ``value``, except that a Series becomes the list of its values."""
    return value.tolist() if _is_series(value) else plain(value)


def make_plain(made: Any, *names: str) -> None:
    """Replace fields (all, if none is named) of a dataclass, even a frozen one, by plain values."""
    for name in names or vars(made):
        object.__setattr__(made, name, plain(getattr(made, name)))


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is an array, a tensor or an Index, without importing their libraries."""
    kind = type(value)  # not the value: a Spark Column has every attribute that it is asked for
    return hasattr(kind, "tolist") and hasattr(kind, "dtype")


def _is_series(value: Any) -> bool:
    return _is_array(value) and hasattr(type(value), "items") and hasattr(type(value), "index")
