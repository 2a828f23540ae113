"""Python's own values in place of those of NumPy, pandas and torch that a user has at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """``value`` in Python's numbers, lists and dicts: a NumPy scalar or an array or tensor without
    dimensions is a number, one with dimensions and a pandas Index a list, a Series a dict by its index.

    Mappings, lists and tuples are gone through; anything else stays what it is.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping) or _is_series(value):
        return {plain(key): plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if _is_array(value) else value


def plain_list(value: Any) -> Any:
    """As :func:`plain`, but a Series is the list of its values."""
    return value.tolist() if _is_series(value) else plain(value)


def make_plain(made: Any, *names: str) -> None:
    """Bring fields of a dataclass, also of a frozen one, to :func:`plain`; all of them without
    ``names``."""
    for name in names or vars(made):
        object.__setattr__(made, name, plain(getattr(made, name)))


def _is_array(value: Any) -> bool:
    """Whether it is an array, a tensor, or an Index: the libraries themselves are not imported."""
    kind = type(value)  # which is asked, as a Spark Column has whatever attribute it is asked for
    return hasattr(kind, "tolist") and hasattr(kind, "dtype")


def _is_series(value: Any) -> bool:
    return _is_array(value) and hasattr(type(value), "items") and hasattr(type(value), "index")
