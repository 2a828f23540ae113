"""Docstrings name what is there, and the documentation has every public name and page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from launch import ROOT
from test_sizes import modules
from trees import parsed

import sparkdl

SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", re.M)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+)(?: ?\(.*?\))?:", re.M)


def names_of(node: ast.AST, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The parameters of a function; of a class those of ``__init__``, its fields, and its bases'."""
    if isinstance(node, ast.ClassDef):
        names: set[str] = set()
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                names.add(item.target.id)
            elif isinstance(item, ast.Assign):
                names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
            elif isinstance(item, ast.FunctionDef):
                names |= {item.name, *(names_of(item, classes) if item.name == "__init__" else ())}
                names |= {
                    target.attr
                    for assign in ast.walk(item)
                    if isinstance(assign, (ast.Assign, ast.AnnAssign))
                    for each in (
                        assign.targets if isinstance(assign, ast.Assign) else [assign.target]
                    )
                    for target in (each.elts if isinstance(each, ast.Tuple) else [each])
                    if isinstance(target, ast.Attribute)
                }
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return names.union(*(names_of(classes[b], classes) for b in bases if b in classes))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {a.arg for a in [*plain, arguments.vararg, arguments.kwarg] if a is not None}


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements, without the expressions in them."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        yield (node := waiting.pop())
        for field in ("body", "orelse", "finalbody", "handlers"):
            waiting += getattr(node, field, ())


def test_the_names_in_sections_are_there() -> None:
    trees = {name: parsed(path) for name, path in modules().items()}
    nodes = [(name, node) for name, tree in trees.items() for node in statements(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    wrong = []
    for name, node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for _, section in SECTION.findall((ast.get_docstring(node) or "") + "\n"):
                entries = {entry.lstrip("*") for entry in ENTRY.findall(section)}
                unknown = entries - names_of(node, classes)
                wrong += [f"{name}.{node.name}: {each}" for each in sorted(unknown)]
    assert wrong == []


def test_every_public_name_is_in_the_reference() -> None:
    """A page of ``docs/api`` has its docstring; the modules among them have pages of their own."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api/*.md"))
    documented = re.findall(
        r"^\.\. auto(?:class|function):: (sparkdl[\w.]+)(?:\(\))?$", pages, re.M
    )
    elsewhere = {"sparkdl.gang.Communicator"}  # that of sparkdl.collectives
    names = {f"sparkdl.{name}" for name in sparkdl.__all__}
    for module in (".ml", ".tune", ".gang", ".collectives", ".summaries", ".optim", ".mlflow"):
        path = ROOT / f"sparkdl{module.replace('.', '/')}"
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {f"sparkdl{module}.{name}" for name in ast.literal_eval(node.value)}
    modules_of_ours = {name for name in names if (ROOT / name.replace(".", "/")).is_dir()}
    private = {name for name in names if name.rpartition(".")[2].startswith("_")}
    expected = names - modules_of_ours - private - elsewhere - {"sparkdl.optim"}
    assert set(documented) == expected
    assert len(documented) == len(expected)


def test_every_page_is_in_the_contents() -> None:
    listed = (ROOT / "docs/contents.md").read_text(encoding="utf-8").split()
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md"), ROOT / "docs/api/index.md"]
    names = {str(page.relative_to(ROOT).with_suffix("")) for page in pages}
    assert names - {"docs/contents"} == {name for name in listed if "/" in name} - {
        "docs/coming/index",
        "docs/internals/index",
    }
