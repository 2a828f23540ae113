"""Sizes of the package: figures that may fall and not rise. Lower a figure here when it has fallen."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from launch import ROOT
from trees import parsed

PACKAGE = ROOT / "sparkdl"
AT_MOST = {
    "modules": 239,
    "lines": 68_130,
    "modules of more than 600 lines": 0,
    "percent of lines in the largest room": 14,
    "modules with a single importer": 30,
    "docstrings that begin with Of, What, Whether or Where": 0,
}
# Lines of code of each room: without docstrings, comments and blank lines.
CODE = {
    "care": 2073,
    "checkpoint": 1187,
    "codec": 884,
    "collectives": 2288,
    "connect": 734,
    "consistency": 689,
    "data": 4082,
    "engines": 6896,
    "gang": 2171,
    "infer": 4695,
    "jobs": 983,
    "loop": 2304,
    "metrics": 1048,
    "ml": 1066,
    "model": 1432,
    "parallel": 1083,
    "planner": 1320,
    "process": 483,
    "replica": 1207,
    "slab": 485,
    "slices": 1964,
    "spark": 1048,
    "summaries": 843,
    "train": 3124,
    "tune": 1757,
    "usercode": 525,
    "": 1841,  # the modules at the top
}
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> dict[str, Path]:
    """Every module but ``__init__`` by its name."""
    found = sorted(PACKAGE.rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in found
        if path.name != "__init__.py"
    }


def imported(tree: ast.AST, known: set[str]) -> set[str]:
    """The modules of the package that a module imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known


def fragments(tree: ast.AST) -> int:
    """Docstrings that are no sentence."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    firsts = [(ast.get_docstring(node) or "").split(" ")[0] for node in nodes]
    return sum(first in ("Of", "What", "Whether", "Where") for first in firsts)


def lines_of_code(path: Path) -> int:
    """How many lines hold a token that is no docstring."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def code_of_rooms() -> Counter[str]:
    rooms: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room, *rest = path.relative_to(PACKAGE).parts
        rooms[room if rest else ""] += lines_of_code(path)
    return rooms


def figures() -> dict[str, float]:
    paths = modules()
    texts = {name: path.read_text() for name, path in paths.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    trees = {name: parsed(path) for name, path in paths.items()}
    rooms: Counter[str] = Counter()
    for name, number in lines.items():
        rooms[name.split(".")[1]] += number
    importers = Counter(other for tree in trees.values() for other in imported(tree, set(paths)))
    total = sum(lines.values())
    return {
        "modules": len(paths),
        "lines": total,
        "modules of more than 600 lines": sum(number > 600 for number in lines.values()),
        "percent of lines in the largest room": round(100 * max(rooms.values()) / total),
        "modules with a single importer": sum(importers[name] == 1 for name in paths),
        "docstrings that begin with Of, What, Whether or Where": sum(
            map(fragments, trees.values())
        ),
    }


def test_no_figure_rises() -> None:
    found = figures()
    assert {name: value for name, value in found.items() if value > AT_MOST[name]} == {}


def test_no_room_grows() -> None:
    assert {room: n for room, n in code_of_rooms().items() if n > CODE.get(room, 0)} == {}
