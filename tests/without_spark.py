"""``Trainer.fit`` without Spark, which would only bring the rows: they are handed over as lists, one a
partition."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from pyspark import SparkConf

from sparkdl.data.partition_reader import open_partition
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.samples import SampleSet, Source, _run_here, _sample_set
from sparkdl.session import SessionFacts
from sparkdl.slab.root import SlabConfig
from sparkdl.train import fit as fit_module
from sparkdl.train import placed_samples as placing_module


class NoCluster:
    """A context that answers what a fit asks of a SparkContext besides the data."""

    _jsc = None
    applicationId = f"no-cluster-{os.getpid()}"
    defaultParallelism = 2
    master = "local[2]"

    def __init__(self) -> None:
        self._conf = SparkConf(loadDefaults=False).set("spark.sparkdl.progress", "false")

    def getLocalProperty(self, key: str) -> None:
        return None

    def setJobGroup(self, *args: Any) -> None:
        pass

    def statusTracker(self) -> Any:
        """Nothing runs."""
        return SimpleNamespace(getActiveJobsIds=list, getJobIdsForGroup=lambda group: [])


@dataclass
class Parts:
    """Samples in partitions. ``rows``: by replica, its arrays in canonical order, once trained on."""

    records: list[list[Any]]
    rows: list[list[Rows] | None] = field(default_factory=list)
    num_features: int = 1
    num_labels: int = 1

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.records))


@dataclass(frozen=True)
class Partitions:
    """A stand-in for the RDD of the samples: the frames of each partition, and where they lie."""

    frames: list[Any]
    slab: SlabConfig

    def getNumPartitions(self) -> int:
        return len(self.frames)

    @property
    def ctx(self) -> Any:
        """A context that runs a job here."""

        def run(rdd: Partitions, task: Any) -> list[Any]:
            return [task.work(m, pickle.loads(frame)) for m, frame in enumerate(rdd.frames)]

        return SimpleNamespace(
            runJob=run, getLocalProperty=lambda key: None, setLocalProperty=lambda key, value: None
        )

    def zipped(self, other: Partitions) -> Partitions:
        """As :func:`sparkdl.spark.frames.zip_frames` does."""
        return Partitions(list(zip(self.frames, other.frames, strict=True)), self.slab)


@contextlib.contextmanager
def without_spark() -> Iterator[None]:
    """In the block ``Trainer.fit`` takes :class:`Parts`, on the local engine or that of a gang."""
    context = NoCluster()
    with (
        mock.patch.object(
            SessionFacts,
            "of",
            side_effect=lambda *_, **changes: SessionFacts(None, context, changes),
        ),
        mock.patch.object(SessionFacts, "check_beside"),
        mock.patch.object(fit_module, "warming_up"),
        mock.patch.object(placing_module, "materialize_here", _handed_over),
        mock.patch.object(placing_module, "materialize", lambda source, _: _handed_over(source)),
    ):
        yield


def _handed_over(source: Source) -> SampleSet:
    parts: Any = source.data
    assert source.replicas == len(parts.records)
    task = source.records_task
    frames = [next(task(m, part)) for m, part in enumerate(parts.records)]
    handles = [pickle.loads(frame) for frame in frames]
    rdd: Any = Partitions(frames, source.slab)
    samples = _sample_set(source, rdd, handles, partial(_run_here, handles))
    parts.num_features, parts.num_labels = samples.num_features, samples.num_labels
    parts.rows = [
        [
            column if isinstance(column, Ragged) else np.array(column)
            for column in open_partition(h).gather(np.arange(h.num_rows))
        ]
        if h.num_rows
        else None
        for h in handles
    ]
    return samples
