"""Raw frames through a Spark shuffle, and how Spark writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pyspark import cloudpickle

from sparkdl.spark.frames import FEW_FILES, collect_frames, map_frames, send, shuffle_frames

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])

THRESHOLD = "spark.shuffle.sort.bypassMergeThreshold"
MANY = FEW_FILES + 1


def to_all(partition: int, records: Iterable[Any]) -> Iterator[bytes]:
    for record in records:
        for target in range(MANY):
            yield from send(target, b"%d to %d" % (record, target))


@pytest.mark.parametrize(
    ("few_bytes", "threshold", "handle"),
    [
        (True, None, "SerializedShuffleHandle"),
        (True, "200", "BypassMergeSortShuffleHandle"),
        (False, None, "BypassMergeSortShuffleHandle"),
    ],
    ids=["few bytes", "as the user says", "many bytes"],
)
def test_a_task_that_sends_few_bytes_writes_one_file(
    spark: Any, few_bytes: bool, threshold: str | None, handle: str
) -> None:
    """With a file for each partition an iteration of 64 replicas and slices wrote 4,096."""
    context = spark.sparkContext
    conf = context._jsc.sc().conf()
    if threshold is not None:
        conf.set(THRESHOLD, threshold)
    try:
        keyed = map_frames(context.parallelize(range(3), 3), to_all)
        received = shuffle_frames(keyed, MANY, few_bytes)
        assert conf.get(THRESHOLD, None) == threshold
    finally:
        conf.remove(THRESHOLD)
    shuffled = received._jrdd.rdd().dependencies().head().rdd()
    kind = shuffled.dependencies().head().shuffleHandle().getClass().getSimpleName()
    assert kind == handle
    expected = [b"%d to %d" % (record, target) for record in range(3) for target in range(MANY)]
    assert sorted(collect_frames(received)) == sorted(expected)
