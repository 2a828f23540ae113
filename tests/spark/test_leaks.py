"""Fits of all kinds in one session leave nothing behind: neither in the driver nor in the JVM."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fork_server
import innards
import numpy as np
import pytest
import torch
from pyspark import SparkContext, cloudpickle
from pyspark.sql import DataFrame
from torch import nn

import sparkdl
import sparkdl.tune

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.linux]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class Fail(sparkdl.Callback):
    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == 3:
            raise ValueError("enough")


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark) -> DataFrame:
    generator = np.random.default_rng(3)
    rows = [(generator.normal(size=4).tolist(), i % 2, i % 3) for i in range(48)]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long, kind long")


def trainer(**changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 16,
        "replicas": 2,
        "stop": sparkdl.max_epoch(2),
    }
    return sparkdl.Trainer(**{**values, **changes})


def failing(df: DataFrame, engine: str) -> None:
    with pytest.raises(ValueError, match="enough"):
        trainer(engine=engine, callbacks=[Fail()]).fit(df)


def checked(df: DataFrame, folder: Path) -> None:
    checkpoint = sparkdl.Checkpoint(folder / os.urandom(4).hex(), every=sparkdl.every(2))
    validation = sparkdl.Validation(df, ["accuracy"], best="accuracy")
    trainer(checkpoint=checkpoint, validation=validation).fit(df).transform(df).collect()


def searched(df: DataFrame) -> None:
    small = trainer(replicas=1, engine="local", validation=sparkdl.Validation(df))
    sparkdl.tune.search(small, df, {"batch_size": [8, 16]}, trials=2)


KINDS: dict[str, Callable[[DataFrame, Path], object]] = {
    "checkpoints, validation, predictions": checked,
    "gang": lambda df, folder: trainer(engine="gang").fit(df).evaluate(df),
    "zero1": lambda df, folder: trainer(engine="gang", strategy="zero1").fit(df),
    "a fit that fails": lambda df, folder: failing(df, "shuffle"),
    "a gang that fails": lambda df, folder: failing(df, "gang"),
    "search": lambda df, folder: searched(df),
    "groups": lambda df, folder: sparkdl.fit_groups(df, "kind", trainer(replicas=1)).unpersist(),
}


SLACK = Counter({"files of the JVM": 4, "processes": 4})
"""Spark keeps as many Python workers, each with a socket, as tasks happened to run at once."""


def held(context: SparkContext) -> Counter:
    """What the driver and its JVM hold, counted."""
    context._jsc.sc().listenerBus().waitUntilEmpty()
    innards.wait_for_tasks(context)
    for _ in range(2):
        gc.collect()
        innards.collect_garbage(context)
        innards.drain_py4j(context)
    jvm = context._gateway.proc.pid
    blocks = {
        kind: len(innards.blocks(context, kind)) for kind in ("broadcast", "rdd", "taskresult")
    }
    return Counter(
        {
            **Counter(f"thread of the JVM: {name}" for name in innards.threads(context)),
            **Counter(f"thread: {one.name}" for one in threading.enumerate()),
            **blocks,
            "files of the driver": len(os.listdir("/proc/self/fd")),
            "files of the JVM": len(os.listdir(f"/proc/{jvm}/fd")),
            "connections": len(context._gateway._gateway_client.deque),
            "objects of Python": innards.py4j_objects(context),
            "listeners": context._jsc.sc().listenerBus().listeners().size(),
            "shuffles": innards.shuffles(context),
            "persisted": innards.persisted(context),
            "processes": len(fork_server.below(jvm)),
        }
    )


@pytest.mark.parametrize(
    ("kinds", "rounds"),
    [(["checkpoints, validation, predictions", "a gang that fails"], 1), ([*KINDS], 29)],
    ids=["two kinds, twice", "all kinds, thirty times"],
)
def test_what_there_is_after_one_round_is_what_there_is_after_all(
    spark, df, tmp_path, kinds, rounds
):
    context = spark.sparkContext
    for kind in kinds:
        KINDS[kind](df, tmp_path)
    before = held(context) + SLACK
    for _ in range(rounds):
        for kind in kinds:
            KINDS[kind](df, tmp_path)
    assert innards.eventually(lambda: not held(context) - before), held(context) - before
