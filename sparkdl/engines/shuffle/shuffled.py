"""The form of an iteration in stages that meet at a shuffle, on any number of nodes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pyspark import RDD

from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.forms import STAGE_SECONDS, run_job
from sparkdl.engines.shuffle.messages import (
    FORWARD_BACKWARD,
    REDUCTION,
    SYNCHRONIZATION,
    IterationMessage,
    NodeCopies,
    NodeWeights,
)
from sparkdl.engines.shuffle.node_reduce import ReceiveWeights, ReduceOnNode, SendWeights
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_tasks import ForwardBackward
from sparkdl.engines.shuffle.report_sinks import NodeReports, ReportSink, to_driver
from sparkdl.engines.shuffle.reports import IterationReports, copies_by_node
from sparkdl.engines.shuffle.spec import ShuffleSpec
from sparkdl.engines.shuffle.traffic import Nodes, SliceBytes, planned
from sparkdl.engines.shuffle.update_tasks import Reduce, Synchronize, Update
from sparkdl.loop.iteration_result import busiest
from sparkdl.model.layout import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.iteration import SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import slice_specs
from sparkdl.spark.frames import (
    collect_and_forget,
    map_frames,
    shuffle_frames,
    stage_name,
    zip_frames,
)

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
    def of(spec: ShuffleSpec, placement: Placement) -> Shuffled:
        node_sums = NodeReducePlan(spec.layout, spec.run, spec.options)
        return Shuffled(placement, spec.resources, node_sums)

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
            body, samples = ForwardBackward(message, nodes), placement.samples
            gradients = placement.tasks_with_weights(body, samples, read, copies)
            received = self._send(gradients, placement.slices if nodes is None else replicas)
        if nodes is not None:
            with stage_name(self.resources.context, NODE_REDUCTION):
                offers = zip_frames(received, placement.replicas_counted(replicas))
                received = self._send(map_frames(offers, ReduceOnNode(nodes)), placement.slices)
        if not placement.two_stages:
            with stage_name(self.resources.context, REDUCTION):
                reduced = map_frames(zip_frames(received, placement.slice_rdd), Reduce(message))
                received = self._send(reduced, placement.slices)
        tell: ReportSink = to_driver if nodes is None else NodeReports(nodes)
        update = Synchronize(message, tell) if placement.two_stages else Update(message, tell)
        owners = placement.slice_rdd if placement.two_stages else placement.slices_counted
        with stage_name(self.resources.context, SYNCHRONIZATION):
            updated = map_frames(zip_frames(received, owners), update)
            return updated if nodes is None else self._install(updated, message)

    def _send(self, keyed: RDD, partitions: int) -> RDD:
        return shuffle_frames(keyed, partitions, few_bytes=self.placement.few_bytes)

    def _install(self, weight_frames: RDD, message: IterationMessage) -> RDD:
        """Send frames with weights to every replica, and write them into slabs there."""
        placement = self.placement
        arrived = self._send(weight_frames, len(placement.replica_nodes))
        replicas = placement.replicas_counted(placement.slices)
        return map_frames(zip_frames(arrived, replicas), ReceiveWeights(message))

    def _hand_on(self, message: IterationMessage, nodes: Nodes) -> IterationReports:
        """Send the weights that replicas compute on once to each node that lacks them."""
        with stage_name(self.resources.context, INSTALLATION):
            task = SendWeights(message.read_states, nodes)
            sent = map_frames(self.placement.slice_rdd, task)
            installed = collect_and_forget(self._install(sent, message))
        return _joined([pickle.loads(frame) for frame in installed])


def _joined(results: Sequence[SliceReport | NodeWeights]) -> IterationReports:
    installed = tuple(result for result in results if isinstance(result, NodeWeights))
    slices = [result for result in results if isinstance(result, SliceReport)]
    slices += [report for node in installed for report in node.reports]
    return IterationReports.of(slices, installed=installed)
