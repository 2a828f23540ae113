"""Fixtures of the tests that need Spark."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def num_jobs(spark: SparkSession) -> Callable[[], int]:
    """How many Spark jobs were submitted so far."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    return lambda: scheduler.numTotalJobs()


@pytest.fixture
def set_stages(spark: SparkSession) -> Iterator[Callable[[str], None]]:
    """Sets spark.sparkdl.stages for the fits of a test."""
    yield lambda stages: spark.conf.set("spark.sparkdl.stages", stages)
    spark.conf.unset("spark.sparkdl.stages")


@pytest.fixture
def nothing_left(
    spark: SparkSession, slabs: Callable[..., list[str]]
) -> Iterator[Callable[[], None]]:
    """Asserts, when called and at the end, that no slab, persisted RDD or job of a fit is left."""
    context = spark.sparkContext

    def check() -> None:
        context._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker follows the scheduler
        assert slabs() == []
        assert context._jsc.getPersistentRDDs().isEmpty()
        assert list(context.statusTracker().getActiveJobsIds()) == []

    yield check
    check()


@pytest.fixture
def slabs(spark: SparkSession) -> Callable[..., list[str]]:
    """New slab roots of this application: in shared memory, or in Spark's local directories."""
    patterns = [
        f"{directory}/sparkdl-{spark.sparkContext.applicationId}-*"
        for directory in ("/dev/shm", "/tmp/blockmgr-*")
    ]
    before = {path for pattern in patterns for path in glob.glob(pattern)}

    def find(local: bool = False) -> list[str]:
        return sorted(set(glob.glob(patterns[1 if local else 0])) - before)

    return find
