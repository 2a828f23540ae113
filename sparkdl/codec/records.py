"""Frozen dataclasses <-> plain JSON values, checked against their annotations."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from sparkdl.codec.safe import decode, encode
from sparkdl.errors import kind_of


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
