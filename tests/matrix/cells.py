"""Cells of the matrix: the environment of the tests with other versions of some libraries in front.

python tests/matrix/cells.py build spark-3.5     # into .cells/spark-3.5
python tests/matrix/cells.py run spark-3.5 ...   # build it, and run its suite
python tests/matrix/cells.py all                 # every cell; prints a table
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CELLS = ROOT / ".cells"
PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


@dataclass(frozen=True)
class Cell:
    """Requirements that replace those of the environment, and what runs on them."""

    requirements: tuple[str, ...]
    suite: tuple[str, ...]


ENGINES = (
    "tests/spark/test_engines_agree.py",
    "tests/spark/test_step.py",
    "tests/faults/test_retry.py",
)
DOORS = (
    "tests/spark/test_ml.py",
    "tests/spark/test_predict_any.py",
    "tests/spark/test_groups.py",
    "tests/spark/test_data_columns.py",
    "tests/spark/test_checkpoints.py",
)
CONNECT = ("tests/spark/test_connect.py",)
TABLES = ("tests/spark/test_data_columns.py", "tests/spark/test_predict_any.py", "tests/unit/data")
MATRIX = {
    "spark-3.5": Cell(("pyspark==3.5.9",), (*ENGINES, *DOORS)),
    "spark-4.0": Cell(("pyspark==4.0.5",), (*ENGINES, *DOORS, *CONNECT)),
    "spark-4.1": Cell(("pyspark==4.1.4",), (*ENGINES, *DOORS, *CONNECT)),
    "spark-4.2": Cell(("pyspark==4.2.1",), (*ENGINES, *DOORS, *CONNECT)),
    "pandas-3": Cell(("pandas>=3,<4",), TABLES),
    "oldest": Cell(("pyspark==3.5.9", "pyarrow==14.0.2", "pandas==2.2.3", "numpy==1.26.4"), TABLES),
}


def build(name: str) -> Path:
    """Return the Python of a cell, which is built where it is not there or has other requirements."""
    cell, folder = MATRIX[name], CELLS / name
    python, stamp = folder / "bin" / "python", folder / "requirements"
    if stamp.exists() and stamp.read_text() == "\n".join(cell.requirements):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    packages = folder / PACKAGES
    (packages / "base.pth").write_text(f"{Path(sys.prefix) / PACKAGES}\n{ROOT}\n")
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-compile", "--target", packages]
    subprocess.run([*install, *options, *cell.requirements], check=True)
    stamp.write_text("\n".join(cell.requirements))
    return python


def environment(python: Path) -> dict[str, str]:
    """The variables with which programs run in a cell."""
    names = ("SPARK_HOME", "SPARK_CONF_DIR", "PYTHONPATH", "PYSPARK_DRIVER_PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {
        **kept,
        "PYSPARK_PYTHON": str(python),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def run(name: str, *options: str) -> tuple[int, str, float]:
    """Run the suite of a cell; return pytest's exit code, its last line and the seconds."""
    python, began = build(name), time.monotonic()
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",
        *MATRIX[name].suite,
        *options,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(python), capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines() or [done.stderr]
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-4_000:])
    return done.returncode, lines[-1], time.monotonic() - began


def main() -> None:
    what, *names = sys.argv[1:] or ["all"]
    if what == "build":
        for name in names:
            print(build(name))
        return
    failed = 0
    for name in names or MATRIX:
        code, last, seconds = run(name)
        failed += code != 0
        print(
            f"| {name} | {', '.join(MATRIX[name].requirements)} | {last} | {seconds:.0f} s |",
            flush=True,
        )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
