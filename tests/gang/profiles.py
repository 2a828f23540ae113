"""Gangs whose tasks get more cores than others, on two executors of two cores."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from gang_training import CLASSES, WIDTH, trainer_of
from pyspark import cloudpickle
from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

import sparkdl
from sparkdl.gang import driver

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def where() -> str:
    """The executor's folder."""
    return os.getcwd()


class Threads(torch.nn.Linear):
    """Leaves a note of torch's threads in a folder."""

    folder = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(os.path.join(self.folder, f"{os.getpid()}"), "w") as file:
            file.write(str(torch.get_num_threads()))
        return super().forward(x)


def threads_in(folder: str) -> torch.nn.Module:
    module = Threads(WIDTH, CLASSES)
    module.folder = folder
    return module


def error_of(doing) -> str:
    try:
        doing()
    except sparkdl.SparkdlError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run(spark: Any, notes: str) -> dict[str, Any]:
    """``notes``: the folder of the threads' notes."""
    two = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    ask = ExecutorResourceRequests().cores(4)
    executors = ResourceProfileBuilder().require(ask).build
    places = sparkdl.gang.run(where, ranks=2, resource_profile=two)
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(24)
    ]
    records = spark.sparkContext.parallelize(rows, 2)
    df = spark.createDataFrame(records, "features array<double>, label long")
    trainer = trainer_of(model=lambda: threads_in(notes), resource_profile=two)
    with mock.patch.object(driver, "SLOT_SECONDS", 1.0):
        too_many = error_of(lambda: sparkdl.gang.run(where, ranks=3, resource_profile=two))
    return {
        "executors": len(set(places)),
        "too many": too_many,
        "asks": error_of(lambda: sparkdl.gang.run(where, ranks=2, resource_profile=executors)),
        "losses": trainer.fit(df).history.losses,
        "expected": replace(trainer, engine="local", resource_profile=None).fit(df).history.losses,
    }
