"""A new part of a known kind is one file or one row: no other module asks which part it has."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import ROOT
from trees import parsed

import sparkdl
from sparkdl.data.columns.base import KINDS
from sparkdl.metrics.named import METRICS, resolve
from sparkdl.metrics.scorer import Scorer
from sparkdl.parallel.plan import STRATEGIES

PATHS = sorted([*(ROOT / "sparkdl").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")])
STRATEGY_ROOMS = ("parallel", "engines/gang/strategies")
"""The rooms that may ask which gang strategy runs."""
STRATEGY_CLASSES = {type(made).__module__: type(made).__name__ for made in STRATEGIES.values()}
STRATEGY_WORDS = {
    *STRATEGIES,
    *(made.word for made in STRATEGIES.values()),
    *(made.dimension for made in STRATEGIES.values() if made.splits_model),
}
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
    found = {str(path): list(asked_types(parsed(path))) for path in PATHS}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_column_type_is_named_in_its_file_and_the_package_alone() -> None:
    """Its file must not name another type either."""
    importers = {
        path.relative_to(ROOT)
        for path in PATHS
        if any(COLUMN_TYPES.get(m) == name for m, name in imports(parsed(path)))
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


def compared_words(tree: ast.AST) -> Iterator[str]:
    """Yield the words for a strategy, or for its dimension, that a module compares with or looks up."""
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            asked = node.args[:1]
        elif isinstance(node, ast.match_case):
            asked = [
                part.value for part in ast.walk(node.pattern) if isinstance(part, ast.MatchValue)
            ]
        for part in (part for one in asked for part in ast.walk(one)):
            if isinstance(part, ast.Constant) and part.value in STRATEGY_WORDS:
                yield part.value


def asked_strategies(tree: ast.AST) -> Iterator[str]:
    """Yield the strategy classes that a module imports, and the words that it compares with."""
    for module, name in imports(tree):
        if STRATEGY_CLASSES.get(module) == name or (
            module == "sparkdl" and name in STRATEGY_CLASSES.values()
        ):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sparkdl":
            yield from {node.attr} & set(STRATEGY_CLASSES.values())
    yield from compared_words(tree)


def test_the_strategy_is_found() -> None:
    text = """
from sparkdl.parallel.fsdp import FSDP, units_of
isinstance(x, sparkdl.Pipeline) or word == "zero1" or x["shard"] or x.get("pipe") or y in ("tensor",)
print("ddp")
"""
    found = sorted(asked_strategies(ast.parse(text)))
    assert found == ["FSDP", "Pipeline", "pipe", "shard", "tensor", "zero1"]


def test_no_module_asks_which_strategy_runs() -> None:
    """Only rooms above ``parallel`` know strategies: "tensor" means other things below it."""
    above = ("loop", "engines", "checkpoint", "infer", "train", "summaries")
    found = {}
    for path in PATHS:
        room = path.relative_to(ROOT).as_posix().removeprefix("sparkdl/")
        if room.startswith((*above, "jobs/")) and not room.startswith(STRATEGY_ROOMS):
            found[room] = list(asked_strategies(parsed(path)))
    assert len(found) > 100
    assert {room: names for room, names in found.items() if names} == {}


def test_a_strategy_is_public_and_in_a_file_of_its_own() -> None:
    assert len(STRATEGY_CLASSES) == len({type(made) for made in STRATEGIES.values()})
    assert set(STRATEGY_CLASSES.values()) <= set(sparkdl.__all__)


def test_the_linter_keeps_strategies_apart() -> None:
    """All but the pipeline, whose stages the others split and shard."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tools["importlinter"]["contracts"]
    (apart,) = (
        c["modules"] for c in contracts if c["name"] == "Strategies do not know one another"
    )
    made = [one for one in STRATEGIES.values() if one.dimension != "pipe"]
    halves = {m for one in made for m in (type(one).__module__, one.rank_half.partition(":")[0])}
    assert set(apart) == halves


def test_planning_imports_nothing_that_only_ranks_need() -> None:
    """Ranks' halves are named by text; checks of torch's version import within functions."""
    for path in (ROOT / "sparkdl/parallel").glob("*.py"):
        top = ast.Module([n for n in parsed(path).body if not is_definition(n)], [])
        assert not [m for m, _ in imports(top) if m.startswith("torch.distributed")], path


def is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)
