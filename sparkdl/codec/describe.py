"""Text descriptions of a trainer and of other settings, with secrets hidden.

Secrets are hidden in everything that is written down: configurations, parameters, messages. They are
recognised by names, as a key or before an ``=``, and by the form of URIs. A secret under a harmless
name, or given by position, is not recognised.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

LONGEST = 2_000
"""Most characters of a field's description."""


def redact(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return ``mapping`` as text with secrets hidden, see :mod:`sparkdl.codec.describe`.

    All values of a key whose name suggests a secret are hidden, numbers too.
    """
    return {
        str(key): REDACTED if is_secret(str(key), str(value)) else without_credentials(str(value))
        for key, value in mapping.items()
    }


def describe_trainer(trainer: Any) -> dict[str, str]:
    """Return the trainer's fields as text: plain values as Python writes them, callables by name.

    The text is for people who read a manifest later; nothing is built from it again.
    """
    told = {f.name: describe(getattr(trainer, f.name)) for f in fields(trainer) if f.init}
    return {name: _shortened(text) for name, text in redact(told).items()}


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


LONGEST_PARAMETER = 250
"""Most characters of a parameter's value; the rest is cut (MLflow's stores take 250 to 8,000)."""


def plain_parameters(trainer: Any, written_as: tuple[type, ...] = ()) -> dict[str, str]:
    """Return the plain init fields of a dataclass as text: numbers, strings, and lists of them.

    A function, class or module is given as its name. A partial also gives its plain keywords, as
    ``optimizer.lr``; mappings and nested dataclasses do so as well. Anything else (data, callbacks)
    is left out, and so are values whose names suggest a secret. Secrets inside texts are hidden,
    see :mod:`sparkdl.codec.describe`.

    Args:
        trainer: The dataclass.
        written_as: Types whose values are written as Python writes them.
    """
    texts = functools.partial(_texts, written_as=written_as)
    return {k: text for name, value in _given(trainer) for k, text in texts(name, value)}


def _given(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the init fields of a dataclass."""
    return ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)


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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field, entry in _given(value):
            yield from _texts(f"{name}.{field}", entry, written_as)
    elif callable(value):
        yield name, _cut(getattr(value, "__qualname__", type(value).__qualname__))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PARAMETER else f"{text[: LONGEST_PARAMETER - 1]}…"


REDACTED = "(redacted)"


_WORDS = r"secret|token|passw|passphrase|pwd|credential|key|authorization|signature|private"


_SECRET = re.compile(rf"{_WORDS}|(^|[._-])(auth|pass|sig)$", re.IGNORECASE)


_SECRET_NUMBER = re.compile(
    r"secret|passw|passphrase|pwd|credential|(access|account|api|encryption|private|shared)[._-]?key|"
    r"(^|[._-])(key|token)$",
    re.IGNORECASE,
)


_ASSIGNED = re.compile(  # looks at each word once, however long it is
    r"(?<![\w.-])(?P<name>"
    rf"(?=[\w.-]*?(?:{_WORDS})|(?:[\w.-]*[._-])?(?:pass|sig)=)[\w.-]++)="
    r"(?P<value>'[^']*'|\"[^\"]*\"|(?!\(redacted\))[^&;,\s'\")]+)",
    re.IGNORECASE,
)


_USER = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]*+)://(?P<user>[^/?#\s'\"]*)@")


_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes whose URIs have a container in the place of the user."""


def is_secret(key: str, value: object) -> bool:
    """Return whether the name ``key`` suggests that ``value`` is a secret.

    Fewer names hide a number, because it is more often a size, as in ``max_tokens``. None, True and
    False are never hidden.
    """
    if value is None or isinstance(value, bool):
        return False
    return bool((_SECRET_NUMBER if isinstance(value, (int, float)) else _SECRET).search(key))


def without_credentials(text: str) -> str:
    """Return ``text`` with credentials hidden.

    These are the users and passwords in URIs, and the values of assignments such as ``secret=...``,
    as in the query of a signed URI.
    """
    return _ASSIGNED.sub(_without_value, _USER.sub(_without_user, text))


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found.group("scheme"), found.group("user")
    if scheme.lower() in _CONTAINERS and ":" not in user:
        return found.group()
    return f"{scheme}://{REDACTED}@"


def _without_value(found: re.Match[str]) -> str:
    quote = found.group("value")[0]
    quote = quote if quote in "'\"" else ""
    return f"{found.group('name')}={quote}{REDACTED}{quote}"
