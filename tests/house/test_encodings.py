"""Text in files and pipes is UTF-8, whatever the locale of the process that reads or writes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from launch import ROOT

FILES = [path for room in ("sparkdl", "jobs", "examples") for path in (ROOT / room).rglob("*.py")]
MODE = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Where these functions have the mode among their arguments."""

TEXT = {"read_text": 0, "write_text": 1}
"""Where methods of a path have the encoding."""


def as_the_locale_says(text: str) -> Iterator[int]:
    """Yield the lines of calls that read or write text and name no encoding."""
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and not any(k.arg == "encoding" for k in call.keywords):
            given = {k.arg: k.value for k in call.keywords}
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
            method = name == "open" and isinstance(call.func, ast.Attribute)
            named = len(call.args) > TEXT.get(name, 0)
            if (name in TEXT and not named) or {"text", "universal_newlines"} & given.keys():
                yield call.lineno
            elif name in MODE:
                place = MODE[name] - method
                default = ast.Constant("b" if name.endswith("File") else "r")
                mode = given.get("mode", *call.args[place : place + 1] or [default])
                letters = str(getattr(mode, "value", "b"))
                if "b" not in letters and (not method or set(letters) <= set("rwxat+")):
                    yield call.lineno


def test_every_text_names_its_encoding() -> None:
    lines = {path: list(as_the_locale_says(path.read_text("utf-8"))) for path in FILES}
    assert [f"{path.relative_to(ROOT)}:{n}" for path, found in lines.items() for n in found] == []
