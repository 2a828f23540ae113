"""Cells of the matrix: the environment of the tests with other versions of some libraries in front.

python tests/matrix/cells.py build spark-3.5     # into .cells/spark-3.5
python tests/matrix/cells.py run spark-3.5 ...   # build it, and run its suite
python tests/matrix/cells.py all                 # every cell; prints a table
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELLS = ROOT / ".cells"
STAND_IN = Path(__file__).with_name("stand_in")
"""The folder of what is imported as torch by a Python that has no small build of it."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
NOT_HERE = 3
"""The exit code of a cell that cannot be built on this machine."""

ENGINES = ("tests/spark/test_engines_agree.py", "tests/faults/test_retry.py")
DOORS = (
    "tests/spark/test_ml.py",
    "tests/spark/test_predict_any.py",
    "tests/spark/test_groups.py",
    "tests/spark/test_data_columns.py",
)
CONNECT = ("tests/spark/test_connect.py",)
WITHOUT_TORCH = ("tests/matrix/test_imports.py",)
SUITE = (*ENGINES, *DOORS, *CONNECT)


@dataclass(frozen=True)
class Cell:
    """Requirements that replace those of the environment, and what runs on them."""

    requirements: tuple[str, ...]
    suite: tuple[str, ...] = SUITE
    python: str = HERE
    """Another version has no torch but a stand-in."""

    @property
    def stamp(self) -> str:
        return "\n".join([self.python, *self.requirements])


MATRIX = {
    "spark-3.5": Cell(("pyspark==3.5.9",)),
    "spark-4.0": Cell(("pyspark==4.0.5",)),
    "spark-4.1": Cell(("pyspark==4.1.4",)),
    "spark-4.2": Cell(("pyspark==4.2.1",)),
    "pandas-3": Cell(("pandas==3.1.1",)),
    "python-3.12": Cell(
        ("numpy==2.4.6", "pandas==2.3.3", "pyarrow==26.0.1", "safetensors==0.8.0"),
        WITHOUT_TORCH,
        "3.12",
    ),
    "python-3.13": Cell(
        ("numpy==2.4.6", "pandas==3.1.1", "pyarrow==26.0.1", "safetensors==0.8.0"),
        WITHOUT_TORCH,
        "3.13",
    ),
}


def build(name: str) -> Path:
    """Return the Python of a cell, which is built where it is not there or has other requirements."""
    cell, folder = MATRIX[name], CELLS / name
    python, stamp = folder / "bin" / "python", folder / "requirements"
    if stamp.exists() and stamp.read_text() == cell.stamp:
        return python
    creator = sys.executable if cell.python == HERE else interpreter(cell.python)
    if creator is None:
        raise LookupError(f"there is no Python {cell.python}")
    subprocess.run([creator, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python{cell.python}" / "site-packages"
    stand_in = [] if cell.python == HERE else [STAND_IN]
    base = Path(sys.prefix, "lib", f"python{HERE}", "site-packages")
    (packages / "base.pth").write_text("\n".join(map(str, [*stand_in, base, ROOT])))
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--target", packages]
    if cell.python != HERE:
        options += ["--python-version", cell.python, "--only-binary", ":all:"]
    subprocess.run([*install, *options, *cell.requirements], check=True)
    stamp.write_text(cell.stamp)
    return python


def interpreter(version: str) -> str | None:
    """Return a Python of this version: of the path, or of pyenv."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    there = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    return there[-1] if there else shutil.which(f"python{version}")


def main() -> None:
    what, *names = sys.argv[1:] or ["all"]
    for name in names:
        print(build(name))


if __name__ == "__main__":
    main()
