"""The README's Python code runs as it stands, in a directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    mean_error = float(re.search(r"'mae': ([\d.e-]+)", done.stdout)[1])
    assert mean_error < 0.1  # predicting the mean gives 0.25
    assert "|prediction|" in done.stdout.replace(" ", "")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs/product/model.safetensors").is_file()
