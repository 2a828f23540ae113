"""Text descriptions of a trainer and of other settings, with secrets hidden."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from sparkdl.codec.redaction import REDACTED, is_secret, without_credentials

LONGEST = 2_000
"""Most characters of a field's description."""
LONGEST_PARAMETER = 250
"""Most characters of a parameter's value; the rest is cut (MLflow's stores take 250 to 8,000)."""


def redact(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return ``mapping`` as text with secrets hidden, see :mod:`sparkdl.codec.redaction`."""
    return {
        str(key): REDACTED if is_secret(str(key), str(value)) else without_credentials(str(value))
        for key, value in mapping.items()
    }


def describe_trainer(trainer: Any) -> dict[str, str]:
    """Return the trainer's fields as text: plain values as Python writes them, callables by name.

    The text is for people who read a manifest later; nothing is built from it again.
    """
    texts = {f.name: describe(getattr(trainer, f.name)) for f in fields(trainer) if f.init}
    return {name: _shortened(text) for name, text in redact(texts).items()}


def describe(value: Any) -> str:
    """Return a short description of a value.

    Plain values and sparkdl's dataclasses are described as Python writes them, anything else by a name.
    """
    if isinstance(value, functools.partial):
        given = [describe(arg) for arg in value.args]
        given += [f"{k}={v}" for k, v in redact(_described(value.keywords)).items()]
        return f"{describe(value.func)}({', '.join(given)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        inner = redact(_described({str(k): v for k, v in value.items()}))
        return "{" + ", ".join(f"{k}: {v}" for k, v in inner.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return "[" + ", ".join(describe(item) for item in value) + "]"
    kind = type(value)
    if kind.__module__.startswith("sparkdl.") and hasattr(kind, "__dataclass_fields__"):
        inner = redact(_described({f.name: getattr(value, f.name) for f in fields(value)}))
        return f"{kind.__name__}({', '.join(f'{k}={v}' for k, v in inner.items())})"
    if isinstance(value, nn.Module):
        return f"{_name(kind)} (a module)"
    named = value if hasattr(value, "__qualname__") else kind
    return _name(named)


def _shortened(text: str) -> str:
    """Cut a long description: a table of 100,000 numbers is of no use to a reader."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe(value) for name, value in values.items()}


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}:{thing.__qualname__}"


def plain_parameters(trainer: Any, written_as: tuple[type, ...] = ()) -> dict[str, str]:
    """Return the plain init fields of a dataclass as text: numbers, strings, and lists of them.

    A function, class or module is given as its name. A partial also gives its plain keywords, as
    ``optimizer.lr``; mappings and nested dataclasses do so as well. Anything else (data, callbacks)
    is left out, and so are values whose names suggest a secret. Secrets inside texts are hidden,
    see :mod:`sparkdl.codec.redaction`. Values of ``written_as`` are written as Python writes them.
    """
    texts = functools.partial(_texts, written_as=written_as)
    return {k: text for name, value in _given(trainer) for k, text in texts(name, value)}


def _given(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the init fields of a dataclass."""
    return ((f.name, getattr(value, f.name)) for f in fields(value) if f.init)


def _texts(name: str, value: Any, written_as: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, (str, int, float, type(None))):
        if not is_secret(name, value):
            yield name, _cut(without_credentials(str(value)))
    elif isinstance(value, written_as):
        named = type(value).__repr__ is object.__repr__  # its repr would show an address
        yield name, _cut(type(value).__name__ if named else without_credentials(repr(value)))
    elif isinstance(value, functools.partial):
        yield from _texts(name, value.func, written_as)
        for key, argument in value.keywords.items():
            yield from _texts(f"{name}.{key}", argument, written_as)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(f"{name}.{key}", entry, written_as)
    elif isinstance(value, (list, tuple)):
        texts = [text for entry in value for _, text in _texts(name, entry, written_as)]
        if texts:
            yield name, _cut(", ".join(texts))
    elif isinstance(value, nn.Module):
        yield name, type(value).__qualname__
    elif is_dataclass(value) and not isinstance(value, type):
        for field, entry in _given(value):
            yield from _texts(f"{name}.{field}", entry, written_as)
    elif callable(value):
        yield name, _cut(getattr(value, "__qualname__", type(value).__qualname__))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PARAMETER else f"{text[: LONGEST_PARAMETER - 1]}…"
