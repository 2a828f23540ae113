"""A program of its own, in processes without what macOS lacks.

Each engine gives the same bits, and lines that the user's code prints arrive, each with its origin.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from launch import PATHS, ROOT, SHORT_LIVES, digest
from pyspark.sql import SparkSession
from torch import nn

import sparkdl

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.soak]


class Talks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            print("trains on", len(x))
            logging.warning("two\nlines")
        return super().forward(x)


def digests(spark: SparkSession, model: type[nn.Module]) -> dict[str, list]:
    """Train with each engine; the digest of the model, and a prediction on executors."""
    rows = spark.range(64).selectExpr(
        "array(float(id % 7), float(id % 5)) AS features", "id % 2 AS label"
    )
    found = {}
    for engine in ("local", "shuffle", "gang"):
        trained = sparkdl.Trainer(
            model=partial(model, 2, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch_size=16,
            replicas=2,
            engine=engine,
            stop=sparkdl.max_epoch(1),
        ).fit(rows)
        found[engine] = [digest(trained.module), trained.transform(rows.limit(1)).head().prediction]
    return found


def by_group(spark: SparkSession) -> None:
    rows = spark.range(20).selectExpr(
        "array(float(id % 7), float(id % 5)) AS features", "id % 2 AS label", "id % 2 AS part"
    )
    trainer = sparkdl.Trainer(
        model=partial(Talks, 2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        stop=sparkdl.max_iteration(1),
    )
    sparkdl.fit_groups(rows, by="part", trainer=trainer).unpersist()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program of this file prints."""
    folder = tmp_path_factory.mktemp("program")
    paths = [str(ROOT / "tests" / "as_on_macos"), str(Path(__file__).parent), *PATHS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": SHORT_LIVES,
        "SPARK_LOCAL_DIRS": str(folder),
    }
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_engines_do_without_what_only_linux_has(spark: SparkSession, printed: str) -> None:
    (found,) = re.findall(r"^digests (.*)$", printed, re.MULTILINE)
    assert json.loads(found) == digests(spark, nn.Linear)


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


if __name__ == "__main__":
    from launch import session

    from sparkdl.process import system

    assert not system.on_linux()
    with session("local[2]") as spark:
        print("digests", json.dumps(digests(spark, Talks)), flush=True)
        by_group(spark)
