"""Tables in HTML, for the views in notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

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
