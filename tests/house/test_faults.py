"""The suite catches what it is there for: each deliberate fault makes a test fail.

It runs on a copy of the package, a fault at a time. What takes longer than a second each is marked
``soak``; without the mark, the table itself is checked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FAULTS
from launch import ROOT


def test_every_fault_can_be_put_in() -> None:
    for name, fault in FAULTS.items():
        text = (ROOT / "sparkdl" / fault.module).read_text()
        assert text.count(fault.text) == 1, name
        assert all((ROOT / "tests" / path).exists() for path in fault.tests.split()), name


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests."""
    folder = tmp_path_factory.mktemp("faults")
    for name in ("sparkdl", "tests", "jobs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(package: Path, name: str) -> None:
    fault = FAULTS[name]
    path = package / "sparkdl" / fault.module
    right = path.read_text()
    path.write_text(right.replace(fault.text, fault.instead))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, *(f"tests/{test}" for test in fault.tests.split())],
            cwd=package,
            env={**os.environ, "PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(right)
    assert run.returncode == 1, run.stdout[-2000:]
