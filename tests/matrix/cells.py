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
ENGINES = ("tests/spark/test_engines_agree.py", "tests/faults/test_retry.py")
DOORS = (
    "tests/spark/test_ml.py",
    "tests/spark/test_predict_any.py",
    "tests/spark/test_groups.py",
    "tests/spark/test_data_columns.py",
)
CONNECT = ("tests/spark/test_connect.py",)
SUITE = (*ENGINES, *DOORS, *CONNECT)
WITHOUT_TORCH = (
    "tests/matrix/test_imports.py",
    *(f"tests/unit/data/test_{name}.py" for name in ("order", "partition", "records", "schema")),
    "tests/unit/checkpoint/test_checkpoint_files.py",
    "tests/unit/loop/test_triggers.py",
    "tests/unit/project/test_settings.py",
    "tests/unit/slab/test_pool.py",
    "tests/unit/spark/test_compat.py",
    "tests/unit/usercode/test_usercode.py",
    *(f"tests/spark/test_{name}.py" for name in ("frames", "given_up", "locality", "watch")),
)
LIBRARIES = ("numpy==2.4.6", "pyarrow==26.0.1", "safetensors==0.8.0", "pillow==13.0.0")
"""What a Python of another version needs of its own, beside pandas: libraries with compiled parts."""


@dataclass(frozen=True)
class Cell:
    """Requirements that replace those of the environment, and what runs on them."""

    requirements: tuple[str, ...]
    suite: tuple[str, ...] = SUITE
    python: str = HERE
    """Another version than that of the environment has a stand-in for torch."""
    forks: bool = True
    """Programs of tests are forks. Below pyarrow 15 a fork crashes after its last line."""

    @property
    def stamp(self) -> str:
        return "\n".join([self.python, *self.requirements])


VERSIONS = {
    "spark-3.5": Cell(("pyspark==3.5.9",), (*ENGINES, *DOORS)),
    "spark-4.0": Cell(("pyspark==4.0.5",)),
    "spark-4.1": Cell(("pyspark==4.1.4",)),
    "spark-4.2": Cell(("pyspark==4.2.1",)),
}
MATRIX = {
    **VERSIONS,
    "oldest": Cell(
        ("pyspark==3.5.0", "pyarrow==14.0.0", "pandas==2.2.0", "numpy==1.26.0"),
        (*ENGINES, *DOORS),
        forks=False,
    ),
    "oldest-4.3": Cell(("pyarrow==18.0.0", "pandas==2.2.0", "numpy==1.26.0")),
    "pandas-3": Cell(("pandas==3.1.1",)),
    "python-3.12": Cell(
        (*LIBRARIES, "pandas==2.3.3", "hypothesis==6.170.15"), WITHOUT_TORCH, "3.12"
    ),
    "python-3.13": Cell(
        (*LIBRARIES, "pandas==3.1.1", "hypothesis==6.170.15"), WITHOUT_TORCH, "3.13"
    ),
}


def build(name: str) -> Path:
    """Return the Python of a cell, which is built where it is not there or has other requirements.

    Raises LookupError where this machine has no such Python.
    """
    cell, folder = MATRIX[name], CELLS / name
    python, stamp = folder / "bin" / "python", folder / "requirements"
    if stamp.exists() and stamp.read_text() == cell.stamp:
        return python
    creator = sys.executable if cell.python == HERE else interpreter(cell.python)
    if creator is None:
        raise LookupError(f"there is no Python {cell.python} here")
    subprocess.run([creator, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python{cell.python}" / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--target", packages]
    before = []
    if cell.python != HERE:
        options += ["--python-version", cell.python, "--only-binary", ":all:"]
        before = [STAND_IN]
    base = Path(sys.prefix, "lib", f"python{HERE}", "site-packages")
    (packages / "base.pth").write_text("\n".join(map(str, [*before, base, ROOT])))
    subprocess.run([*install, *options, *cell.requirements], check=True)
    stamp.write_text(cell.stamp)
    return python


def interpreter(version: str) -> str | None:
    """Return a Python of this version: one of pyenv's, or of the path."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    there = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))
    return there[-1] if there else shutil.which(f"python{version}")


def environment(python: Path, forks: bool = True) -> dict[str, str]:
    """The variables with which programs run in a cell."""
    names = ("SPARK_HOME", "SPARK_CONF_DIR", "PYTHONPATH", "PYSPARK_DRIVER_PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    if not forks:
        fresh = python.with_name("fresh")
        if not fresh.exists():
            fresh.symlink_to("python")
        kept["SPARKDL_TESTS_WITHOUT_FORKS"] = str(python.parent)
    return {
        **kept,
        "PYSPARK_PYTHON": str(python),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def run(name: str, *options: str) -> tuple[int, str]:
    """Run the suite of a cell; return pytest's exit code, and its last line."""
    python = build(name)
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *MATRIX[name].suite, *options],
        cwd=ROOT,
        env=environment(python, MATRIX[name].forks),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines() or [done.stderr]
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-4_000:])
    return done.returncode, lines[-1].strip("= ")


def main() -> None:
    what, *names = sys.argv[1:] or ["all"]
    if what == "build":
        for name in names:
            print(build(name))
        return
    options = [one for one in names if one.startswith("-")]
    failed = 0
    for name in [one for one in names if one in MATRIX] or MATRIX:
        cell, began = MATRIX[name], time.monotonic()
        try:
            code, last = run(name, *options)
        except LookupError as error:
            code, last = 0, f"not run: {error}"
        failed += code != 0
        seconds = time.monotonic() - began
        print(f"| {name} | {', '.join(cell.requirements)} | {last} | {seconds:.0f} s |", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
