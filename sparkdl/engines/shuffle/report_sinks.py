"""The ways in which a slice's report and new weights leave the task after an update.

There are two. The report goes to the driver and the weights stay in their slab (:func:`to_driver`).
Or both go to the nodes through a shuffle (:class:`NodeReports`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparkdl.engines.shuffle.node_reduce import weight_frames
from sparkdl.engines.shuffle.traffic import Nodes
from sparkdl.replica.iteration import SliceReport
from sparkdl.replica.run import RunSpec

ReportSink = Callable[[SliceReport, RunSpec], Iterator[bytes]]


def to_driver(report: SliceReport, run: RunSpec) -> Iterator[bytes]:
    """Yield one frame, the pickled report."""
    yield pickle.dumps(report)


@dataclass(frozen=True)
class NodeReports:
    """A sink to the replicas, see :func:`sparkdl.engines.shuffle.node_reduce.weight_frames`."""

    nodes: Nodes

    def __call__(self, report: SliceReport, run: RunSpec) -> Iterator[bytes]:
        yield from weight_frames(report, run, self.nodes)
