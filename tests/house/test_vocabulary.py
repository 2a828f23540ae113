"""One meaning a word: names that have been replaced do not come back, in code or in code spans."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from launch import ROOT
from trees import parsed

OLD_WORDS = Path(__file__).with_name("old_words.txt")
SPAN = re.compile(r"`([^`\n]+)`")


def old_words() -> dict[str, tuple[str, str]]:
    """An old word -> where it is old (a room, or empty) and the new word."""
    found = {}
    for line in OLD_WORDS.read_text().splitlines():
        if line and not line.startswith("#"):
            old, new, *room = line.split()
            found[old] = ("".join(room), new)
    return found


def names(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines: classes, functions, parameters and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr.lstrip("_")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_no_old_word_names_anything() -> None:
    words, wrong = old_words(), []
    for path in sorted((ROOT / "sparkdl").rglob("*.py")):
        room = ".".join(path.relative_to(ROOT / "sparkdl").with_suffix("").parts)
        for name in set(names(parsed(path))):
            where, new = words.get(name, ("-", ""))
            if where == "" or (where != "-" and room.startswith(where)):
                wrong.append(f"{path.relative_to(ROOT)}: {name}: say {new}")
    for path in sorted(
        [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    ):
        for span in SPAN.findall(path.read_text()):
            for word in re.findall(r"\w+", span):
                where, new = words.get(word, ("-", ""))
                if where == "" and not (word.islower() and "_" not in word):
                    wrong.append(f"{path.relative_to(ROOT)}: `{span}`: say {new}")
    assert wrong == []
