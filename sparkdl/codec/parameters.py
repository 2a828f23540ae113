"""A trainer's values as short plain texts by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sparkdl.codec.redaction import is_secret, without_credentials
from sparkdl.loop.triggers import Trigger

LONGEST = 250
"""Letters of a value; the rest is cut off (MLflow's stores take 250 to 8,000)."""


def plain_parameters(trainer: Any) -> dict[str, str]:
    """The fields that a dataclass is given, where they are plain: numbers, texts, lists of them.

    A function, class or module is its name; a partial also its plain keywords, as ``optimizer.lr``;
    mappings and nested dataclasses likewise. Anything else (data, callbacks) is left out, and so is
    what stands under a name that looks like a secret's; in texts such are hidden, see
    :mod:`sparkdl.codec.redaction`.
    """
    return {k: text for name, value in _given(trainer) for k, text in _texts(name, value)}


def _given(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass, but for what it keeps for itself."""
    return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, (str, int, float, type(None))):
        if not is_secret(name, value):
            yield name, _cut(without_credentials(str(value)))
    elif isinstance(value, Trigger):
        named = type(value).__repr__ is object.__repr__  # which would tell an address
        yield name, _cut(type(value).__name__ if named else without_credentials(repr(value)))
    elif isinstance(value, functools.partial):
        yield from _texts(name, value.func)
        for key, argument in value.keywords.items():
            yield from _texts(f"{name}.{key}", argument)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(f"{name}.{key}", entry)
    elif isinstance(value, (list, tuple)):
        texts = [text for entry in value for _, text in _texts(name, entry)]
        if texts:
            yield name, _cut(", ".join(texts))
    elif isinstance(value, nn.Module):
        yield name, type(value).__qualname__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field, entry in _given(value):
            yield from _texts(f"{name}.{field}", entry)
    elif callable(value):
        yield name, _cut(getattr(value, "__qualname__", type(value).__qualname__))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
