"""Values that are sent to other processes together with a list of the user's modules behind them.

Digests of a module's code, which other processes compare, cover the functions in this process, not
those in the file, because a file may have changed since it was loaded. :func:`modules_behind` finds
the user's modules behind a value.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import importlib.machinery
import inspect
import os
import re
import secrets
import sys
import sysconfig
import types
import zipimport
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import FileFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from torch import nn

from sparkdl.errors import ModelError

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


_LIBRARIES = ("site-packages", "dist-packages")
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_CLOSED = {"torch", "numpy", "pandas", "pyarrow", "pyspark", "py4j"}
"""Packages whose objects hold none of the user's functions."""
_LIBRARY_NAMES = _CLOSED | {"sparkdl", "safetensors", "tqdm", "builtins"}
_MOST = 10_000
"""Containers longer than this hold data and are not searched."""
_ENOUGH = 200_000
"""The most values that are visited."""


def modules_behind(
    values: Iterable[Any], into_modules: bool = False
) -> dict[str, types.ModuleType]:
    """Return the user's modules behind ``values``, by name.

    With ``into_modules``, also find the modules behind modules, and those that functions import.
    """
    found: dict[str, types.ModuleType] = {}
    todo, seen = list(values), dict[int, Any]()
    while todo and len(seen) < _ENOUGH:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, types.ModuleType):
            if is_own(value):
                found[value.__name__] = value
                todo += _names_of(value) if into_modules else ()
        else:
            todo += _behind(value, into_modules)
    return found


def _behind(value: Any, imports: bool) -> Iterator[Any]:
    """Yield the values and modules that ``value`` refers to."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        if _goes_by_name(value):
            yield sys.modules[value.__module__]
        else:
            yield from globals_of(value, imports)
    elif isinstance(value, type):
        for kind in value.__mro__:
            if _goes_by_name(kind):
                yield sys.modules[kind.__module__]
            else:
                yield from vars(kind).values()
    elif isinstance(value, nn.Module):
        yield from {type(child) for child in value.modules()}
    elif isinstance(value, Mapping):
        yield from value.values() if len(value) <= _MOST else ()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value if len(value) <= _MOST else ()
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif value is not None:
        kind = type(value)
        yield kind
        if kind.__module__.partition(".")[0] not in _CLOSED:
            yield from getattr(value, "__dict__", {}).values()


def _goes_by_name(value: types.FunctionType | type) -> bool:
    """Return whether the value is pickled by name, that is, looked up in its module on arrival."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or _by_value(module):
        return False
    if isinstance(value, type) and not is_own(module):
        return True
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def globals_of(function: types.FunctionType, imports: bool = False) -> Iterator[Any]:
    """Yield what a function that travels by value refers to.

    These are its closure, its defaults, the globals that its code names and, with ``imports``, the
    modules that it imports when it runs.
    """
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue
    yield from function.__defaults__ or ()
    for code in codes_in(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _GLOBALS and step.argval in function.__globals__:
                yield function.__globals__[step.argval]
            elif imports and step.opname == "IMPORT_NAME":
                yield sys.modules.get(step.argval)


def _names_of(module: types.ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            yield value
        elif isinstance(value, (type, types.FunctionType)) and value.__module__ in sys.modules:
            yield sys.modules[value.__module__]


def _by_value(module: types.ModuleType) -> bool:
    """Return whether definitions of this module travel by value."""
    if module.__name__ == "__main__":
        return True
    pickler = sys.modules.get("pyspark.cloudpickle.cloudpickle")
    registered = getattr(pickler, "_PICKLE_BY_VALUE_MODULES", ())
    parts = module.__name__.split(".")
    return any(".".join(parts[: n + 1]) in registered for n in range(len(parts)))


def is_own(module: types.ModuleType) -> bool:
    """Return whether the module is one of the user's own files and travels by name."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or name == "__main__" or is_library(name):
        return False
    return not _by_value(module) and sys.modules.get(name) is module


def is_library(name: str | None) -> bool:
    """Return whether the module of this name is not one of the user's."""
    top = (name or "").partition(".")[0]
    if top in _LIBRARY_NAMES or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    if not file or name == "__main__":  # a library may have started the program
        return False
    inside = any(part in _LIBRARIES for part in Path(file).parts)
    return (
        inside or file.startswith(_library_folders()) or top in _installed_beside(name or "", file)
    )


def _installed_beside(name: str, file: str) -> frozenset[str]:
    """Return the modules that pip installed into the folder from which this one was imported."""
    path = Path(os.path.abspath(file))
    levels = name.count(".") + (path.stem == "__init__")
    return _installed_in(str(path.parents[min(levels, len(path.parents) - 1)]))


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    records = [one.read_text("RECORD") for one in distributions(path=[folder])]
    lines = (line for record in records if record for line in record.splitlines())
    return frozenset(re.split("[/,]", line)[0].removesuffix(".py") for line in lines)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(
        f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


_PROCESS = secrets.token_hex(8)
"""Identifies this process, which has its modules."""
_loads: dict[str, tuple[Any, int]] = {}
"""On the driver: how often each module was loaded."""
_right: dict[str, tuple[types.ModuleType, tuple[int, int] | None, OwnModule]] = {}
"""The modules that passed the check in this worker, each with its file's state then and the driver's
record."""


def _begin_process() -> None:
    """Give a forked process, such as a Python worker, an identity of its own: it may import others."""
    global _PROCESS
    _PROCESS = secrets.token_hex(8)


os.register_at_fork(after_in_child=_begin_process)


@dataclass(frozen=True)
class OwnModule:
    """A module of the user's in the driver's process."""

    name: str
    file: str
    folder: str  # on the driver's path, from which it was imported
    needed: bool  # by the value itself, not only by another module
    functions: Mapping[str, str]  # digests; {} if it is unknown how it was loaded
    loaded: int  # how often it was seen to be loaded


@dataclass(frozen=True)
class OwnModules:
    """The user's modules behind a value; unpickling it calls :func:`arrive`."""

    process: str
    version: tuple[int, ...]
    modules: tuple[OwnModule, ...]

    @staticmethod
    def behind(value: Any) -> OwnModules:
        """Find the modules: follow the user's functions, classes, containers and modules."""
        needed = modules_behind([value])
        every = modules_behind([value], into_modules=True)
        modules = tuple(_own(every[name], name in needed) for name in sorted(every))
        return OwnModules(_PROCESS, tuple(sys.version_info[:3]), modules)

    def __reduce__(self) -> Any:
        return arrive, (self.process, self.version, self.modules)


def arrive(process: str, version: tuple[int, ...], modules: tuple[OwnModule, ...]) -> OwnModules:
    """Check, on unpickling, that the user's modules are there and equal to those of ``process``."""
    arrived = OwnModules(process, version, modules)
    if process == _PROCESS:
        return arrived
    # another version may compile the same code differently
    comparable = version == tuple(sys.version_info[:3])
    loaded = [own for own in modules if own.name in sys.modules]
    if any(_is_stale(own, comparable) for own in loaded):
        for own in loaded:
            del sys.modules[own.name]
    missing = [own for own in modules if own.needed and own.name not in sys.modules]
    if missing:
        _forget_folders()
    for own in missing:
        if own.name not in sys.modules:  # another one may have imported it
            _import(own)
    for own in modules:
        module = sys.modules.get(own.name)
        if module is not None:
            if comparable and not _is_right(own, module):
                _check(own, module)
            _right[own.name] = module, _file_state(module), own
    return arrived


class Accompanied:
    """A wrapper that unpickles as the wrapped value, once the user's modules behind it are checked."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *arguments: Any) -> Any:
        """Call the value; PySpark requires that it is callable."""
        return self.value(*arguments)

    def __reduce__(self) -> Any:
        # pickle restores the first argument first, so modules are checked before the value is loaded
        return _second, (OwnModules.behind(self.value), self.value)


def accompanied(value: Any) -> Any:
    """Wrap ``value`` for pickling to other processes; unpickling the wrapper returns ``value``."""
    return Accompanied(value)


def _second(modules: OwnModules, value: Any) -> Any:
    return value


def _forget_folders() -> None:
    """Let the next import see files that are new in the folders of the path.

    ``importlib.invalidate_caches`` would also read the list of every archive on the path again:
    half a second for PySpark's.
    """
    for finder in list(sys.path_importer_cache.values()):
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()


def _own(module: types.ModuleType, needed: bool) -> OwnModule:
    file = os.path.abspath(str(module.__file__))
    levels = module.__name__.count(".") + (Path(file).name == "__init__.py")
    folder = str(Path(file).parents[levels])
    functions, loaded = functions_of(module), _times_loaded(module)
    return OwnModule(module.__name__, file, folder, needed, functions, loaded)


def _times_loaded(module: types.ModuleType) -> int:
    """Return a number that changes when the module is loaded again, which gives it a new spec."""
    before, times = _loads.get(module.__name__, (None, 0))
    if before is not module.__spec__:
        times += 1
        _loads[module.__name__] = module.__spec__, times
    return times


def _is_stale(own: OwnModule, comparable: bool) -> bool:
    """Return whether this process's copy of the module must be imported again.

    It must be if it never passed the check, or if the driver has loaded it again and it has changed.
    """
    module = sys.modules[own.name]
    known = _right.get(own.name)
    if known is None or known[0] is not module:
        return True
    if known[2] == own:  # whatever happens to the file: it may be edited during a fit
        return False
    changed = comparable and _differing(own, functions_of(module))
    return bool(changed) or known[1] != _file_state(module)


def _is_right(own: OwnModule, module: types.ModuleType) -> bool:
    """Return whether this module passed the check against the same record before."""
    known = _right.get(own.name)
    return known is not None and known[0] is module and known[2] == own


def _file_state(module: types.ModuleType) -> tuple[int, int] | None:
    try:
        found = os.stat(str(module.__file__))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _differing(own: OwnModule, functions: Mapping[str, str]) -> list[str]:
    """Return the driver's functions that differ here."""
    return [name for name, digest in own.functions.items() if functions.get(name) != digest]


def _import(own: OwnModule) -> None:
    try:
        _import_from(own)
    except ModuleNotFoundError as error:
        raise ModelError(_missing(own, error.name)) from None
    except Exception as error:
        raise ModelError(
            f'the executors cannot import "{own.name}", which is {own.file} at the driver: '
            f"{type(error).__name__}: {error}"
        ) from error


def _import_from(own: OwnModule) -> None:
    try:
        importlib.import_module(own.name)
    except ModuleNotFoundError:
        # it may be on this disk too, as in local mode or on a disk that nodes share
        if own.folder in sys.path or not os.path.exists(own.file):
            raise
        sys.path.append(own.folder)
        importlib.import_module(own.name)


def _missing(own: OwnModule, name: str | None) -> str:
    """Return the message for a missing module ``name``, which may be one that ``own`` imports."""
    if name is not None and not f"{own.name}.".startswith(f"{name}."):
        return (
            f'the executors cannot import "{own.name}": it needs "{name}", which they do not have. '
            f"{REMEDY}"
        )
    alone = "." not in own.name and Path(own.file).name != "__init__.py"
    ship = own.file if alone else f"{own.name.partition('.')[0]}.zip"
    return (
        f'the executors cannot import "{own.name}", which is {own.file} at the driver. Ship it: '
        f'spark.sparkContext.addPyFile("{ship}"), or spark-submit --py-files {ship}, or with Spark '
        f'Connect spark.addArtifacts("{ship}", pyfile=True); see docs/guide/packaging.md.'
    )


def model_needs(error: ModuleNotFoundError, where: str) -> ModelError:
    """Return the error to raise if the model cannot be built because a module is missing."""
    return ModelError(f"model() fails on {where}: {error}. {REMEDY}")


def _check(own: OwnModule, module: types.ModuleType) -> None:
    """Raise :class:`sparkdl.ModelError` if the module differs from the driver's."""
    functions = functions_of(module)
    if not own.functions or not functions:
        return
    differing = _differing(own, functions)
    if differing:  # there may be several definitions in the file, as under an `if`
        in_file = codes_of_file(module)
        differing = [name for name in differing if own.functions[name] not in in_file]
    if differing:
        raise ModelError(
            f'the executors have other code for "{own.name}" than this process: {differing[0]} '
            f"differs, between {own.file} as it was loaded here and {module.__file__} there. If "
            "the file was edited, reload it here (importlib.reload) or restart, and ship it again "
            "(spark.sparkContext.addPyFile, spark.addArtifacts). The executors do not see what was "
            "replaced in the running process: define it in the script or notebook itself, whose code "
            "is sent along."
        )


REMEDY = (
    "Install it there, or ship it: your own modules with spark.sparkContext.addPyFile, "
    "spark-submit --py-files or, with Spark Connect, spark.addArtifacts(file, pyfile=True); "
    "everything else with --archives; see docs/guide/packaging.md."
)
"""The advice for a module that the executors do not have."""
