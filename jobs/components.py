"""Models, losses, optimizers and schedules by name: ``module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import sparkdl
from sparkdl import ParameterError
from sparkdl.errors import nearest
from sparkdl.usercode.travel import is_library


@dataclass(frozen=True)
class Component:
    """A callable, given by name, with keyword arguments for it."""

    use: str
    """The name: ``module:name`` or ``path/to/file.py:name``."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(value: Any) -> Component:
        """Read a name, or a mapping with the name under ``use`` and the arguments beside it."""
        if isinstance(value, str):
            return Component(value)
        if _is_named(value):
            odd = [name for name in value if not isinstance(name, str)]
            if odd:  # such as on, which is true in YAML
                raise ParameterError(f"the argument {odd[0]!r} is not text: quote it.")
            return Component(value["use"], {k: v for k, v in value.items() if k != "use"})
        raise ParameterError("give module:name, or a mapping with it under use.")

    def content(self) -> dict[str, Any]:
        """Return the mapping that :meth:`of` reads."""
        return {"use": self.use, **self.arguments}

    def resolve(self) -> Callable[..., Any]:
        """Return the named object with the arguments bound to it. Raises ParameterError.

        An argument that is itself a mapping with ``use`` is resolved too.
        """
        found = find(self.use)
        _check_arguments(self.use, found, self.arguments)
        arguments = {
            name: Component.of(value).resolve() if _is_named(value) else value
            for name, value in self.arguments.items()
        }
        return functools.partial(found, **arguments) if arguments else found

    def make(self) -> Any:
        """Call it and return the result. Raises ParameterError."""
        found = self.resolve()
        try:
            return found()
        except ParameterError:
            raise
        except Exception as error:
            raise ParameterError(
                f'"{self.use}" cannot be made ({type(error).__name__}: {error}).{place_of(error)}'
            ) from error

    def resolve_instance(self) -> Callable[..., Any]:
        """Resolve, and make an instance of a class such as ``torch.nn:CrossEntropyLoss``."""
        found = self.resolve()
        inner = found.func if isinstance(found, functools.partial) else found
        if not isinstance(inner, type):
            return found
        made: Callable[..., Any] = self.make()
        return made

    def is_torch_loss(self) -> bool:
        """Return whether this is a loss of ``torch.nn`` without functions as arguments.

        Such a name cannot run other code."""
        if any(_is_named(value) for value in self.arguments.values()):
            return False
        module, _, name = self.use.partition(":")
        if module == "torch.nn":
            from torch import nn

            found = getattr(nn, name, None)
            return isinstance(found, type) and issubclass(found, nn.Module)
        if module == "torch.nn.functional":
            from torch.nn import functional

            return inspect.isfunction(found := getattr(functional, name, None)) and (
                found.__module__ == module
            )
        return False


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("use"), str)


def find(use: str) -> Any:
    """Return the object that ``use`` names, and prepare its module to travel to the executors.

    Raises :class:`sparkdl.ParameterError`.
    """
    place, _, name = use.rpartition(":")
    if not place or not name:
        module, _, last = use.rpartition(".")
        hint = f' Did you mean "{module}:{last}"?' if module and not use.endswith(".py") else ""
        raise ParameterError(f'"{use}" is not of the form module:name or file.py:name.{hint}')
    module = _import_file(Path(place)) if place.endswith(".py") else _import(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ParameterError(f'"{place}" has no "{part}".{nearest(part, dir(found))}')
        found = getattr(found, part)
    if not callable(found):
        raise ParameterError(f'"{use}" is a {type(found).__name__}, which cannot be called.')
    ship(module.__name__)
    return found


def place_of(cause: BaseException | None) -> str:
    """Return the place in the user's own code that an exception comes from, or "" if it does not."""
    others = [Path(sparkdl.__file__).parent, Path(__file__).parent]
    others += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for frame in reversed(traceback.extract_tb(cause.__traceback__) if cause else ()):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            return f"\n  raised in {path}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def ship(module: str) -> None:
    """Let functions and classes of ``module`` travel by value if it is not installed.

    Executors have what pip installed, wherever it lies, but not the modules of this folder.
    """
    from pyspark import cloudpickle

    package = sys.modules.get(module.partition(".")[0])
    if package is None or package.__name__ == "__main__" or is_library(module):
        return
    if package.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(package)


def import_from_here() -> None:
    """Let modules of the working directory be imported, after all others."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _import(name: str) -> ModuleType:
    import_from_here()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ParameterError(
            f'module "{name}" cannot be imported ({type(error).__name__}: {error}).{place_of(error)}'
        ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name by which it can be imported again from the same directory."""
    path = path.resolve()
    if not path.is_file():
        raise ParameterError(f"there is no file {path}.")
    here = Path.cwd().resolve()
    parts = [path.stem]
    if path.is_relative_to(here):
        inside = path.relative_to(here).with_suffix("").parts
        if all(part.isidentifier() for part in inside):
            parts = list(inside)
    if len(parts) == 1 and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = _import(".".join(parts))
    if not module.__file__ or Path(module.__file__).resolve() != path:
        raise ParameterError(
            f'{path} cannot be imported: another module is named "{module.__name__}". '
            "Give the file another name."
        )
    return module


def _check_arguments(use: str, found: Any, arguments: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ParameterError(
                f'"{use}" takes no argument "{name}".{nearest(name, parameters)} '
                f"It takes: {', '.join(parameters) or 'none'}."
            )
