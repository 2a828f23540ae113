"""The Spark jobs of an iteration, in each of its forms.

[Note: what an iteration pays for] Spark takes 5 ms to build and submit an empty job, 8 ms per stage
to launch and run it, and 5 ms to bring its results to Python. A shuffle between two stages costs
more than a second job. Therefore

* the RDDs of the next iteration are built while this one runs, and its shuffle files are deleted
  while the next one runs; the RDDs do not say what to do, because each job gets a message, see
  :mod:`sparkdl.spark.message`;
* results come through the JVM's future, see :class:`sparkdl.spark.frames.RunningJob`;
* on one node, where only references travel, these go through the driver: each stage is a job, and
  its RDD is the same for all iterations;
* a small model's iteration is one stage, see
  :class:`sparkdl.engines.shuffle.replica_tasks.OneStageTask`;
* between nodes, synchronization stores the new weights as blocks, which the tasks of the next
  iteration fetch, so that no stage sends them; see
  :class:`sparkdl.engines.shuffle.weight_blocks.WeightBlocks`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.core.rdd import RDD

from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.messages import (
    IterationMessage,
    NodeWeights,
    OneStageReport,
    PendingGradients,
)
from sparkdl.engines.shuffle.node_reduce import ReceiveWeights, ReduceOnNode, SendWeights
from sparkdl.engines.shuffle.node_sums import NodeReducePlan
from sparkdl.engines.shuffle.pending import ApplyPending, ReducePending, Reductions, UpdateReduced
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_tasks import ForwardBackward, OneStageTask
from sparkdl.engines.shuffle.report_sinks import NodeReports, ReportSink, to_driver
from sparkdl.engines.shuffle.traffic import Nodes, between_nodes
from sparkdl.engines.shuffle.update_tasks import Reduce, Synchronize, Update
from sparkdl.engines.shuffle.weight_blocks import WeightBlocks
from sparkdl.loop.engine import Traffic
from sparkdl.replica.iteration import SliceHandle, SliceReport
from sparkdl.spark.frames import (
    RunningJob,
    collect_and_forget,
    map_frames,
    shuffle_frames,
    stage_name,
    zip_frames,
)
from sparkdl.spark.message import post

AT_ONCE = "forward-backward and synchronization"
FORWARD_BACKWARD = "forward-backward"
REDUCTION = "reduce"
SYNCHRONIZATION = "parameter synchronization"
INSTALLATION = "weights to the nodes"


@dataclass(frozen=True)
class IterationReports:
    """The reports of an iteration that ran in stages.

    Attributes:
        reports: One report per slice, in order.
        installed: If nodes sum, the copies of the new weights that each seat wrote for its node.
    """

    reports: list[SliceReport]
    installed: tuple[NodeWeights, ...] = ()

    def traffic(self, states: Sequence[SliceHandle]) -> dict[str, Traffic]:
        """Return the traffic of each node; ``states`` is the version that the iteration began with."""
        replicas = {report.replica: report for report in self.reports[0].replicas}
        gradients = [
            (replicas[m].token, report.token, nbytes)
            for report in self.reports
            for m, nbytes in report.received.items()
        ]
        to_replicas = [
            (states[n].token, replica.token, nbytes)
            for replica in replicas.values()
            for n, nbytes in replica.received.items()
        ]
        to_nodes = [
            (self.reports[n].token, node.token, copy.weights.nbytes)
            for node in self.installed
            for n, copy in node.copies.items()
        ]
        return between_nodes(gradients, [*to_replicas, *to_nodes])


class IterationJobs:
    """The submission of iterations as Spark jobs.

    Args:
        places: The placement of replicas and owners.
        slices: N.
        node_sums: The choice of whether nodes sum their replicas' gradients.
        resources: The fit's Spark resources.
    """

    def __init__(
        self, places: Placement, slices: int, node_sums: NodeReducePlan, resources: FitResources
    ) -> None:
        self._places, self._slices, self._resources = places, slices, resources
        self._node_sums = node_sums
        self._context = resources.context
        self._blocks = WeightBlocks(places, slices, resources)
        self._here: dict[str, RDD] = {}
        self._untold = False
        self._next: RDD | None = None
        self._next_for: object = None

    def forget(self) -> None:
        """Drop the RDDs that were built for the present placement, so that they are built anew."""
        self._here.clear()
        self._blocks.forget()
        self._next = None

    def at_once(self, step: IterationMessage) -> list[OneStageReport] | None:
        """Run an iteration as one stage, and return one report per replica.

        Returns None, without running anything, if the step is too large for a message.
        """
        return self._at_seats(AT_ONCE, step)

    def on_one_node(self, step: IterationMessage) -> IterationReports | None:
        """Run an iteration with each stage as a job of its own, and return its reports.

        Returns None if the step, or a later part of it, is too large for a message.
        """
        seats = None if self._untold else self._at_seats(FORWARD_BACKWARD, step)
        if seats is None:
            return None
        headers = [header for seat in seats for header in seat.headers]
        faults = tuple(header.fault for header in headers if header.fault)
        if faults:
            return IterationReports([SliceReport(0, "", None, faults=faults)])
        reports = self._at_owners(replace(step, pending=PendingGradients.of(step, seats)))
        if reports is None:
            self._untold = True
            return None
        replicas = tuple(header.report for header in headers if header.report)
        return IterationReports([replace(reports[0], replicas=replicas), *reports[1:]])

    def _at_seats(self, name: str, step: IterationMessage) -> list[OneStageReport] | None:
        places = self._places

        def build() -> RDD:
            return places.at_seats(OneStageTask(), places.samples, step.states, told=True)

        return self._one_stage(name, step, build, len(places.tokens))

    def _at_owners(self, step: IterationMessage) -> list[SliceReport] | None:
        """Apply pending gradients; in two stages if the norm must be known before the update."""
        if self._places.two_stages:
            return self._one_stage(SYNCHRONIZATION, step, self._owners(ApplyPending()))
        reduced = self._one_stage(REDUCTION, step, self._owners(ReducePending()))
        if reduced is None:
            return None
        given = Reductions(replace(step, pending=None), tuple(reduced))
        return self._one_stage(SYNCHRONIZATION, given, self._owners(UpdateReduced()))

    def _owners(self, task: Callable[..., Any]) -> Callable[[], RDD]:
        return lambda: map_frames(self._places.owners, task)

    def _one_stage(
        self, name: str, told: Any, build: Callable[[], RDD], count: int | None = None
    ) -> list[Any] | None:
        """Return the reports of a job over an RDD that is built only once.

        Return None if ``told`` is too large for a message.
        """
        if not post(self._context, self._places.fit, told):
            return None
        if name not in self._here:
            self._here[name] = build()
        count = self._slices if count is None else count
        return self._run(self._here[name], count, name, lambda: self._resources.shuffled(None))

    def in_stages(self, step: IterationMessage) -> IterationReports:
        """Run forward-backward, then synchronization, and return the reports.

        If it saves enough time, nodes sum the gradients in between and share the new weights.
        """
        states, nodes = step.states, self._nodes_that_sum(step.states)
        if nodes is not None and not self._places.near(states):
            begun = self._hand_on(step, nodes)
            if any(report.faults for report in begun.reports):
                return begun
            self._places.note_copies(states, begun.installed)
        step = replace(step, copies=self._places.copies_of(states))
        name = SYNCHRONIZATION if nodes is None else INSTALLATION
        count = self._slices if nodes is None else len(self._places.tokens)
        if not post(self._context, self._places.fit, step):
            alone = self._build(states, nodes, step)
            return _joined(self._run(alone, count, name, lambda: self._resources.shuffled(alone)))
        storing = nodes is None and self._blocks.pay(states)
        fetched = self._blocks.of(states) if storing else None
        key = self._key(states, nodes, fetched)
        ready = self._next if self._next_for == key else None
        rdd = ready or self._build(states, nodes, fetched=fetched, storing=storing)
        self._next = None

        def prepare() -> None:
            self._prepare(rdd, states, nodes, storing)

        if storing:
            with stage_name(self._context, name):
                return _joined(self._blocks.store(rdd, prepare))
        return _joined(self._run(rdd, count, name, prepare))

    def _nodes_that_sum(self, states: tuple[SliceHandle, ...]) -> Nodes | None:
        return self._node_sums.chosen(self._places.tokens, states)

    def _prepare(
        self, running: RDD, states: tuple[SliceHandle, ...], nodes: Nodes | None, storing: bool
    ) -> None:
        """While ``running`` runs, delete the previous shuffle and build the RDD that probably
        follows."""
        self._resources.shuffled(running)
        fetched = running if storing else None
        self._next = self._build(states, nodes, fetched=fetched, storing=storing)
        self._next_for = self._key(states, nodes, fetched)

    def _key(
        self, states: tuple[SliceHandle, ...], nodes: Nodes | None, fetched: RDD | None
    ) -> object:
        """Return a key of everything that the RDDs of an iteration depend on."""
        places = self._places
        nearby = places.near(states)
        return places.samples, places.tokens, tuple(s.token for s in states), nodes, nearby, fetched

    def _run(self, rdd: RDD, count: int, name: str, meanwhile: Callable[[], None]) -> list[Any]:
        """Run a job and return its ``count`` reports; call ``meanwhile`` while it runs."""
        with stage_name(self._context, name):
            job = RunningJob(rdd, count)
            meanwhile()
        return [pickle.loads(frame) for frame in job.frames()]

    def _build(
        self,
        states: tuple[SliceHandle, ...],
        nodes: Nodes | None,
        step: IterationMessage | None = None,
        fetched: RDD | None = None,
        storing: bool = False,
    ) -> RDD:
        """Build the RDDs of an iteration.

        Args:
            states: The version that the iteration begins with.
            nodes: The nodes that sum, or None.
            step: The step to put into the task bodies if it is too large for a message, else None.
            fetched: The RDD whose stored blocks hold the weights, or None.
            storing: Whether the new weights shall become blocks.
        """
        places, told, replicas = self._places, step is None, len(self._places.tokens)
        with stage_name(self._context, FORWARD_BACKWARD):
            body = ForwardBackward(step, nodes)
            if fetched is not None:
                gradients = places.at_seats_from(fetched, body, states)
            else:
                gradients = places.at_seats(body, places.samples, states, told=told)
            received = self._send(gradients, self._slices if nodes is None else replicas)
        if nodes is not None:
            with stage_name(self._context, "sum on the nodes"):
                offers = zip_frames(received, places.counted(replicas))
                received = self._send(map_frames(offers, ReduceOnNode(nodes)), self._slices)
        if not places.two_stages:
            with stage_name(self._context, REDUCTION):
                reduced = map_frames(zip_frames(received, places.owners), Reduce(step))
                received = self._send(reduced, self._slices)
        tell: ReportSink = (
            self._blocks.tell if storing else NodeReports(nodes) if nodes else to_driver
        )
        update = Synchronize(step, tell) if places.two_stages else Update(step, tell)
        owners = places.owners if places.two_stages else places.updaters
        with stage_name(self._context, SYNCHRONIZATION):
            updated = map_frames(zip_frames(received, owners), update)
            return updated if nodes is None else self._install(updated, step)

    def _send(self, keyed: RDD, partitions: int) -> RDD:
        return shuffle_frames(keyed, partitions, few_bytes=self._places.few_bytes)

    def _install(self, weight_frames: RDD, step: IterationMessage | None) -> RDD:
        """Send frames with weights to every replica's seat, and write them into slabs there."""
        arrived = self._send(weight_frames, len(self._places.tokens))
        return map_frames(
            zip_frames(arrived, self._places.counted(self._slices)), ReceiveWeights(step)
        )

    def _hand_on(self, step: IterationMessage, nodes: Nodes) -> IterationReports:
        """Send the present weights once to each node that lacks them."""
        with stage_name(self._context, INSTALLATION):
            owners = map_frames(self._places.owners, SendWeights(step.states, nodes))
            installed = collect_and_forget(self._install(owners, step))
        return _joined([pickle.loads(frame) for frame in installed])


def _joined(results: Sequence[SliceReport | NodeWeights]) -> IterationReports:
    installed = tuple(result for result in results if isinstance(result, NodeWeights))
    reports = [result for result in results if isinstance(result, SliceReport)]
    reports += [report for node in installed for report in node.reports]
    return IterationReports(sorted(reports, key=lambda report: report.index), installed)
