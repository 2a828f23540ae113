"""Secrets in what is written down: configurations, parameters, messages.

They are recognised by names, as a key or before an ``=``, and by the form of URIs. A secret under a
harmless name, or given by position, is not recognised.
"""

from __future__ import annotations

import re

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
