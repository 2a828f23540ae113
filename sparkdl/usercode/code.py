"""What the code of a module is, as it is in this process, in a form that other processes compare.

Functions are compared as they are in the process, not as their files say: a file may have changed since
it was loaded.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import inspect
import types
import zipimport
from collections.abc import Iterator, Mapping
from typing import Any


def functions_of(module: types.ModuleType) -> dict[str, str]:
    """A digest of the code of each function that it defines, also in classes; nothing, where an import
    hook changes modules on their way."""
    loader = getattr(module.__spec__, "loader", None)
    plain = (importlib.machinery.SourceFileLoader, zipimport.zipimporter)
    if type(loader) not in plain:
        return {}
    return {
        name: _digest(function.__code__)
        for name, function in _defined(module.__name__, "", vars(module))
    }


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
    """What is behind decorators."""
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
    """It and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def _digest(code: types.CodeType) -> str:
    """Of what the code does, wherever it stands."""
    digest = hashlib.blake2b(digest_size=4)
    for one in codes_in(code):
        constants = [_constant(c) for c in one.co_consts if not isinstance(c, types.CodeType)]
        names = (one.co_names, one.co_varnames, one.co_freevars, one.co_argcount, one.co_flags)
        digest.update(one.co_code)
        digest.update(repr((names, constants)).encode())
    return digest.hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # whose order differs from process to process
        return repr(sorted(map(_constant, value)))
    return repr(value)


def codes_of_file(module: types.ModuleType) -> set[str]:
    """Digests of all functions of its source."""
    try:
        code = compile(inspect.getsource(module), str(module.__file__), "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError):
        return set()
    return {_digest(one) for one in codes_in(code)}
