"""Sizes of the package: figures that may fall and not rise. Lower a figure here when it has fallen."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from launch import ROOT

PACKAGE = ROOT / "sparkdl"
AT_MOST = {
    "modules": 375,
    "lines": 64_820,
    "modules of more than 300 lines": 2,
    "lines of the longest module": 445,
    "percent of lines in the largest room": 19,
    "modules with a single importer": 70,
    "docstrings that begin with Of, What, Whether or Where": 0,
}


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
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return sum(text.split(" ")[0] in ("Of", "What", "Whether", "Where") for text in found)


def figures() -> dict[str, float]:
    paths = modules()
    texts = {name: path.read_text() for name, path in paths.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    rooms: Counter[str] = Counter()
    for name, number in lines.items():
        rooms[name.split(".")[1]] += number
    importers = Counter(other for tree in trees.values() for other in imported(tree, set(paths)))
    total = sum(lines.values())
    return {
        "modules": len(paths),
        "lines": total,
        "modules of more than 300 lines": sum(number > 300 for number in lines.values()),
        "lines of the longest module": max(lines.values()),
        "percent of lines in the largest room": round(100 * max(rooms.values()) / total),
        "modules with a single importer": sum(importers[name] == 1 for name in paths),
        "docstrings that begin with Of, What, Whether or Where": sum(
            map(fragments, trees.values())
        ),
    }


def test_no_figure_rises() -> None:
    found = figures()
    assert {name: value for name, value in found.items() if value > AT_MOST[name]} == {}
