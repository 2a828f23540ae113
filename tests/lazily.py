"""Libraries that take seconds to import, which few of the files that each process reads make use of."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest


class Lazily:
    """A module that is imported with its first use; without the library the file is skipped."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"needs {name}", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return importlib.import_module, (self._name,)
