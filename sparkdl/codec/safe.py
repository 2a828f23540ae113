"""Nested plain values with tensors as leaves <-> JSON and a dict of tensors. No pickle.

JSON has no tuples, no infinities, and only strings as keys, so these are written as marked objects:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"float": "inf"}``, ``{"tensor": "name"}``,
and ``{"leaf": ...}``, which the caller defines. Finite floats come back bit for bit (Python writes the
shortest digits that read back exactly).

Frozen dataclasses <-> plain JSON values, checked against their annotations.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.errors import kind_of

STORABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes of tensors that a checkpoint holds."""


def encode(
    value: Any,
    where: str,
    keep: Callable[[torch.Tensor, str], str] | None = None,
    leaf: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Return ``value`` as JSON, or raise TypeError if it has no such form.

    ``keep`` stores a tensor and returns its name; ``leaf`` returns the JSON of any other value, or
    raises TypeError. Both get the place too.
    """
    if isinstance(value, torch.Tensor) and keep is not None:
        return {"tensor": keep(value, where)}
    if isinstance(value, np.generic):  # such as a learning rate
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    # Subclasses (enums, named tuples, ordered dicts) would come back as something else: refuse them.
    if type(value) is list:
        return [encode(item, f"{where}[{i}]", keep, leaf) for i, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        items = [encode(item, f"{where}[{i}]", keep, leaf) for i, item in enumerate(value)]
        return {"tuple": items}
    if type(value) is dict:
        for key in value:
            if type(key) not in (str, int, bool, type(None)):
                raise TypeError(f"{where} has the key {key!r}, {kind_of(key)}")
        return {
            "dict": [
                [key, encode(item, f"{where}[{key!r}]", keep, leaf)] for key, item in value.items()
            ]
        }
    if leaf is not None:
        return {"leaf": leaf(value, where)}
    raise TypeError(f"{where} is {kind_of(value)}")


def decode(
    value: Any, tensors: Mapping[str, torch.Tensor], leaf: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value that :func:`encode` was given; else ValueError, KeyError or TypeError."""
    if isinstance(value, list):
        return [decode(item, tensors, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    if mark == "tensor":
        return tensors[content]
    if mark == "float":
        return float(content)
    if mark == "tuple":
        return tuple(decode(item, tensors, leaf) for item in content)
    if mark == "dict":
        return {key: decode(item, tensors, leaf) for key, item in content}
    if mark == "leaf" and leaf is not None:
        return leaf(content)
    raise ValueError(f'unknown mark "{mark}"')


def mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with some of their values changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, kind, change) for item in value)
    return value


def to_plain(value: Any, kind: Any, where: str = "") -> Any:
    """Return ``value`` as JSON; a TypeError says where it is not of its annotation ``kind``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return encode(value, where)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else to_plain(value, arguments[0], where)
    if is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        return {
            f.name: to_plain(getattr(value, f.name), hints[f.name], f"{where}.{f.name}".strip("."))
            for f in fields(kind)
        }
    if origin is tuple:
        return [to_plain(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is Mapping:
        return {str(k): to_plain(v, arguments[1], f"{where}[{k!r}]") for k, v in value.items()}
    if kind is float:
        number = float(value)
        return number if math.isfinite(number) else repr(number)
    fits = isinstance(value, kind) or (kind is int and hasattr(value, "__index__"))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} is {kind_of(value)}")
    return kind(value)


def from_plain(value: Any, kind: Any, where: str = "") -> Any:
    """Return the value that :func:`to_plain` was given.

    Keys that a dataclass does not know are ignored; keys for which it has a default may be missing.
    A ValueError says where the JSON does not fit ``kind``.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return decode(value, {})
    if origin in (types.UnionType, typing.Union):
        return None if value is None else from_plain(value, arguments[0], where)
    if is_dataclass(kind):
        hints, known = _hints(typing.cast(Any, kind)), {f.name for f in fields(kind)}
        given = {k: v for k, v in _of(dict, value, where).items() if k in known}
        found = {k: from_plain(v, hints[k], f"{where}.{k}".strip(".")) for k, v in given.items()}
        try:
            return typing.cast(Any, kind)(**found)
        except TypeError as error:
            raise ValueError(f"{where or 'it'} is incomplete: {error}") from None
    if origin is tuple:
        items = enumerate(_of(list, value, where))
        return tuple(from_plain(item, arguments[0], f"{where}[{i}]") for i, item in items)
    if origin is Mapping:
        items_ = _of(dict, value, where).items()
        return {k: from_plain(v, arguments[1], f"{where}[{k!r}]") for k, v in items_}
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(value)
    if kind is float:
        return float(_of((int, float), value, where))
    return _of(kind, value, where)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(typing.cast(Any, kind))


def _of(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where or 'it'} is {kind_of(value)}")
    return value
