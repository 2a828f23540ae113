"""Secrets in what is written down: configurations, parameters, messages.

What is hidden is told by names, in a key or before an ``=``, and by the form of URIs. A secret under a
harmless name, or given by position, is not recognised.
"""

from __future__ import annotations

import re

REDACTED = "(redacted)"

_WORDS = r"secret|token|passw|passphrase|pwd|credential|key|authorization|signature|private"
_SECRET = re.compile(rf"{_WORDS}|(^|[._-])(auth|pass|sig)$", re.IGNORECASE)
_SECRET_NUMBER = re.compile(
    r"secret|passw|passphrase|pwd|credential|(access|account|api|encryption|private|shared)[._-]?key|"
    r"(^|[._-])(key|token)$",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(  # a word is looked at once, however long it is
    r"(?<![\w.-])(?P<name>"
    rf"(?=[\w.-]*?(?:{_WORDS})|(?:[\w.-]*[._-])?(?:pass|sig)=)[\w.-]++)="
    r"(?P<value>'[^']*'|\"[^\"]*\"|(?!\(redacted\))[^&;,\s'\")]+)",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]*+)://(?P<user>[^/?#\s'\"]*)@")
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes whose URIs have a container where others have the user."""


def is_secret(key: str, value: object) -> bool:
    """Whether ``key`` says that ``value`` is a secret.

    A number is more often a size, as of ``max_tokens``, so fewer keys hide one; None, True and False
    are never hidden.
    """
    if value is None or isinstance(value, bool):
        return False
    return bool((_SECRET_NUMBER if isinstance(value, (int, float)) else _SECRET).search(key))


def without_credentials(text: str) -> str:
    """``text`` without the users and passwords in its URIs, and without what ``secret=...`` says, as
    in the query of a signed URI."""
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
