"""No wait without a bound: who was waited for is said; what moves is let be."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator

import pytest
from pyspark import cloudpickle

from sparkdl.errors import TrainingError
from sparkdl.spark.executors import own_properties
from sparkdl.spark.failures import Watchdog, faults_explained
from sparkdl.spark.frames import collect_frames, map_frames

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def stuck(partition: int, frames: Iterable[object]) -> Iterator[bytes]:
    list(frames)
    time.sleep(120 if partition == 1 else 0)
    yield b""


def slow(partition: int, frames: Iterable[object]) -> Iterator[bytes]:
    list(frames)
    time.sleep(0.5)
    yield b""


@pytest.fixture
def watched(spark):
    """Runs a task over partitions in a watched job group."""
    context = spark.sparkContext
    context.parallelize(range(2), 2).map(str).count()  # workers are there

    def run(task, partitions: int, seconds: float) -> list[bytes]:
        with own_properties(context):
            context.setJobGroup("watched", "a test")
            watch = Watchdog(context, "watched", seconds)
            try:
                with faults_explained("iteration 3, epoch 1"):
                    return collect_frames(
                        map_frames(context.parallelize(range(partitions), partitions), task)
                    )
            finally:
                watch.stop()

    return run


def test_a_task_that_never_ends_is_named(watched):
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        watched(stuck, 2, 3.0)
    assert time.monotonic() - started < 60
    message = re.sub(r"\(\S+\)", "(HOST)", str(caught.value))
    assert message == (
        "iteration 3, epoch 1: sparkdl waited 3 s for partition 1 on executor driver (HOST). "
        "Nothing happened in that time. If tasks really take that long, raise "
        "spark.sparkdl.timeout.seconds."
    )


def test_a_job_that_moves_may_take_longer_than_the_bound(watched):
    assert watched(slow, 12, 2.0) == [b""] * 12
