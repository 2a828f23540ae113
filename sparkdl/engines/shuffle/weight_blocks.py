"""Weights between nodes as blocks that Spark stores: an iteration needs no stage that sends them.

[Note: weights as blocks] The task that updates a slice puts its new weights out as the only frame of
its partition, and Spark stores that (in memory, or on disk) on the executor. The next iteration's tasks
fetch the blocks of other nodes' slices by name, as they would fetch those of any persisted RDD. So the
new weights are there when the job ends, and two stages are left of three. The state's slabs are what
counts: a block is a copy of the weights, and where it is lost, or the weights come from elsewhere (a
checkpoint, a snapshot), a stage sends them from the slabs. An accumulator takes the report of the task
that ended first; that may be one which found the block there already, of a twin or of an attempt before
it that failed afterwards. Then there is no report, and the iteration is submitted again.
"""

from __future__ import annotations

from collections.abc import Callable

from py4j.protocol import Py4JError
from pyspark.core.rdd import RDD

from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.messages import REPORT_MISSING, WEIGHTS_GONE
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.report_sinks import Reports, ToBlocks
from sparkdl.replica.iteration import Fault, SliceHandle, SliceReport
from sparkdl.spark.frames import StoringJob, is_not_stored

MOST_NAMES = 256
"""Of blocks, in an iteration: the driver takes a tenth of a millisecond for each."""


class WeightBlocks:
    """The blocks of one version of the weights. ``slices``: N."""

    def __init__(self, places: Placement, slices: int, resources: FitResources) -> None:
        self._places, self._slices, self._resources = places, slices, resources
        self._reports = resources.context.accumulator([], Reports())
        self.tell = ToBlocks(self._reports, everything=places.everything_travels)
        self._stored: RDD | None = None
        self._states: tuple[SliceHandle, ...] = ()
        self._old: list[RDD] = []
        self._executors: frozenset[str] = frozenset()

    def pay(self, states: tuple[SliceHandle, ...]) -> bool:
        """Whether every replica needs some, and there are not too many to be named, nor too large:
        they lie where the user's cached data do."""
        wanted = self._places.missing(states)
        return (
            self._places.few_bytes
            and all(wanted)
            and sum(map(len, set(map(tuple, wanted)))) <= MOST_NAMES
        )

    def of(self, states: tuple[SliceHandle, ...]) -> RDD | None:
        """The blocks of exactly these weights, if there are any. After an executor was lost there are
        none: tasks that look for what it had would fail, each as often as Spark lets them."""
        before, self._executors = self._executors, self._executors_now()
        if not before <= self._executors:
            self.forget()
        return self._stored if states == self._states else None

    def store(self, rdd: RDD, meanwhile: Callable[[], None]) -> list[SliceReport]:
        """Run an iteration that ends with :attr:`tell`; the report of every slice. ``meanwhile`` is
        done while it runs. Where it is to be run again, one report with the fault that says why."""
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
            self._old.append(rdd)  # the version before stays
        else:
            if self._stored is not None:
                self._old.append(self._stored)
            self._stored, self._states = rdd, states
        return reports

    def forget(self) -> None:
        """There are none, as far as anybody knows."""
        if self._stored is not None:
            self._old.append(self._stored)
        self._stored, self._states = None, ()

    def _executors_now(self) -> frozenset[str]:
        """Those that store blocks, by address."""
        assert self._resources.context._jsc is not None
        addresses = self._resources.context._jsc.sc().getExecutorMemoryStatus().keySet()
        return frozenset(addresses.mkString(" ").split())

    def _forget_old(self) -> None:
        while self._old:
            self._resources.forget(self._old.pop())


def _again(kind: str) -> list[SliceReport]:
    return [SliceReport(0, "", None, faults=(Fault(kind, 0, ""),))]
