"""Script: the JVM is killed when the last iteration is done."""

from __future__ import annotations

import os
import signal
from functools import partial

import torch
from torch import nn

import sparkdl


class Kill(sparkdl.Callback):
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def on_fit_end(self, trainer, state) -> None:
        os.kill(self._pid, signal.SIGKILL)


def main() -> None:
    from launch import QUIET, answer, digest

    spark = sparkdl.session("local[2]", **QUIET)
    numbers = "array(float(id % 7), float(id % 5)) AS features", "id % 2 AS label"
    df = spark.range(64).selectExpr(*numbers)
    run = partial(
        sparkdl.Trainer,
        model=partial(nn.Linear, 2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=8,
        replicas=2,
        clip_norm=1.0,
        stop=sparkdl.max_iteration(3),
    )
    expected = run(engine="local").fit(df)
    kill = Kill(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    trained = run(callbacks=[kill]).fit(df)
    answer({"trained": digest(trained.module), "expected": digest(expected.module)})


if __name__ == "__main__":
    main()
