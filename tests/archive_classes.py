"""Script: leave Java's classes of a session of Spark in an archive, which the tests' JVMs map.

    python tests/archive_classes.py FILE

Loading and verifying them is half of what a short session's JVM does. Java takes an archive only where
the class path is the one it was made for, up to links, and has no directory with files in it: so the
tests' sessions have no configuration directory (``launch.NO_CONFIGURATION``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from launch import NO_CONFIGURATION, QUIET, SHORT_LIVES
from pyspark import SparkContext
from torch import nn

import sparkdl


def use_what_tests_use(spark) -> None:
    """Data from the driver and from files, a fit, predictions."""
    frame = spark.createDataFrame(
        [([0.5, float(i)], i % 2) for i in range(64)], "x array<float>, y int"
    )
    with tempfile.TemporaryDirectory() as folder:
        frame.repartition(4).write.parquet(f"{folder}/data")
        read = spark.read.parquet(f"{folder}/data")
        trained = sparkdl.Trainer(
            model=partial(nn.Linear, 2, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            features="x",
            label="y",
            batch_size=16,
            stop=sparkdl.max_epoch(1),
        ).fit(read)
        predicted = trained.transform(read).groupBy("y").count()
        assert sum(row["count"] for row in predicted.collect()) == 64


def main() -> None:
    target = Path(sys.argv[1])
    draft = target.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    os.environ["SPARK_CONF_DIR"] = NO_CONFIGURATION
    os.environ["SPARK_SUBMIT_OPTS"] = f"{SHORT_LIVES} -XX:ArchiveClassesAtExit='{draft}'"
    spark = sparkdl.session("local[2]", **QUIET)
    gateway = SparkContext._gateway
    try:
        use_what_tests_use(spark)
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # which is what ends the JVM
        gateway.proc.wait(timeout=300)
    draft.replace(target)


if __name__ == "__main__":
    main()
