"""Blocks of weights that Spark stores, so that no stage of an iteration has to send weights.

[Note: weights as blocks] The task that updates a slice yields its new weights as the only frame of
its partition, and Spark stores that frame on the executor (in memory or on disk). The tasks of the
next iteration fetch the blocks of other nodes' slices by name, like those of any persisted RDD. So
the new weights are available when the job ends, and two stages remain of three. The slabs of the
state stay authoritative: a block is a copy of the weights. If a block is lost, or the weights come
from elsewhere (a checkpoint, a snapshot), a stage sends them from the slabs. An accumulator takes
the report of the task that ended first. That task may have found the block already stored, by a
speculative copy of it or by an earlier attempt that failed afterwards. Then there is no report, and
the iteration is submitted again.
"""

from __future__ import annotations

from collections.abc import Callable

from py4j.protocol import Py4JError
from pyspark.core.rdd import RDD

from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.faults import REPORT_MISSING, WEIGHTS_GONE
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_context import AtReplicasWithWeights, ReplicaTask
from sparkdl.engines.shuffle.report_sinks import Reports, ToBlocks
from sparkdl.replica.iteration import Fault, SliceHandle, SliceReport
from sparkdl.spark.frames import StoringJob, is_not_stored, map_frames, stored_for, zip_frames

MOST_NAMES = 256
"""The largest number of block names in an iteration; each takes the driver a tenth of a millisecond."""


class WeightBlocks:
    """The blocks of one version of the weights.

    Args:
        placement: The placement of replicas and slices.
        slices: N.
        resources: The fit's Spark resources.

    Attributes:
        tell: The report sink with which an iteration that stores blocks must end.
    """

    def __init__(self, placement: Placement, slices: int, resources: FitResources) -> None:
        self._placement, self._slices, self._resources = placement, slices, resources
        self._reports = resources.context.accumulator([], Reports())
        self.tell = ToBlocks(self._reports, everything=placement.everything_travels)
        self._stored: RDD | None = None
        self._states: tuple[SliceHandle, ...] = ()
        self._old: list[RDD] = []
        self._executors: frozenset[str] = frozenset()

    def pay(self, states: tuple[SliceHandle, ...]) -> bool:
        """Return whether using blocks pays.

        It does if every replica needs some, and there are not too many to name, nor are they too
        large: they share storage memory with the user's cached data.
        """
        wanted = self._remote_slices(states)
        return (
            self._placement.few_bytes
            and all(wanted)
            and sum(map(len, set(map(tuple, wanted)))) <= MOST_NAMES
        )

    def of(self, states: tuple[SliceHandle, ...]) -> RDD | None:
        """Return the RDD of the blocks of exactly these weights, or None.

        After the loss of an executor there are none: tasks that look for its blocks would fail,
        each as often as Spark allows.
        """
        before, self._executors = self._executors, self._executors_now()
        if not before <= self._executors:
            self.forget()
        return self._stored if states == self._states else None

    def seats(self, stored: RDD, task: ReplicaTask, states: tuple[SliceHandle, ...]) -> RDD:
        """Return the RDD of a task at every replica's seat, with weights from stored blocks.

        The task gets the training samples, and its message from the job's.

        Args:
            stored: The RDD whose blocks hold the weights, see
                :class:`sparkdl.engines.shuffle.report_sinks.ToBlocks`. Each replica fetches the
                blocks of other nodes' slices.
            task: The task.
            states: The version that the blocks hold.
        """
        remote = self._remote_slices(states)
        padded = self._placement.padded(self._placement.samples, tuple(map(len, remote)))
        return map_frames(
            zip_frames(padded, stored_for(stored, remote)), AtReplicasWithWeights(task)
        )

    def _remote_slices(self, states: tuple[SliceHandle, ...]) -> list[list[int]]:
        """Return, for each replica, the slices that lie on other nodes."""
        nodes = self._placement.replica_nodes
        far = {
            token: [n for n, state in enumerate(states) if state.token != token]
            for token in set(nodes)
        }
        return [far[token] for token in nodes]

    def store(self, rdd: RDD, meanwhile: Callable[[], None]) -> list[SliceReport]:
        """Run an iteration that ends with :attr:`tell`, and return the report of every slice.

        If the iteration must run again, return a single report with a fault that gives the reason.

        Args:
            rdd: The RDD of the iteration.
            meanwhile: Is called while the job runs.
        """
        self._reports.value = []
        job = StoringJob(self._resources.stored(rdd))
        self._forget_old()
        meanwhile()
        try:
            job.wait()
        except Py4JError as error:
            self._old.append(rdd)
            if self._stored is None or not is_not_stored(error):
                raise
            self.forget()
            return _again(WEIGHTS_GONE)
        reports = sorted(self._reports.value, key=lambda report: report.index)
        if len(reports) < self._slices:
            self._old.append(rdd)
            return _again(REPORT_MISSING)
        states = tuple(report.state for report in reports if report.state is not None)
        if len(states) < self._slices or any(report.skipped for report in reports):
            self._old.append(rdd)  # the previous version stays
        else:
            if self._stored is not None:
                self._old.append(self._stored)
            self._stored, self._states = rdd, states
        return reports

    def forget(self) -> None:
        """Drop all blocks, because it is unknown which are left."""
        if self._stored is not None:
            self._old.append(self._stored)
        self._stored, self._states = None, ()

    def _executors_now(self) -> frozenset[str]:
        """Return the addresses of the executors that store blocks."""
        assert self._resources.context._jsc is not None
        addresses = self._resources.context._jsc.sc().getExecutorMemoryStatus().keySet()
        return frozenset(addresses.mkString(" ").split())

    def _forget_old(self) -> None:
        while self._old:
            self._resources.forget(self._old.pop())


def _again(kind: str) -> list[SliceReport]:
    return [SliceReport(0, "", None, faults=(Fault(kind, 0, ""),))]
