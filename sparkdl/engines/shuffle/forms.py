"""The forms of an iteration on one node: a single stage, or two jobs.

[Note: what an iteration pays for] Spark takes 5 ms to build and submit an empty job, 8 ms per stage
to launch and run it, and 5 ms to bring its results to Python. A shuffle between two stages costs
more than a second job. Therefore

* the shuffle files of an iteration are deleted while the next one runs;
* what changes from one iteration to the next is in its task bodies alone, and such an RDD takes four
  calls of the JVM, see :func:`sparkdl.spark.frames.map_frames`; Spark writes the local
  properties of a job into its event log, with the job and each of its stages, but no task bodies;
* results come through the JVM's future, see :class:`sparkdl.spark.frames.RunningJob`;
* on one node, where only references travel, these go through the driver: each stage is a job
  (:class:`TwoJobs`);
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
    UpdateReduced,
)
from sparkdl.loop.iteration_result import summed
from sparkdl.replica.iteration import Fault, SliceReport
from sparkdl.spark.frames import RunningJob, map_frames, stage_name

STAGE_SECONDS = 0.010
"""The measured cost of a stage (docs/internals/engine-notes.md), and so the most by which the tasks of
a single stage may take longer than those of two."""
MAX_BYTES = 48 << 10
"""The largest message of a form on one node: each of its tasks reads the headers of all replicas and
slices, where each task of a shuffle reads those of one."""
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


def run_job(rdd: RDD, count: int, name: str, meanwhile: Callable[[], None]) -> list[Any]:
    """Run a job and return its ``count`` reports; call ``meanwhile`` while it runs."""
    with stage_name(rdd.ctx, name):
        job = RunningJob(rdd, count)
        meanwhile()
    return [pickle.loads(frame) for frame in job.frames()]


@dataclass(frozen=True)
class _OnOneNode:
    """A form whose jobs have one stage each."""

    placement: Placement
    resources: FitResources

    def _job(self, name: str, rdd: RDD, count: int) -> list[Any]:
        return run_job(rdd, count, name, lambda: self.resources.shuffled(None))

    def _at_replicas(self, name: str, message: IterationMessage) -> list[OneStageReport] | None:
        """Return the reports of the replicas' tasks; None if the message is too large."""
        if _too_large(message):
            return None
        task, states = OneStageTask(message), message.read_states
        rdd = self.placement.tasks_with_weights(
            task, self.placement.samples, states, message.copies
        )
        return self._job(name, rdd, len(self.placement.replica_nodes))


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
        if _too_large(message):
            return None
        if self.placement.two_stages:
            return self._slice_job(SYNCHRONIZATION, ApplyPending(message))
        reduced = self._slice_job(REDUCTION, ReducePending(message))
        update = UpdateReduced(replace(message, pending=None), tuple(reduced))
        return self._slice_job(SYNCHRONIZATION, update)

    def _slice_job(self, name: str, task: Callable[..., Any]) -> list[Any]:
        return self._job(name, map_frames(self.placement.slice_rdd, task), self.placement.slices)


def _too_large(message: IterationMessage) -> bool:
    return len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) > MAX_BYTES


def _faults(reports: list[OneStageReport]) -> tuple[Fault, ...]:
    return tuple(header.fault for one in reports for header in one.headers if header.fault)
