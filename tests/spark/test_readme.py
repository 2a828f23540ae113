"""The README's program runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_program(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 25
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.match(r"\{'loss': [\d.]+, 'accuracy': ([\d.]+)\}\n", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 0.95
    assert "prediction" in done.stdout


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 5
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
