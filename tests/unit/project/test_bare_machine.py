"""What runs on a machine with a GPU and little else (Python, torch, numpy, pandas, pytest, hypothesis,
safetensors, and what Spark needs)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LACKS = (
    "yaml",
    "sklearn",
    "torchmetrics",
    "PIL",
    "matplotlib",
    "tensorboard",
    "mlflow",
    "torchvision",
)
COLLECT = f"""
import sys
for name in {LACKS}:
    sys.modules[name] = None
import pytest
status = pytest.main(["-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", "tests"])
sys.path.insert(0, "benchmarks")
import smoke_on_gpu, gpu
sys.exit(status)
"""


@pytest.mark.soak
def test_tests_for_gpus_are_found_without_other_libraries():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert found >= {"tests/spark/test_on_gpu.py", "tests/gang/test_gang_on_gpu.py"}
