"""Each engine in processes without what macOS lacks: the same bits."""

from __future__ import annotations

import json
import os
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

pytestmark = pytest.mark.spark


def digests(spark: SparkSession) -> dict[str, list]:
    """Train with each engine; the digest of the model, and a prediction on executors."""
    rows = spark.range(64).selectExpr(
        "array(float(id % 7), float(id % 5)) AS features", "id % 2 AS label"
    )
    found = {}
    for engine in ("local", "shuffle", "gang"):
        trained = sparkdl.Trainer(
            model=partial(nn.Linear, 2, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch_size=16,
            replicas=2,
            engine=engine,
            stop=sparkdl.max_epoch(1),
        ).fit(rows)
        found[engine] = [digest(trained.module), trained.transform(rows.limit(1)).head().prediction]
    return found


@pytest.mark.slow
def test_engines_do_without_what_only_linux_has(spark: SparkSession, tmp_path: Path) -> None:
    paths = [str(ROOT / "tests" / "as_on_macos"), str(Path(__file__).parent), *PATHS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": SHORT_LIVES,
        "SPARK_LOCAL_DIRS": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == digests(spark)


if __name__ == "__main__":
    from launch import session

    from sparkdl.process import system

    assert not system.on_linux()
    with session("local[2]") as spark:
        print(json.dumps(digests(spark)))
