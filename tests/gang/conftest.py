"""Data for gangs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_training import CLASSES, WIDTH
from real_ranks import Ranks, real_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks that are processes of this machine, started once."""
    with real_ranks() as found:
        yield found


@pytest.fixture(scope="module")
def frames(spark: Any) -> Any:
    """Frames of partitions of the given sizes, with a weight for each row."""

    @functools.cache
    def make(*sizes: int) -> Any:
        generator = np.random.default_rng(1)
        parts = [
            [
                (
                    generator.normal(size=WIDTH).tolist(),
                    int(generator.integers(CLASSES)),
                    float(generator.integers(3)),
                )
                for _ in range(size)
            ]
            for size in sizes
        ]
        rdd = spark.sparkContext.parallelize(parts, len(parts)).flatMap(list)
        return spark.createDataFrame(rdd, "features array<double>, label long, weight double")

    return make


@pytest.fixture
def nothing_left(spark: Any) -> Any:
    yield
    context = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker follows the scheduler
    assert not list(Path("/dev/shm").glob(f"sparkdl-{context.applicationId}-*"))
    assert context._jsc.getPersistentRDDs().isEmpty()
    assert list(context.statusTracker().getActiveJobsIds()) == []
