"""Every module of the package can be imported, also where torch is a stand-in."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import sparkdl

MODULES = [one.name for one in pkgutil.walk_packages(sparkdl.__path__, "sparkdl.")]


@pytest.mark.parametrize("room", sorted({name.split(".")[1] for name in MODULES} - {"__main__"}))
def test_every_module_can_be_imported(room: str) -> None:
    for name in MODULES:
        if name.split(".")[1] == room:
            importlib.import_module(name)
