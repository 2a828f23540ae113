"""The ways in which a slice's report and new weights leave the task after an update.

There are three. The report goes to the driver and the weights stay in their slab
(:func:`to_driver`). Both go to the nodes through a shuffle (:class:`NodeReports`). Or the weights
go into a block that Spark stores, from which the tasks of the next iteration fetch them, and the
report goes through an accumulator (:class:`ToBlocks`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyspark.accumulators import Accumulator, AccumulatorParam

from sparkdl.codec.frames import encode
from sparkdl.engines.shuffle.node_reduce import weight_frames
from sparkdl.engines.shuffle.traffic import Nodes
from sparkdl.engines.shuffle.weights import version_frame
from sparkdl.replica.iteration import SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import open_pool
from sparkdl.spark.frames import send

ReportSink = Callable[[SliceReport, RunSpec], Iterator[bytes]]


def to_driver(report: SliceReport, run: RunSpec) -> Iterator[bytes]:
    """Yield one frame, the pickled report."""
    yield pickle.dumps(report)


@dataclass(frozen=True)
class NodeReports:
    """A sink to the replicas' seats, see :func:`sparkdl.engines.shuffle.node_reduce.weight_frames`."""

    nodes: Nodes

    def __call__(self, report: SliceReport, run: RunSpec) -> Iterator[bytes]:
        yield from weight_frames(report, run, self.nodes)


@dataclass(frozen=True)
class ToBlocks:
    """A sink that yields the weights as the only frame of the slice's partition.

    Attributes:
        reports: The accumulator that takes the report.
        everything: Whether the frame includes the optimizer state.
    """

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
    """An accumulator of lists, which are concatenated."""

    def zero(self, value: list[SliceReport]) -> list[SliceReport]:
        return []

    def addInPlace(self, value1: list[SliceReport], value2: list[SliceReport]) -> list[SliceReport]:
        value1.extend(value2)
        return value1
