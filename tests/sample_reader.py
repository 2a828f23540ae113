"""Samples that are made of data as a fit makes them, and read back on this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark import RDD, StorageLevel

from sparkdl.data.partition_reader import close_partitions, open_partition
from sparkdl.data.ragged import concatenate
from sparkdl.data.samples import SampleSet, Source, materialize, materialize_here
from sparkdl.slab.pool import release
from sparkdl.slab.root import SlabConfig, remove_root


class Reader:
    """Makes sample sets and reads them back."""

    def __init__(self, spark: Any) -> None:
        self.spark, self.context = spark, spark.sparkContext
        self.slab = SlabConfig.new("/dev/shm", self.context.applicationId)
        self.rdds: list[RDD] = []

    def samples(
        self,
        data: Any,
        features: Any = ("features",),
        label: Any = ("label",),
        replicas: int = 2,
        here: bool = False,
        dtype: str = "float32",
        **more: Any,
    ) -> SampleSet:
        source = Source(data, tuple(features), tuple(label), replicas, dtype, self.slab, **more)
        return materialize_here(source) if here else materialize(source, self.persist)

    def persist(self, rdd: RDD) -> RDD:
        self.rdds.append(rdd.persist(StorageLevel.MEMORY_AND_DISK))
        return rdd

    def rows(self, samples: SampleSet) -> list[Any]:
        """The rows of each field, all partitions, each in canonical order."""
        parts = [
            open_partition(handle).gather(np.arange(handle.num_rows))
            for handle in samples.handles
            if handle.num_rows
        ]
        return [concatenate(rows) for rows in zip(*parts, strict=True)]

    def close(self) -> None:
        close_partitions()
        release(self.slab.name)
        remove_root(self.slab)
        for rdd in self.rdds:
            rdd.unpersist()


def same(left: SampleSet, right: SampleSet) -> bool:
    return (
        left.counts == right.counts
        and left.fields == right.fields
        and [h.checksum for h in left.handles] == [h.checksum for h in right.handles]
    )
