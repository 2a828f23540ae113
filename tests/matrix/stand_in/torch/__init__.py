"""A stand-in for torch, where there is no small build of it: every name in it is an empty class."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "2.13.0"
__path__: list[str] = []


class _Named(abc.ABCMeta):
    """The type of every name: it has any attribute, any item, and may be called."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(f"{cls.__module__}.{cls.__name__}", name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType):
            return arguments[0]  # a decorator
        return (
            super().__call__()
            if cls.__init__ is object.__init__
            else super().__call__(*arguments, **options)
        )


def _attribute(owner: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {"__module__": owner, "__call__": lambda self, function: function})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below this one."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        owner = module.__name__
        module.__getattr__ = lambda name: _attribute(owner, name)  # type: ignore[method-assign]


def __getattr__(name: str) -> Any:
    return _attribute(__name__, name)


sys.meta_path.append(_Submodules())
