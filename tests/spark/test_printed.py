"""Lines that the user's code prints on executors arrive, each with its origin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.gang]

PROGRAM = """
import logging
import sparkdl, torch
from torch import nn

class Talks(nn.Linear):
    def forward(self, x):
        if torch.is_grad_enabled():
            print("trains on", len(x))
            logging.warning("two\\nlines")
        return super().forward(x).flatten()

def make():
    return Talks(2, 1)

spark = sparkdl.session(
    "local[2]", **{"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
)
data = spark.range(20).selectExpr("array(rand(1), rand(2)) AS features", "float(id) AS label")
for engine in ("shuffle", "gang"):
    print("begin", engine, flush=True)
    sparkdl.Trainer(
        model=make, loss=nn.MSELoss(), optimizer=torch.optim.SGD, engine=engine, replicas=2,
        batch_size=20, stop=sparkdl.max_iteration(2),
    ).fit(data)
sparkdl.fit_groups(
    data.selectExpr("*", "int(label % 2) AS part"), by="part",
    trainer=sparkdl.Trainer(
        model=make, loss=nn.MSELoss(), optimizer=torch.optim.SGD, stop=sparkdl.max_iteration(1)
    ),
)
spark.stop()
"""


def test_each_line_has_its_origin(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    lines = re.findall(r"^(\[.*?\] .*)$", done.stdout, re.MULTILINE)
    for number in (0, 1):
        for iteration in (1, 2):
            for one in ("replica", "rank"):
                label = f"[{one} {number}, iteration {iteration}]"
                assert any(line.startswith(f"{label} trains on ") for line in lines)
                at = lines.index(f"{label} WARNING:root:two")
                assert f"{label} lines" in lines[at:]
        assert f"[group {number}] trains on 10" in lines
