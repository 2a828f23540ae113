"""PySpark jobs with nothing in them: what Spark costs before anything is computed.

Plain RDDs and `collect`, as any user of PySpark would write them; tasks of two partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from harness import RANKS, median_ms, session
from pyspark.sql import SparkSession


def one_stage_job(spark: SparkSession) -> None:
    """2 tasks with nothing to do."""
    numbers = spark.sparkContext.parallelize(range(RANKS), RANKS)
    numbers.mapPartitionsWithIndex(_count).collect()


def two_stage_job(spark: SparkSession) -> None:
    """2 tasks, a shuffle, 2 tasks."""
    pairs = spark.sparkContext.parallelize(range(RANKS), RANKS).map(_pair).partitionBy(RANKS)
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
    return median_ms(seconds[jobs // 2 :])


def fresh_jobs_ms(jobs: int) -> tuple[float, float]:
    """Of one stage and of two, in a session of their own, after so many of both."""
    spark = session()
    try:
        for job in (one_stage_job, two_stage_job):
            jobs_ms(spark, job, jobs)
        return jobs_ms(spark, one_stage_job, jobs), jobs_ms(spark, two_stage_job, jobs)
    finally:
        spark.stop()
