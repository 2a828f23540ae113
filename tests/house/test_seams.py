"""A new part of a known kind is one file or one row: no other module asks which part it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import ROOT

import sparkdl
from sparkdl.data.columns.base import KINDS
from sparkdl.metrics.named import METRICS, resolve
from sparkdl.metrics.scorer import Scorer

PATHS = sorted([*(ROOT / "sparkdl").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")])
COLUMN_TYPES = {
    kind.__module__: kind.__name__
    for kind in KINDS.values()
    if kind.__module__.startswith("sparkdl.")
}
"""The name of each column type by its module."""


def is_column_type(module: str, name: str) -> bool:
    """Return whether this module defines or exports a column type of this name."""
    return COLUMN_TYPES.get(module) == name or (
        module == "sparkdl" and name in COLUMN_TYPES.values()
    )


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a module imports from others: their names, and the names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def asked_types(tree: ast.AST) -> Iterator[str]:
    """Yield the names of column types in the second argument of ``isinstance`` and ``issubclass``."""
    own = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if is_column_type(node.module, alias.name)
    }
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("isinstance", "issubclass"):
            for part in ast.walk(node.args[1]):
                if isinstance(part, ast.Name) and part.id in own:
                    yield own[part.id]
                elif isinstance(part, ast.Attribute) and is_column_type(
                    ast.unparse(part.value), part.attr
                ):
                    yield part.attr


def test_the_question_is_found() -> None:
    text = """
from collections.abc import Sequence
from sparkdl.data.columns.sequence import Sequence as Varying
isinstance(x, Sequence) or isinstance(x, (int, Varying)) or issubclass(x, sparkdl.Image | str)
"""
    assert sorted(asked_types(ast.parse(text))) == ["Image", "Sequence"]


def test_no_module_asks_for_a_column_type() -> None:
    assert len(COLUMN_TYPES) >= 3
    found = {str(path): list(asked_types(ast.parse(path.read_text()))) for path in PATHS}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_column_type_is_named_in_its_file_and_the_package_alone() -> None:
    """Its file must not name another type either."""
    importers = {
        path.relative_to(ROOT)
        for path in PATHS
        if any(COLUMN_TYPES.get(m) == name for m, name in imports(ast.parse(path.read_text())))
    }
    assert importers == {Path("sparkdl/__init__.py")}
    assert set(COLUMN_TYPES.values()) <= set(sparkdl.__all__)


class Within(sparkdl.Metric):
    """A metric that is no mean: how many predictions are off by at most ``far``."""

    def __init__(self, name: str, k: int) -> None:
        self.name, self._far = name, k

    def start(self) -> int:
        return 0

    def update(self, state: int, output: torch.Tensor, target: torch.Tensor) -> int:
        return state + int(((output - target).abs() <= self._far).sum())

    def merge(self, one: int, other: int) -> int:
        return one + other

    def value(self, state: int) -> float:
        return float(state)


def test_a_metric_by_name_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "within@k", Within)
    output, target = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 3.0, 9.0])
    scorer = Scorer(None, tuple(resolve(["mse", "within@2"])))
    halves = [scorer.update(scorer.start(), output[i::2], [target[i::2]]) for i in range(2)]
    assert scorer.values(scorer.merge(halves))["within@2"] == 2.0
    with pytest.raises(sparkdl.ParameterError, match=r'Did you mean "within@k"\? .*, within@k, or'):
        resolve(["withn@3"])
