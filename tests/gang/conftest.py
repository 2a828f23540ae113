"""Data and ranks for gangs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_training import CLASSES, WIDTH
from rank_pool import RankPool, gangs_of
from real_ranks import Ranks, real_ranks
from without_spark import NoCluster, Parts


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks that are processes of this machine, started once."""
    with real_ranks() as found:
        yield found


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks of gangs that need no Spark."""
    made = RankPool()
    yield made
    made.close()


@pytest.fixture
def parts(pool: RankPool) -> Iterator[Callable[..., Parts]]:
    """Makes partitions of the given sizes, with a weight for each row. Whoever asks for it trains on
    them, and without Spark; nothing is left of it."""

    def make(*sizes: int) -> Parts:
        names = ("features", "label", "weight")
        return Parts([[dict(zip(names, r, strict=True)) for r in part] for part in rows_of(sizes)])

    with gangs_of(pool):
        yield make
    assert not list(Path("/dev/shm").glob(f"sparkdl-{NoCluster.applicationId}-*"))


def rows_of(sizes: Sequence[int]) -> list[list[tuple[list[float], int, float]]]:
    """Return features, label and weight of each row. They do not depend on where it is cut."""
    generator = np.random.default_rng(1)
    return [
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


@pytest.fixture(scope="module")
def frames(spark: Any) -> Any:
    """Frames of partitions of the given sizes, with a weight for each row."""

    @functools.cache
    def make(*sizes: int) -> Any:
        found = rows_of(sizes)
        rdd = spark.sparkContext.parallelize(found, len(found)).flatMap(list)
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
