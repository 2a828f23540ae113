"""The forms of an iteration: a single stage, two jobs, or stages that meet at a shuffle.

The first two are for a single node. :class:`FormChooser` chooses by what an iteration asks for, and by
measuring the update.

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

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from pyspark import RDD

from sparkdl.engines.delivery import EngineInputs
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.messages import (
    FORWARD_BACKWARD,
    REDUCTION,
    SYNCHRONIZATION,
    IterationMessage,
    IterationReports,
    NodeCopies,
    Nodes,
    NodeWeights,
    OneStageReport,
    PendingGradients,
    SliceBytes,
    copies_by_node,
    planned,
    states_of,
)
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_context import at_owner
from sparkdl.engines.shuffle.replica_tasks import leave_gradients, send_gradients
from sparkdl.engines.shuffle.update_tasks import (
    ReportSink,
    apply_pending,
    at_slice,
    receive_weights,
    reduce_on_node,
    reduce_pending,
    reduce_slice,
    send_weights,
    synchronize,
    to_driver,
    to_slices,
    update_arrived,
    update_slice,
    weight_frames,
)
from sparkdl.gang.slots import task_slots
from sparkdl.loop.advance import busiest, summed
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.replica.iteration import Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import slice_specs
from sparkdl.spark.frames import (
    RunningJob,
    collect_and_forget,
    map_frames,
    shuffle_frames,
    stage_name,
    zip_frames,
)

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
        task, states = partial(leave_gradients, message), message.read_states
        rdd = self.placement.tasks_with_weights(
            task, self.placement.samples, states, message.copies
        )
        return self._job(name, rdd, len(self.placement.replica_nodes))


@dataclass(frozen=True)
class OneStage(_OnOneNode):
    """The form in which an iteration is a single stage, for small models.

    Its tasks apply the gradients that the iteration before left pending, and leave their own
    pending, see :func:`sparkdl.engines.shuffle.replica_tasks.leave_gradients`.
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
            return self._slice_job(SYNCHRONIZATION, partial(apply_pending, message))
        reduced = self._slice_job(REDUCTION, partial(reduce_pending, message))
        update = partial(update_slice, replace(message, pending=None), headers=tuple(reduced))
        return self._slice_job(SYNCHRONIZATION, update)

    def _slice_job(self, name: str, work: Callable[..., Any]) -> list[Any]:
        tasks = map_frames(self.placement.slice_rdd, partial(at_owner, work))
        return self._job(name, tasks, self.placement.slices)


def _too_large(message: IterationMessage) -> bool:
    return len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)) > MAX_BYTES


def _faults(reports: list[OneStageReport]) -> tuple[Fault, ...]:
    return tuple(header.fault for one in reports for header in one.headers if header.fault)


NODE_REDUCTION = "sum on the nodes"
INSTALLATION = "weights to the nodes"


MORE_STAGES = 2
"""The additional stages if nodes sum: one to combine gradients and one to install weights."""
BYTES_PER_SECOND = 2e8
"""The approximate throughput of the shuffle between two nodes.

The network is a small part of it: writing and reading take Spark and Python 10 ns of processor time
per byte (benchmarks/between_nodes.py).
"""


class NodeReducePlan:
    """The decision made from the nodes of replicas and owners; the bits are the same either way."""

    def __init__(self, layout: Layout, run: RunSpec, options: TrainingOptions) -> None:
        wire = (options.wire_dtype or layout.dtype).itemsize
        flat = layout.dtype.itemsize
        # After local steps, optimizer state travels too; compressed gradients cannot be summed yet.
        self._possible = options.local_steps == 1 and not run.keeps_tensors
        self._slices = [
            SliceBytes(plan.dense_length * wire, plan.dense_length * flat, plan.length * flat)
            for plan in slice_specs(layout, run.slices, whole=run.whole_tensors)
        ]

    def chosen(self, node_ids: tuple[str, ...], states: Sequence[SliceHandle]) -> Nodes | None:
        """Return the nodes if they should sum; None if each replica should send its gradients."""
        nodes = Nodes(node_ids, tuple(state.node_id for state in states))
        if not self._possible or len({*nodes.replicas, *nodes.slices}) == 1:
            return None
        plain, summed = (busiest(planned(nodes, self._slices, way)) for way in (False, True))
        saved = (plain - summed) / BYTES_PER_SECOND
        return nodes if saved > MORE_STAGES * STAGE_SECONDS else None


@dataclass(frozen=True)
class Shuffled:
    """The form in which forward-backward and synchronization meet at a shuffle.

    If it saves enough time, nodes sum the gradients in between and share the new weights.
    """

    placement: Placement
    resources: FitResources
    node_sums: NodeReducePlan

    applies_pending: ClassVar[bool] = False

    @staticmethod
    def of(inputs: EngineInputs, placement: Placement) -> Shuffled:
        node_sums = NodeReducePlan(inputs.layout, inputs.run, inputs.recipe.options)
        return Shuffled(placement, inputs.spark, node_sums)

    def submit(self, message: IterationMessage) -> IterationReports:
        """Run the iteration; see :class:`sparkdl.engines.shuffle.forms.Form`. It is never None."""
        placement, read = self.placement, message.read_states
        nodes = self.node_sums.chosen(placement.replica_nodes, read)
        if message.limit is not None and message.limit.seconds is not None:
            nodes = None  # attempts of a replica may differ, and in a sum nobody would see that
        copies: NodeCopies = {}
        if nodes is not None and not placement.has_all_weights(read, message.copies):
            begun = self._hand_on(message, nodes)
            if begun.faults:
                return begun
            copies = copies_by_node(begun.installed)
            message = replace(message, copies=copies)
        return replace(self._run(message, nodes), copies=copies)

    def _run(self, message: IterationMessage, nodes: Nodes | None) -> IterationReports:
        placement = self.placement
        name = SYNCHRONIZATION if nodes is None else INSTALLATION
        count = placement.slices if nodes is None else len(placement.replica_nodes)
        rdd = self._build(message, nodes)
        return _joined(run_job(rdd, count, name, lambda: self.resources.shuffled(rdd)))

    def _build(self, message: IterationMessage, nodes: Nodes | None) -> RDD:
        """Build the RDDs of an iteration. ``nodes`` are those that sum, if they do."""
        placement = self.placement
        read, copies, replicas = message.read_states, message.copies, len(placement.replica_nodes)
        with stage_name(self.resources.context, FORWARD_BACKWARD):
            body, samples = partial(send_gradients, message, nodes), placement.samples
            gradients = placement.tasks_with_weights(body, samples, read, copies)
            received = self._send(gradients, placement.slices if nodes is None else replicas)
        if nodes is not None:
            with stage_name(self.resources.context, NODE_REDUCTION):
                offers = zip_frames(received, placement.replicas_counted(replicas))
                received = self._send(
                    map_frames(offers, partial(reduce_on_node, nodes)), placement.slices
                )
        if not placement.two_stages:
            with stage_name(self.resources.context, REDUCTION):
                reduce = partial(at_slice, partial(reduce_slice, message), to_slices)
                reduced = map_frames(zip_frames(received, placement.slice_rdd), reduce)
                received = self._send(reduced, placement.slices)
        tell: ReportSink = to_driver if nodes is None else partial(weight_frames, nodes)
        update = partial(synchronize if placement.two_stages else update_arrived, message)
        owners = placement.slice_rdd if placement.two_stages else placement.slices_counted
        with stage_name(self.resources.context, SYNCHRONIZATION):
            updated = map_frames(zip_frames(received, owners), partial(at_slice, update, tell))
            return updated if nodes is None else self._install(updated, message)

    def _send(self, keyed: RDD, partitions: int) -> RDD:
        return shuffle_frames(keyed, partitions, few_bytes=self.placement.few_bytes)

    def _install(self, weight_frames: RDD, message: IterationMessage) -> RDD:
        """Send frames with weights to every replica, and write them into slabs there."""
        placement = self.placement
        arrived = self._send(weight_frames, len(placement.replica_nodes))
        replicas = placement.replicas_counted(placement.slices)
        return map_frames(zip_frames(arrived, replicas), partial(receive_weights, message))

    def _hand_on(self, message: IterationMessage, nodes: Nodes) -> IterationReports:
        """Send the weights that replicas compute on once to each node that lacks them."""
        with stage_name(self.resources.context, INSTALLATION):
            task = partial(send_weights, message.read_states, nodes)
            sent = map_frames(self.placement.slice_rdd, task)
            installed = collect_and_forget(self._install(sent, message))
        return _joined([pickle.loads(frame) for frame in installed])


def _joined(results: Sequence[SliceReport | NodeWeights]) -> IterationReports:
    installed = tuple(result for result in results if isinstance(result, NodeWeights))
    slices = [result for result in results if isinstance(result, SliceReport)]
    slices += [report for node in installed for report in node.reports]
    return IterationReports.of(slices, installed=installed)


TRIALS = 3
"""The number of updates to measure first. The fastest counts, because the first ones include setup."""


class FormChooser:
    """The choice among the forms of an iteration.

    With one stage, each of M replicas updates all N slices; with two, each slice is updated once.
    The bits are the same in every form, so a choice that depends on timing does not affect results.
    """

    def __init__(self, inputs: EngineInputs, placement: Placement, stages: str) -> None:
        self._stages, self._placement = stages, placement
        self._clips_norm = inputs.recipe.options.clips_norm
        replicas, slices = inputs.run.replicas, inputs.run.slices
        slots = task_slots(inputs.spark.context)
        one, two = math.ceil(replicas / slots) * slices, math.ceil(slices / slots)
        self._more = one - two
        self._seconds: list[float] = []
        self._one_stage = OneStage(placement, inputs.spark)
        self._two_jobs = TwoJobs(placement, inputs.spark)
        self._shuffled = Shuffled.of(inputs, placement)
        self._ruled_out: set[type[Form]] = set()

    def choose(self, message: IterationMessage) -> list[Form]:
        """Return the forms that the iteration can have, the best one first.

        One stage leaves norms and histograms to the next iteration, so it cannot be if they must be
        known when this one ends.
        """
        found: list[Form] = []
        if self._placement.single_node(message.states):
            early = self._clips_norm or message.histograms
            if self._one_stage_pays and not early:
                found.append(self._one_stage)
            if self._stages != "shuffle":
                found.append(self._two_jobs)
        return [*(form for form in found if type(form) not in self._ruled_out), self._shuffled]

    @property
    def _one_stage_pays(self) -> bool:
        """Return whether one stage is better, as far as has been measured."""
        if self._stages != "auto":
            return self._stages == "one"
        measured = len(self._seconds) >= TRIALS
        return measured and self._more * min(self._seconds) < STAGE_SECONDS

    def rule_out(self, form: Form) -> None:
        """Choose a form no more, because its messages are too large."""
        self._ruled_out.add(type(form))

    def note(self, reports: IterationReports) -> None:
        """Record how long the tasks took that updated one slice each."""
        if reports.slices and not reports.skipped and len(self._seconds) < TRIALS:
            self._seconds.append(max(sum(each.seconds.values()) for each in reports.slices))
