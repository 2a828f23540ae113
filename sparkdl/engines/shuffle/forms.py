"""The forms of an iteration on one node: a single stage, or two jobs.

[Note: what an iteration pays for] Spark takes 5 ms to build and submit an empty job, 8 ms per stage
to launch and run it, and 5 ms to bring its results to Python. A shuffle between two stages costs
more than a second job. Therefore

* the RDDs of the next iteration are built while this one runs, and its shuffle files are deleted
  while the next one runs; the RDDs do not say what to do, because each job gets a message, see
  :mod:`sparkdl.spark.message`;
* results come through the JVM's future, see :class:`sparkdl.spark.frames.RunningJob`;
* on one node, where only references travel, these go through the driver: each stage is a job, and
  its RDD is the same for all iterations (:class:`TwoJobs`);
* a small model's iteration is one stage (:class:`OneStage`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from pyspark import RDD

from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.messages import (
    FORWARD_BACKWARD,
    REDUCTION,
    SYNCHRONIZATION,
    IterationMessage,
    OneStageReport,
    PendingGradients,
)
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_tasks import OneStageTask
from sparkdl.engines.shuffle.reports import IterationReports, states_of
from sparkdl.engines.shuffle.update_tasks import (
    ApplyPending,
    ReducePending,
    Reductions,
    UpdateReduced,
)
from sparkdl.loop.iteration_result import summed
from sparkdl.replica.iteration import Fault, SliceReport
from sparkdl.spark.frames import RunningJob, map_frames, stage_name
from sparkdl.spark.message import post

STAGE_SECONDS = 0.010
"""The measured cost of a stage (docs/internals/engine-notes.md), and so the most by which the tasks of
a single stage may take longer than those of two."""
ONE_STAGE = "forward-backward and synchronization"


class Form(Protocol):
    """A way to run an iteration as Spark jobs. A form keeps nothing from one iteration to the next."""

    applies_pending: ClassVar[bool]
    """True if its tasks apply the gradients that the iteration before left pending."""

    def submit(self, message: IterationMessage) -> IterationReports | None:
        """Run the iteration, and return its reports.

        Return None if a message to its tasks would be too large. What was computed until then does
        not count.
        """


class IterationRdds:
    """The RDDs of iterations that are built before they are needed.

    They depend on the placement of replicas and slices, not on the iteration.
    """

    def __init__(self) -> None:
        self._built: dict[str, RDD] = {}
        self._next: tuple[object, RDD] | None = None

    def once(self, name: str, build: Callable[[], RDD]) -> RDD:
        """Return the RDD called ``name``, which is built when it is first asked for."""
        if name not in self._built:
            self._built[name] = build()
        return self._built[name]

    def keep_next(self, key: object, rdd: RDD) -> None:
        """Keep the RDD that the next iteration probably needs; ``key`` is all that it depends on."""
        self._next = key, rdd

    def take_next(self, key: object) -> RDD | None:
        """Return the RDD kept last if it fits ``key``, and keep it no more."""
        kept, self._next = self._next, None
        return kept[1] if kept is not None and kept[0] == key else None

    def forget(self) -> None:
        """Drop all RDDs, because replicas and slices are placed anew."""
        self._built.clear()
        self._next = None


def run_job(rdd: RDD, count: int, name: str, meanwhile: Callable[[], None]) -> list[Any]:
    """Run a job and return its ``count`` reports; call ``meanwhile`` while it runs."""
    with stage_name(rdd.ctx, name):
        job = RunningJob(rdd, count)
        meanwhile()
    return [pickle.loads(frame) for frame in job.frames()]


@dataclass(frozen=True)
class _OnOneNode:
    """A form whose jobs have one stage each, over RDDs that are built only once.

    Attributes:
        placement: The placement of replicas and slices.
        rdds: The RDDs that are built already.
        resources: The fit's Spark resources.
    """

    placement: Placement
    rdds: IterationRdds
    resources: FitResources

    def _job(self, name: str, told: Any, build: Callable[[], RDD], count: int) -> list[Any] | None:
        """Return the ``count`` reports of a job; None if ``told`` is too large for a message."""
        if not post(self.resources.context, self.placement.fit, told):
            return None
        rdd = self.rdds.once(name, build)
        return run_job(rdd, count, name, lambda: self.resources.shuffled(None))

    def _at_replicas(self, name: str, message: IterationMessage) -> list[OneStageReport] | None:
        count = len(self.placement.replica_nodes)
        return self._job(
            name, message, lambda: self.placement.tasks_by_message(OneStageTask()), count
        )


@dataclass(frozen=True)
class OneStage(_OnOneNode):
    """The form in which an iteration is a single stage, for small models.

    Its tasks apply the gradients that the iteration before left pending, and leave their own
    pending, see :class:`sparkdl.engines.shuffle.replica_tasks.OneStageTask`.
    """

    applies_pending: ClassVar[bool] = True

    def submit(self, message: IterationMessage) -> IterationReports | None:
        """Run the iteration; see :class:`Form`."""
        found = self._at_replicas(ONE_STAGE, message)
        if found is None:
            return None
        reports = IterationReports(
            faults=_faults(found),
            replicas=tuple(one.headers[0].report for one in found if one.headers[0].report),
            applied=states_of(found[0].slices),
            update_seconds=tuple(summed([each.seconds for each in one.slices]) for one in found),
        )
        if message.falls_short(report.passed for report in reports.replicas):
            return replace(reports, falls_short=True)
        if reports.faults or reports.skipped:
            return reports
        return replace(reports, pending=PendingGradients.of(message, found))


@dataclass(frozen=True)
class TwoJobs(_OnOneNode):
    """The form in which forward-backward is a job, and synchronization is one (or two, with norms).

    The driver passes the references of the gradients on.
    """

    applies_pending: ClassVar[bool] = False

    def submit(self, message: IterationMessage) -> IterationReports | None:
        """Run the iteration; see :class:`Form`."""
        found = self._at_replicas(FORWARD_BACKWARD, message)
        if found is None:
            return None
        faults = _faults(found)
        if faults:
            return IterationReports(faults=faults)
        slices = self._at_slices(replace(message, pending=PendingGradients.of(message, found)))
        if slices is None:
            return None
        headers = [header for one in found for header in one.headers]
        replicas = tuple(header.report for header in headers if header.report)
        return IterationReports.of(slices, replicas=replicas)

    def _at_slices(self, message: IterationMessage) -> list[SliceReport] | None:
        """Apply pending gradients; in two jobs if the norm must be known before the update."""
        if self.placement.two_stages:
            return self._slice_job(SYNCHRONIZATION, message, ApplyPending())
        reduced = self._slice_job(REDUCTION, message, ReducePending())
        if reduced is None:
            return None
        given = Reductions(replace(message, pending=None), tuple(reduced))
        return self._slice_job(SYNCHRONIZATION, given, UpdateReduced())

    def _slice_job(self, name: str, told: Any, task: Callable[..., Any]) -> list[Any] | None:
        rdd = self.placement.slice_rdd
        return self._job(name, told, lambda: map_frames(rdd, task), self.placement.slices)


def _faults(reports: list[OneStageReport]) -> tuple[Fault, ...]:
    return tuple(header.fault for one in reports for header in one.headers if header.fault)
