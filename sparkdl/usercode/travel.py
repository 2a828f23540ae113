"""Values that are sent to other processes together with a list of the user's modules behind them."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any

from sparkdl.errors import ModelError
from sparkdl.usercode.code import codes_of_file, functions_of, modules_behind

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
