"""Tasks that have failed, while a Python process of theirs goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import torch
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.java_gateway import ensure_callback_server_started
from torch import nn

import sparkdl
from sparkdl.data.partition import PartitionWriter
from sparkdl.slab.root import SlabConfig, open_root, remove_root

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT_SECONDS = 20.0


def wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < until, f"waited for {path}"
        time.sleep(0.01)


def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    raise ValueError("the mistake of a user")
    yield


def write_late(
    folder: Path, config: SlabConfig, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """As a process that was slow to begin: it opens the root when the job has failed and ended."""
    wait_for(folder / "over")
    try:
        PartitionWriter(config)
    finally:
        end = "given up" if isinstance(sys.exc_info()[1], BrokenPipeError) else "wrote"
        (folder / end).touch()
    yield from batches


@pytest.mark.parametrize("there", [False, True], ids=["no root", "a root that others use"])
def test_it_makes_no_slab_root(spark: Any, tmp_path: Path, slabs: Any, there: bool) -> None:
    context = spark.sparkContext
    config = SlabConfig.new("auto", context.applicationId)
    if there:
        assert open_root(config, create=True) is not None
    held = slabs()
    query = spark.range(0, 1, 1, 1).mapInArrow(fail, "id long")  # one task, which has ended then
    with pytest.raises(PythonException, match="the mistake of a user"):
        query.mapInArrow(partial(write_late, tmp_path, config), "id long").collect()
    (tmp_path / "over").touch()
    wait_for(tmp_path / ("wrote" if there else "given up"))
    assert slabs() == held
    assert len(held) == there
    remove_root(config)


class Slow:
    """A listener of Spark that takes its time over the first task: what Spark tells lags behind."""

    class Java:
        implements: ClassVar = ["org.apache.spark.scheduler.SparkListenerInterface"]

    def onTaskStart(self, event: Any) -> None:
        time.sleep(1.5)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda event: None


@pytest.fixture
def slow(spark: Any) -> Iterator[None]:
    """Beside the listener that keeps the tracker's books."""
    ensure_callback_server_started(spark.sparkContext._gateway)
    bus, listener = spark.sparkContext._jsc.sc().listenerBus(), Slow()
    bus.addToQueue(listener, "appStatus")
    yield
    bus.removeListener(listener)


def first_fails(partition: int, numbers: Iterator[int]) -> Iterator[tuple[list[float], float]]:
    """The other partition comes when the fit has an error already."""
    if partition == 0:
        raise ValueError("the mistake of a user")
    time.sleep(1.0)
    return iter([([float(n)], float(n)) for n in numbers])


def test_a_fit_that_failed_awaits_its_tasks_where_the_tracker_lags(
    spark: Any, slow: None, nothing_left: Any
) -> None:
    rows = spark.sparkContext.parallelize(range(8), 2).mapPartitionsWithIndex(first_fails)
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 1, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=4,
        replicas=2,
        stop=sparkdl.max_epoch(1),
    )
    with pytest.raises(sparkdl.SparkdlError, match="the mistake of a user"):
        trainer.fit(rows)
    time.sleep(1.5)
    nothing_left()
