"""Components of a configuration: functions and classes by name, with checked arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn import functional

from sparkdl.errors import ParameterError, frames_of_user, nearest
from sparkdl.jobs.config import in_words, new_parser
from sparkdl.usercode.travel import is_library


@dataclass(frozen=True)
class Component:
    """A callable, given by name, with keyword arguments for it."""

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(spec: Any) -> Component:
        """Read a name, or a mapping with ``class_path`` and ``init_args``."""
        if isinstance(spec, str):
            return Component(spec)
        if isinstance(spec, Mapping) and isinstance(spec.get("class_path"), str):
            arguments = dict(spec.get("init_args") or {})
            if odd := [name for name in arguments if not isinstance(name, str)]:
                raise ParameterError(f"the argument {odd[0]!r} is not text: quote it.")
            return Component(spec["class_path"], arguments)
        raise ParameterError("give a name, or a mapping with class_path and init_args.")

    def bound(self) -> Callable[..., Any]:
        """Return the named object with the arguments bound to it. Raises ParameterError."""
        target = find(self.class_path)
        _check_names(self.class_path, target, self.init_args)
        arguments = {
            name: Component.of(value).bound() if _is_component(value) else value
            for name, value in self.init_args.items()
        }
        _check_types(target, self.init_args)
        return functools.partial(target, **arguments) if arguments else target

    def made(self) -> Any:
        """Call it and return the result. Raises ParameterError."""
        target = self.bound()
        try:
            return target()
        except ParameterError:
            raise
        except Exception as error:
            raise ParameterError(
                f"{self.class_path} cannot be made ({type(error).__name__}: {error})."
                f"{place_of(error)}"
            ) from error

    def instance(self) -> Callable[..., Any]:
        """Return an instance of a class such as ``torch.nn.CrossEntropyLoss``, or the function."""
        made: Callable[..., Any] = (
            self.made() if isinstance(find(self.class_path), type) else self.bound()
        )
        return made

    def is_torch_loss(self) -> bool:
        """Return whether this is a loss of ``torch.nn`` without functions as arguments.

        Such a name cannot run other code."""
        if any(_is_component(value) for value in self.init_args.values()):
            return False
        module, name = _split(self.class_path)
        if module == "torch.nn":
            found = getattr(nn, name, None)
            return isinstance(found, type) and issubclass(found, nn.Module)
        function = getattr(functional, name, None) if module == "torch.nn.functional" else None
        return inspect.isfunction(function) and function.__module__ == module


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("class_path"), str)


def _split(path: str) -> tuple[str, str]:
    """Return the two parts of ``module.name``, ``module:name`` or ``file.py:name``."""
    place, _, name = path.rpartition(":" if ":" in path else ".")
    if not place or not name or path.endswith(".py"):
        raise ParameterError(f'"{path}" is not of the form module.name or path/to/file.py:name.')
    return place, name


def find(path: str) -> Any:
    """Return the callable that ``path`` names, and prepare its module to travel to the executors.

    Raises ParameterError.
    """
    place, name = _split(path)
    module = _import_file(Path(place)) if place.endswith(".py") else _import(place)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            raise ParameterError(f'"{place}" has no "{part}".{nearest(part, dir(target))}')
        target = getattr(target, part)
    if not callable(target):
        raise ParameterError(f'"{path}" is a {type(target).__name__}, which cannot be called.')
    ship(module.__name__)
    return target


def ship(module: str) -> None:
    """Let functions and classes of ``module`` travel by value if it is not installed."""
    from pyspark import cloudpickle

    package = sys.modules.get(module.partition(".")[0])
    if package is None or package.__name__ == "__main__" or is_library(module):
        return
    if package.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(package)


def import_from_here() -> None:
    """Let modules of the working directory be imported, after all others."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def _import(name: str) -> ModuleType:
    import_from_here()
    try:
        return importlib.import_module(name)
    except Exception as error:
        told = f'module "{name}" cannot be imported ({type(error).__name__}: {error}).'
        raise ParameterError(told + place_of(error)) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name by which it can be imported again from the same directory."""
    path = path.resolve()
    if not path.is_file():
        raise ParameterError(f"there is no file {path}.")
    here = Path.cwd().resolve()
    inside = path.relative_to(here).with_suffix("").parts if path.is_relative_to(here) else ()
    parts = inside if inside and all(map(str.isidentifier, inside)) else (path.stem,)
    if len(parts) == 1 and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = _import(".".join(parts))
    if not module.__file__ or Path(module.__file__).resolve() != path:
        raise ParameterError(
            f'{path} cannot be imported: another module is named "{module.__name__}". '
            "Give the file another name."
        )
    return module


def _check_names(path: str, target: Any, arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            raise ParameterError(
                f'{path} takes no argument "{name}".{nearest(name, parameters)} '
                f"It takes: {', '.join(parameters) or 'none'}."
            )


def _check_types(target: Any, arguments: Mapping[str, Any]) -> None:
    """Compare values with the types in the signature, as far as the parser knows these types."""
    from jsonargparse import ArgumentError

    try:
        hints = typing.get_type_hints(
            vars(target)["__init__"] if isinstance(target, type) else target
        )
    except Exception:  # names that only a type checker knows
        return
    for name, value in arguments.items():
        if name not in hints or _is_component(value):
            continue
        parser = new_parser()
        try:
            parser.add_argument(f"--{name}", type=hints[name])
        except ValueError:
            continue
        try:
            parser.parse_object({name: value})
        except ArgumentError:
            wanted = in_words(hints[name])
            raise ParameterError(f"{name}: give {wanted}, not {value!r}.") from None


def place_of(cause: BaseException | None) -> str:
    """Return the last line of the user's own code that an exception comes from, or ""."""
    lines = [] if cause is None else frames_of_user(cause).splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=None)
    return "" if last is None else "\n" + "\n".join(lines[last : last + 2])
