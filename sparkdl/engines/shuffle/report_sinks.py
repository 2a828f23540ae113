"""After an update: where a slice's report and its new weights go. Each is a part of a task's body.

Three ways: the report to the driver, and the weights stay where they are (:func:`to_driver`); both
through a shuffle to the nodes (:class:`NodeReports`); or the weights into a block that Spark
stores, from where the next iteration's tasks fetch them, and the report through an accumulator
(:class:`ToBlocks`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyspark.accumulators import Accumulator, AccumulatorParam

from sparkdl.codec.packed import encode
from sparkdl.engines.shuffle.node_reduce import weight_frames
from sparkdl.engines.shuffle.traffic import Nodes
from sparkdl.engines.shuffle.weights import version_frame
from sparkdl.replica.iteration import SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import open_pool
from sparkdl.spark.frames import send

ReportSink = Callable[[SliceReport, RunSpec], Iterator[bytes]]


def to_driver(report: SliceReport, run: RunSpec) -> Iterator[bytes]:
    """One frame, the pickled report."""
    yield pickle.dumps(report)


@dataclass(frozen=True)
class NodeReports:
    """To the replicas' places, see :func:`sparkdl.engines.shuffle.node_reduce.weight_frames`."""

    nodes: Nodes

    def __call__(self, report: SliceReport, run: RunSpec) -> Iterator[bytes]:
        yield from weight_frames(report, run, self.nodes)


@dataclass(frozen=True)
class ToBlocks:
    """The weights as the only frame of the slice's partition, addressed to it; the report into
    ``reports``. ``everything``: the optimizer's state too."""

    reports: Accumulator[list[SliceReport]]
    everything: bool = False

    def __call__(self, report: SliceReport, run: RunSpec) -> Iterator[bytes]:
        self.reports.add([report])
        if report.state is None or report.skipped:
            frame = encode((report.index, False, None))
        else:
            dtype, pool = plans_of(run).dtype, open_pool(run.slab)
            frame = version_frame(pool, report.index, report.state, dtype, self.everything)
        yield from send(report.index, frame)


class Reports(AccumulatorParam[list[SliceReport]]):
    """Lists that are joined."""

    def zero(self, value: list[SliceReport]) -> list[SliceReport]:
        return []

    def addInPlace(self, value1: list[SliceReport], value2: list[SliceReport]) -> list[SliceReport]:
        value1.extend(value2)
        return value1
