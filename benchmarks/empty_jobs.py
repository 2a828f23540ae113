"""PySpark jobs with nothing in them: what Spark costs before anything is computed.

Plain RDDs and `collect`, as any user of PySpark would write them; tasks of two partitions.
This module imports nothing large, since the workers import it: with torch in a worker, the collection
of garbage that PySpark's daemon runs after each task takes 100 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import SparkSession

TASKS = 2


def one_stage_job(spark: SparkSession) -> None:
    """2 tasks with nothing to do."""
    numbers = spark.sparkContext.parallelize(range(TASKS), TASKS)
    numbers.mapPartitionsWithIndex(_count).collect()


def two_stage_job(spark: SparkSession) -> None:
    """2 tasks, a shuffle, 2 tasks."""
    pairs = spark.sparkContext.parallelize(range(TASKS), TASKS).map(_pair).partitionBy(TASKS)
    pairs.mapPartitionsWithIndex(_count).collect()


def _pair(value: int) -> tuple[int, int]:
    return value, value


def _count(partition: int, records: Iterator[Any]) -> Iterator[tuple[int, int]]:
    yield partition, sum(1 for _ in records)


def jobs_ms(spark: SparkSession, job: Callable[[SparkSession], None], jobs: int) -> float:
    """Milliseconds of ``job``, after half as many for warm-up."""
    seconds = []
    for _ in range(jobs + jobs // 2):
        started = time.perf_counter()
        job(spark)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[jobs // 2 :]) * 1e3
