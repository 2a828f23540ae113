"""Slabs of a script that runs in a working directory of its own."""

from __future__ import annotations

from pathlib import Path

from harness import processes


def all_slabs() -> list[Path]:
    """Those of executors, or of local mode."""
    return slabs_apart() or sorted(Path("slabs").glob("sparkdl-*"))


def slabs_apart() -> list[Path]:
    """Where each executor keeps its own, in its working directory: roots of those that live, since what
    a killed one kept goes with that."""
    found = sorted(Path.cwd().glob("spark/work/*/*/slabs/sparkdl-*"))
    return [root for root in found if any(map(_lives, root.glob("alive.*")))]


def _lives(mark: Path) -> bool:
    return processes.alive(int(mark.name.split(".")[3]))
