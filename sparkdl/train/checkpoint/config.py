"""What a trainer was made of, as text to keep, with nothing secret in it."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

REDACTED = "(redacted)"

_SECRET = re.compile(r"secret|token|passw|pwd|credential|key|auth|signature|private", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_ASSIGNED = re.compile(r"([A-Za-z0-9_.-]+)=(['\"]?)(?!\(redacted\))[^&;,\s'\")]+")


def redact(mapping: Mapping[str, Any]) -> dict[str, str]:
    """``mapping`` as text, values hidden where the key speaks of a secret.

    Also hidden: the user and password of a URI within a value, and what a ``secret=...`` within a
    value (the query of a URI) is set to.
    """
    return {
        str(key): REDACTED if _SECRET.search(str(key)) else without_credentials(str(value))
        for key, value in mapping.items()
    }


def without_credentials(text: str) -> str:
    """``text`` without the users and passwords in its URIs, and without ``secret=...``."""
    return _ASSIGNED.sub(_hide, _USER.sub(f"{REDACTED}@", text))


def _hide(found: re.Match[str]) -> str:
    name, quote = found.groups()
    return f"{name}={quote}{REDACTED}" if _SECRET.search(name) else found.group()


def describe_trainer(trainer: Trainer) -> dict[str, str]:
    """The trainer's fields as text: plain values as Python writes them, callables by name.

    For people who read a manifest later; nothing is built from it again.
    """
    return redact({f.name: describe(getattr(trainer, f.name)) for f in fields(trainer)})


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
    if isinstance(value, Sequence):
        return "[" + ", ".join(describe(item) for item in value) + "]"
    kind = type(value)
    if kind.__module__.startswith("sparkdl.") and hasattr(kind, "__dataclass_fields__"):
        inner = redact(_described({f.name: getattr(value, f.name) for f in fields(value)}))
        return f"{kind.__name__}({', '.join(f'{k}={v}' for k, v in inner.items())})"
    if isinstance(value, nn.Module):
        return f"{_name(kind)} (a module)"
    named = value if hasattr(value, "__qualname__") else kind
    return _name(named)


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe(value) for name, value in values.items()}


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}:{thing.__qualname__}"
