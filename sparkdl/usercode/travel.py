"""A value that is sent to other processes, and the user's modules behind it."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.errors import ModelError
from sparkdl.usercode.behind import modules_behind
from sparkdl.usercode.code import codes_of_file, functions_of

_PROCESS = secrets.token_hex(8)
"""Of this process and those forked from it, which have its modules."""
_loads: dict[str, tuple[Any, int]] = {}
"""At the driver: how often modules were loaded."""
_right: dict[str, tuple[types.ModuleType, tuple[int, int] | None, OwnModule]] = {}
"""In a worker: modules that were found right, their files' state then, and what the driver had."""


@dataclass(frozen=True)
class OwnModule:
    """A module of the user's in the driver's process.

    ``file``: there; ``folder``: on the driver's path, from where it was imported. ``needed``: by the
    value itself, not only by another module. ``functions``: digests by name, empty where how the module
    was loaded is not known. ``loaded``: how often it was loaded, as far as was seen.
    """

    name: str
    file: str
    folder: str
    needed: bool
    functions: Mapping[str, str]
    loaded: int


@dataclass(frozen=True)
class OwnModules:
    """Those behind a value, by name; where they arrive, see :func:`arrive`."""

    process: str
    version: tuple[int, ...]
    modules: tuple[OwnModule, ...]

    @staticmethod
    def behind(value: Any) -> OwnModules:
        """Follows functions, classes, containers and modules, as far as they are the user's."""
        needed = modules_behind([value])
        every = modules_behind([value], into_modules=True)
        modules = tuple(_own(every[name], name in needed) for name in sorted(every))
        return OwnModules(_PROCESS, tuple(sys.version_info[:3]), modules)

    def __reduce__(self) -> Any:
        return arrive, (self.process, self.version, self.modules)


def arrive(process: str, version: tuple[int, ...], modules: tuple[OwnModule, ...]) -> OwnModules:
    """Where it is unpickled: see to it that the modules are there, and what they were at the driver.

    Raises :class:`sparkdl.ModelError` where they cannot be.
    """
    arrived = OwnModules(process, version, modules)
    if process == _PROCESS:
        return arrived
    # another version may compile the same code otherwise
    comparable = version == tuple(sys.version_info[:3])
    loaded = [own for own in modules if own.name in sys.modules]
    if any(_is_stale(own, comparable) for own in loaded):
        for own in loaded:
            del sys.modules[own.name]
    importlib.invalidate_caches()
    for own in modules:
        if own.needed and own.name not in sys.modules:
            _import(own)
    for own in modules:
        module = sys.modules.get(own.name)
        if module is not None:
            if comparable and not _is_right(own, module):
                _check(own, module)
            _right[own.name] = module, _file_state(module), own
    return arrived


class Accompanied:
    """A value that is itself where it arrives, after the user's modules behind it were seen to."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *arguments: Any) -> Any:
        """As the value, of which PySpark asks that it can be called."""
        return self.value(*arguments)

    def __reduce__(self) -> Any:
        # what is first here is unpickled first
        return _second, (OwnModules.behind(self.value), self.value)


def accompanied(value: Any) -> Any:
    """``value`` in a form to be pickled for other processes, of which unpickling makes ``value``."""
    return Accompanied(value)


def _second(modules: OwnModules, value: Any) -> Any:
    return value


def _own(module: types.ModuleType, needed: bool) -> OwnModule:
    file = os.path.abspath(str(module.__file__))
    levels = module.__name__.count(".") + (Path(file).name == "__init__.py")
    folder = str(Path(file).parents[levels])
    functions, loaded = functions_of(module), _times_loaded(module)
    return OwnModule(module.__name__, file, folder, needed, functions, loaded)


def _times_loaded(module: types.ModuleType) -> int:
    """A number that differs after it was loaded again: that gives it another specification."""
    before, times = _loads.get(module.__name__, (None, 0))
    if before is not module.__spec__:
        times += 1
        _loads[module.__name__] = module.__spec__, times
    return times


def _is_stale(own: OwnModule, comparable: bool) -> bool:
    """Whether the module as this process has it is to be imported anew: it was never seen to be right,
    or the driver has loaded it again since and it has changed."""
    module = sys.modules[own.name]
    known = _right.get(own.name)
    if known is None or known[0] is not module:
        return True
    if known[2] == own:  # whatever became of the file, which may be edited while a fit runs
        return False
    changed = comparable and _differing(own, functions_of(module))
    return bool(changed) or known[1] != _file_state(module)


def _is_right(own: OwnModule, module: types.ModuleType) -> bool:
    """Whether just this was found before."""
    known = _right.get(own.name)
    return known is not None and known[0] is module and known[2] == own


def _file_state(module: types.ModuleType) -> tuple[int, int] | None:
    try:
        found = os.stat(str(module.__file__))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _differing(own: OwnModule, functions: Mapping[str, str]) -> list[str]:
    """The driver's functions that are not the same here."""
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
        # on this disk too, as in local mode, or on one that nodes share
        if own.folder in sys.path or not os.path.exists(own.file):
            raise
        sys.path.append(own.folder)
        importlib.import_module(own.name)


def _missing(own: OwnModule, name: str | None) -> str:
    """``name``: of the module that was not found; it may be one that ``own`` imports."""
    if name is not None and not f"{own.name}.".startswith(f"{name}."):
        return (
            f'the executors cannot import "{own.name}": it needs "{name}", which they do not have. '
            f"{REMEDY}"
        )
    alone = "." not in own.name and Path(own.file).name != "__init__.py"
    ship = own.file if alone else f"{own.name.partition('.')[0]}.zip"
    return (
        f'the executors cannot import "{own.name}", which is {own.file} at the driver. Ship it: '
        f'spark.sparkContext.addPyFile("{ship}"), or spark-submit --py-files {ship}; see '
        "docs/guide/packaging.md."
    )


def model_needs(error: ModuleNotFoundError, where: str) -> ModelError:
    """Return what to raise where the model cannot be built for want of a module.

    Args:
        error: What building it came to.
        where: Which processes lack the module: "the executors", "the ranks".
    """
    return ModelError(f"model() fails on {where}: {error}. {REMEDY}")


def _check(own: OwnModule, module: types.ModuleType) -> None:
    """Raise :class:`sparkdl.ModelError` where the module is not the driver's."""
    functions = functions_of(module)
    if not own.functions or not functions:
        return
    differing = _differing(own, functions)
    if differing:  # one of several definitions, as by an `if`, may have been chosen here
        in_file = codes_of_file(module)
        differing = [name for name in differing if own.functions[name] not in in_file]
    if differing:
        raise ModelError(
            f'the executors have other code for "{own.name}" than this process: {differing[0]} '
            f"differs, between {own.file} as it was loaded here and {module.__file__} there. If the "
            "file was edited, reload it here (importlib.reload) or start anew, and ship it again "
            "(spark.sparkContext.addPyFile). What was replaced in the running process executors do not "
            "know: define it in the script or notebook itself, which travels by value."
        )


REMEDY = (
    "Install it there, or ship it: your own modules with spark.sparkContext.addPyFile or spark-submit "
    "--py-files, all else with --archives; see docs/guide/packaging.md."
)
"""For a module that the executors do not have."""
