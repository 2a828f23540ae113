"""Fits in threads that share one set of Spark's local properties, as those of pyspark.ml.tuning do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark import inheritable_thread_target
from test_session import run
from torch import nn

import sparkdl

KEYS = ("spark.jobGroup.id", "spark.job.description", "callSite.short")


@pytest.fixture(scope="module")
def table(spark: Any) -> Iterator[Any]:
    rows = spark.range(400).selectExpr("array(rand(1), rand(2)) AS features", "id % 2 AS label")
    yield rows.cache()
    rows.unpersist()


def trainer(lr: float, **changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": partial(nn.Linear, 2, 2),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=lr),
        "batch_size": 80,
        "replicas": 2,
        "stop": sparkdl.max_epoch(1),
        **changes,
    }
    return sparkdl.Trainer(**values)


class Asks(sparkdl.Callback):
    """Notes after each iteration what ``asked`` returns."""

    def __init__(self, asked: Any) -> None:
        self.asked, self.found = asked, []

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.found.append(self.asked())


def test_no_thread_sees_what_a_fit_in_another_sets(spark: Any, table: Any) -> None:
    context = spark.sparkContext
    context.setLocalProperty("spark.scheduler.pool", "mine")

    def properties() -> list[Any]:
        return [context.getLocalProperty(key) for key in (*KEYS, "spark.scheduler.pool")]

    nothing = [None] * len(KEYS) + ["mine"]
    try:
        shared = inheritable_thread_target(spark)
        with ThreadPool(1) as one, ThreadPool(1) as other:
            inside = Asks(properties)
            outside = Asks(lambda: other.apply(shared(properties)))
            fit = partial(trainer(0.1, callbacks=[inside, outside]).fit, table)
            one.apply(shared(fit))
            assert one.apply(shared(properties)) == nothing
        assert outside.found == [nothing] * 5
        assert all(group and description for group, description, *_ in inside.found)
        assert all(found[-1] == "mine" for found in inside.found)
    finally:
        context.setLocalProperty("spark.scheduler.pool", None)


def test_fits_at_once_give_the_bits_of_each_alone(spark: Any, table: Any) -> None:
    rates = [0.001, 0.1] * 2
    alone = {lr: trainer(lr).fit(table).history.losses for lr in rates[:2]}
    shared = inheritable_thread_target(spark)
    fits = [shared(partial(trainer(lr).fit, table)) for lr in rates]
    with ThreadPool(2) as pool:
        found = pool.map(lambda fit: fit(), fits, chunksize=1)
    assert [each.history.losses for each in found] == [alone[lr] for lr in rates]


@pytest.mark.parametrize("replicas", [2, 6])
def test_an_event_log_has_no_messages_to_tasks(
    spark: Any, table: Any, tmp_path: Path, replicas: int
) -> None:
    """Spark writes a job's properties with each job and each stage, in every iteration."""
    context, jvm = spark.sparkContext._jsc.sc(), spark._jvm
    conf = context.conf().clone().set("spark.eventLog.rolling.enabled", "false")
    conf.set("spark.eventLog.compress", "false")
    where, none = jvm.java.net.URI(tmp_path.as_uri()), jvm.scala.Option.apply(None)
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "log", none, where, conf, context.hadoopConfiguration()
    )
    log.start()
    context.addSparkListener(log)
    try:
        history = trainer(0.1, replicas=replicas, slices=replicas).fit(table).history
        context.listenerBus().waitUntilEmpty()
    finally:
        context.removeSparkListener(log)
        log.stop()
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    told = [event["Properties"] for event in events if event.get("Properties")]
    assert len(told) > 2 * len(history.losses)
    assert max(len(value) for each in told for value in each.values()) < 200


@pytest.mark.slow
@pytest.mark.soak
def test_without_pinned_threads_the_bits_are_the_same(tmp_path: Path) -> None:
    said, _ = run(
        """
import os
os.environ["PYSPARK_PIN_THREAD"] = "false"
spark = sparkdl.session("local[2]", **QUIET)
data = table(spark)
say(shuffle=trainer().fit(data).history.losses, local=trainer(engine="local").fit(data).history.losses)
""",
        tmp_path,
    )
    assert said[0]["shuffle"] == said[0]["local"]
