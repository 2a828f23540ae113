"""A program of its own: lines that the user's code prints arrive, each with its origin; and where the
JVM is killed when the last iteration is done, the weights come back without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

PROGRAM = """
import logging, os, signal
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


class Kill(sparkdl.Callback):
    def __init__(self, pid):
        self.pid = pid

    def on_fit_end(self, trainer, state):
        os.kill(self.pid, signal.SIGKILL)

jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
for engine, callbacks in ("local", []), ("shuffle", [Kill(jvm)]):
    trained = sparkdl.Trainer(
        model=make, loss=nn.MSELoss(), optimizer=torch.optim.SGD, engine=engine, replicas=2,
        batch_size=8, clip_norm=1.0, stop=sparkdl.max_iteration(3), callbacks=callbacks,
    ).fit(data)
    print("weights", [value.tolist() for value in trained.module.state_dict().values()], flush=True)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_each_line_has_its_origin(printed: str) -> None:
    lines = re.findall(r"^(\[.*?\] .*)$", printed, re.MULTILINE)
    for number in (0, 1):
        for iteration in (1, 2):
            for one in ("replica", "rank"):
                label = f"[{one} {number}, iteration {iteration}]"
                assert any(line.startswith(f"{label} trains on ") for line in lines)
                at = lines.index(f"{label} WARNING:root:two")
                assert f"{label} lines" in lines[at:]
        assert f"[group {number}] trains on 10" in lines


def test_weights_on_the_driver_s_node_come_back_without_spark(printed: str) -> None:
    local, killed = re.findall(r"^weights (.*)$", printed, re.MULTILINE)
    assert killed == local
