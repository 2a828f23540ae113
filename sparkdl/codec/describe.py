"""Text descriptions of a trainer and of other settings, with secrets hidden.

Secrets are recognised by names, as a key or before an ``=``, and by the form of URIs. A secret under a
harmless name, or given by position, is not recognised.

Notebooks show tables in HTML.
"""

from __future__ import annotations

import functools
import html
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

REDACTED = "(redacted)"

_TOKEN = r"(?<!(?:pad|eos|bos|unk|sep|cls)[._-])(?<!mask[._-])token(?!i[sz])"
"""Matches "token" in a name, but not in "tokenizer" and not in the special tokens of a text."""
_WORDS = (
    rf"secret|{_TOKEN}|passw|passphrase|pwd|credential|key(?!word|point|board)|authorization|"
    r"signature|private"
)
_SECRET = re.compile(rf"{_WORDS}|(^|[._-])(auth|pass|sig)$", re.IGNORECASE)
_SECRET_NUMBER = re.compile(
    r"secret|passw|passphrase|pwd|credential|(access|account|api|encryption|private|shared)[._-]?key|"
    r"(^|[._-])(key|token|pass|sig)$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]{0,11}(\.[0-9]{0,11})?(e[-+]?[0-9]{1,3})?", re.IGNORECASE)
_NEVER = ("None", "True", "False")
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

    Fewer names hide a number, or the text of one, because it is more often a size, as in
    ``max_tokens``. None, True and False are never hidden.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in _NEVER):
        return False
    number = isinstance(value, (int, float)) or (
        isinstance(value, str) and _NUMBER.fullmatch(value) is not None
    )
    return bool((_SECRET_NUMBER if number else _SECRET).search(key))


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
    name, value = found.group("name"), found.group("value")
    if not is_secret(name, value):
        return found.group()
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}={quote}{REDACTED}{quote}"


LONGEST = 2_000
"""Most characters of a field's description."""
LONGEST_PARAMETER = 250
"""Most characters of a parameter's value; the rest is cut (MLflow's stores take 250 to 8,000)."""


def redact(mapping: Mapping[str, Any]) -> dict[str, str]:
    """Return ``mapping`` as text with secrets hidden, see :mod:`sparkdl.codec.describe`."""
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
    from torch import nn  # a job's mistake is told without it

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
    see :mod:`sparkdl.codec.describe`. Values of ``written_as`` are written as Python writes them.
    """
    texts = functools.partial(_texts, written_as=written_as)
    return {k: text for name, value in _given(trainer) for k, text in texts(name, value)}


def _given(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the init fields of a dataclass."""
    return ((f.name, getattr(value, f.name)) for f in fields(value) if f.init)


def _texts(name: str, value: Any, written_as: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    from torch import nn  # a job's mistake is told without it

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


_LEFT, _RIGHT = "text-align:left", "text-align:right"


def two_columns(rows: Mapping[str, str], numbers: bool = False) -> str:
    """Return a table of names and values."""
    side = _RIGHT if numbers else _LEFT
    cells = "".join(
        f"<tr><th style='{_LEFT}'>{html.escape(name)}</th>"
        f"<td style='{side}'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Return a table with a head."""
    sides = (_LEFT, *[_RIGHT if numbers else _LEFT] * (len(head) - 1))
    top = "".join(
        f"<th style='{s}'>{html.escape(t)}</th>" for s, t in zip(sides, head, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td style='{s}'>{html.escape(t)}</td>" for s, t in zip(sides, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def titled(title: str, *parts: str) -> str:
    """Return a block: a line in bold, and below it what is not empty of ``parts``."""
    return f"<div><b>{html.escape(title)}</b>{''.join(parts)}</div>"
