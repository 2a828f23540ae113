"""Script: a fit fails with its first task; the other comes later, and Spark's tracker knows of neither.

In a process of its own, since the listener stays.
"""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from pyspark import cloudpickle
from pyspark.java_gateway import ensure_callback_server_started
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
LAG, LATE = 1.5, 1.0
"""Seconds that the tracker takes over a task's start, and of the second task."""


class Slow:
    """A listener of Spark beside the one that keeps the tracker's books."""

    class Java:
        implements: ClassVar = ["org.apache.spark.scheduler.SparkListenerInterface"]

    def onTaskStart(self, event: Any) -> None:
        time.sleep(LAG)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda event: None


def first_fails(partition: int, numbers: Iterator[int]) -> Iterator[tuple[list[float], float]]:
    if partition == 0:
        raise ValueError("the mistake of a user")
    time.sleep(LATE)
    return iter([([float(n)], float(n)) for n in numbers])


def main() -> None:
    from launch import answer, session

    with session("local[2]") as spark:
        context = spark.sparkContext
        context.parallelize(range(2), 2).map(abs).count()  # the daemon is there
        ensure_callback_server_started(context._gateway)
        context._jsc.sc().listenerBus().addToQueue(Slow(), "appStatus")
        rows = context.parallelize(range(8), 2).mapPartitionsWithIndex(first_fails)
        trainer = sparkdl.Trainer(
            model=partial(nn.Linear, 1, 1),
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch_size=4,
            replicas=2,
            stop=sparkdl.max_epoch(1),
        )
        error = ""
        try:
            trainer.fit(rows)
        except sparkdl.SparkdlError as raised:
            error = str(raised)
        time.sleep(2 * LATE)
        slabs = glob.glob(f"/dev/shm/sparkdl-{context.applicationId}-*")
        context._gateway.shutdown_callback_server()
    answer({"error": error, "slabs": slabs})


if __name__ == "__main__":
    main()
