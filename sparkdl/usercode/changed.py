"""Constants of the user's modules that were changed in this process after the import.

A module is imported by each process for itself, so a value that is assigned from outside, as in
``mymodule.SCALE = 2``, is not on the executors. What a constant would be there is read from the source:
a number, text, None, or a tuple of these, assigned once to a name of the module or of one of its
classes. Names that the module itself assigns elsewhere, and names that no function uses, are left out.
"""

from __future__ import annotations

import ast
import logging
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkdl.usercode.code import code_behind, codes_in, defined

logger = logging.getLogger("sparkdl")
_told: set[str] = set()


def tell_of_changed_constants(*values: Any) -> None:
    """Warn of constants that are changed here and used by the functions behind ``values``.

    Each change is told once in a process.
    """
    found = code_behind(values, into_modules=True)
    functions = [*found.functions]
    for module in found.modules.values():
        functions += [function for _, function in defined(module)]
    used = {name for function in functions for name in _names_in(function)}
    for module in found.modules.values():
        for name, here, there in _changed(module):
            message = (
                f'"{module.__name__}.{name}" is {here!r} in this process, and {there!r} in '
                f"{module.__file__}, from which the executors import the module: they compute with "
                "the latter. Change it in the file and reload the module, or pass the value as an "
                "argument."
            )
            if name.rpartition(".")[2] in used and message not in _told:
                _told.add(message)
                logger.warning("%s", message)


def _names_in(function: types.FunctionType) -> Iterator[str]:
    for code in codes_in(function.__code__):
        yield from code.co_names


def _changed(module: types.ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """Yield each constant that is changed: its name, its value, and that of the source."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):  # inside an archive, for example
        return
    own = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_stored(n)}
    scopes: list[tuple[str, Sequence[ast.stmt], Any]] = [("", tree.body, module)]
    for node in tree.body:
        kind = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and isinstance(kind, type):
            scopes.append((f"{node.name}.", node.body, kind))
    for prefix, body, owner in scopes:
        for name, there in _constants(body):
            here = vars(owner).get(name)
            if name not in own and _is_constant(here) and repr(here) != repr(there):
                yield prefix + name, here, there


def _constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Yield the names that a scope assigns once, to a constant, and the constants."""
    plain = [n for n in body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names = (n for one in plain for n in ast.walk(one) if isinstance(n, ast.Name) and _is_stored(n))
    times = Counter(name.id for name in names)
    for node in plain:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        try:
            constant = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            continue
        for target in targets if _is_constant(constant) else ():
            if isinstance(target, ast.Name) and times[target.id] == 1:
                yield target.id, constant


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))
