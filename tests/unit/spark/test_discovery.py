"""The script that tells Spark of a node's GPUs. ``nvidia-smi`` says what it would."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "conf" / "discover_gpus.sh"
WHOLE = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9a8b7c6d)
"""
PARTS = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9a8b7c6d)
"""


@pytest.mark.parametrize(
    ("listed", "visible", "addresses"),
    [
        (WHOLE, None, ["GPU-5c89852c", "GPU-9a8b7c6d"]),
        (PARTS, None, ["MIG-c6d4f1ef", "MIG-cba663e8", "GPU-9a8b7c6d"]),
        (WHOLE, "4, 6", ["4", "6"]),
        (WHOLE, "", []),
    ],
)
def test_what_spark_is_told(tmp_path, listed, visible, addresses):
    said = tmp_path / "nvidia-smi"
    said.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
    said.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    found = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == {"name": "gpu", "addresses": addresses}


def test_without_a_driver_spark_is_told_so(tmp_path):
    environment = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    found = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert found.stdout == ""
