"""Digests of a module's code, as it is in this process, which other processes compare.

They cover the functions in the process, not those in the file, because a file may have changed since it
was loaded.
"""

from __future__ import annotations

import dis
import hashlib
import importlib.machinery
import inspect
import types
import zipimport
from collections.abc import Iterator, Mapping
from typing import Any

_PLACE = ("__firstlineno__", "__static_attributes__")
"""The names that Python notes in a class body from 3.13 on: its line, and what methods assign."""


def functions_of(module: types.ModuleType) -> dict[str, str]:
    """Return a digest of the code of each function that the module defines, also in classes.

    Return nothing if an import hook may have changed the module on import.
    """
    loader = getattr(module.__spec__, "loader", None)
    plain = (importlib.machinery.SourceFileLoader, zipimport.zipimporter)
    if type(loader) not in plain:
        return {}
    return {name: digest_of_code(function.__code__) for name, function in defined(module)}


def defined(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield each function that the module defines, also in classes, with its qualified name."""
    return _defined(module.__name__, "", vars(module))


def _defined(
    module: str, prefix: str, names: Mapping[str, Any]
) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(names.items()):
        for part in _accessors(value):
            function = _unwrapped(part)
            if getattr(function, "__module__", None) != module:
                continue
            if isinstance(function, types.FunctionType):
                yield f"{prefix}{name}", function
            elif isinstance(function, type) and function.__qualname__ == f"{prefix}{name}":
                yield from _defined(module, f"{prefix}{name}.", vars(function))


def _unwrapped(value: Any) -> Any:
    """Return the function or class inside decorators."""
    for _ in range(8):
        inner = getattr(value, "__wrapped__", None)
        if inner is None or isinstance(value, type):
            break
        value = inner
    return value


def _accessors(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return tuple(part for part in (value.fget, value.fset) if part is not None)
    return (value,)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and all code objects inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def digest_of_code(code: types.CodeType) -> str:
    """Return a digest of what the code does, independent of its location."""
    digest = hashlib.blake2b(digest_size=4)
    for one in codes_in(code):
        names = (one.co_names, one.co_varnames, one.co_freevars, one.co_argcount, one.co_flags)
        if _PLACE[0] in one.co_names:
            digest.update(repr((names, _without_place(one))).encode())
            continue
        constants = [_constant(c) for c in one.co_consts if not isinstance(c, types.CodeType)]
        digest.update(one.co_code)
        digest.update(repr((names, constants)).encode())
    return digest.hexdigest()


def _without_place(body: types.CodeType) -> list[tuple[str, str]]:
    """Return the instructions of a class body but for those that store its line (from Python 3.13 on).

    The line may share a constant with the body, so that the numbers of constants depend on it.
    """
    steps = list(dis.get_instructions(body))
    noted = {i for i, step in enumerate(steps) if step.argval in _PLACE}
    return [
        (step.opname, _constant(step.argval))
        for i, step in enumerate(steps)
        if not {i, i + 1} & noted and not isinstance(step.argval, types.CodeType)
    ]


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(map(_constant, value)))
    return repr(value)


def codes_of_file(module: types.ModuleType) -> set[str]:
    """Return the digests of all functions in the module's source."""
    try:
        code = compile(inspect.getsource(module), str(module.__file__), "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError):
        return set()
    return {digest_of_code(one) for one in codes_in(code)}
