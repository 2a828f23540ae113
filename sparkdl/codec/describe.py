"""What a trainer was made of, as text to keep, with nothing secret in it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import nn

from sparkdl.codec.redaction import REDACTED, is_secret, without_credentials

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


LONGEST = 2_000
"""Characters of a field's description."""


def redact(mapping: Mapping[str, Any]) -> dict[str, str]:
    """``mapping`` as text, secrets hidden, see :mod:`sparkdl.codec.redaction`; all values of a key that
    speaks of one, numbers too."""
    return {
        str(key): REDACTED if is_secret(str(key), str(value)) else without_credentials(str(value))
        for key, value in mapping.items()
    }


def describe_trainer(trainer: Trainer) -> dict[str, str]:
    """The trainer's fields as text: plain values as Python writes them, callables by name.

    For people who read a manifest later; nothing is built from it again.
    """
    told = {f.name: describe(getattr(trainer, f.name)) for f in fields(trainer) if f.init}
    return {name: _shortened(text) for name, text in redact(told).items()}


def describe(value: Any) -> str:
    """A value in a few words: what is plain or of sparkdl as Python writes it, else its name."""
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
    """A table of 100,000 numbers is no description."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe(value) for name, value in values.items()}


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}:{thing.__qualname__}"
