"""The reports of an iteration, in the same form however its jobs ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.engines.shuffle.faults import UNLIKE
from sparkdl.engines.shuffle.messages import NodeCopies, NodeWeights, PendingGradients
from sparkdl.engines.shuffle.traffic import between_nodes
from sparkdl.loop.iteration_result import Traffic
from sparkdl.replica.iteration import Fault, ReplicaReport, SliceHandle, SliceReport


@dataclass(frozen=True, kw_only=True)
class IterationReports:
    """The reports of an iteration."""

    faults: tuple[Fault, ...] = ()  # why nothing was done; then nothing else counts
    replicas: tuple[ReplicaReport, ...] = ()
    slices: tuple[SliceReport, ...] = ()  # in order; empty: the gradients are pending
    pending: PendingGradients | None = None  # None: applied, or one is not finite
    applied: tuple[SliceHandle, ...] = ()  # the version made of gradients pending before
    update_seconds: tuple[Mapping[str, float], ...] = ()
    copies: NodeCopies = field(default_factory=dict)
    installed: tuple[NodeWeights, ...] = ()
    falls_short: bool = False

    @staticmethod
    def of(slices: Sequence[SliceReport], **rest: Any) -> IterationReports:
        """Make the reports of an iteration from those of its slices, in any order.

        ``rest`` are other fields. Without ``replicas``, the report of the first slice has them.
        """
        ordered = tuple(sorted(slices, key=lambda report: report.index))
        return IterationReports(
            faults=_faults(ordered),
            slices=ordered,
            update_seconds=tuple(report.seconds for report in ordered),
            **{"replicas": ordered[0].replicas, **rest},
        )

    @property
    def skipped(self) -> bool:
        """Return whether nothing is updated: something is not finite, or too much was left out."""
        skipped = any(report.skipped for report in self.slices) or self.falls_short
        return skipped or any(report.not_finite for report in self.replicas)

    def traffic(self, states: Sequence[SliceHandle]) -> dict[str, Traffic]:
        """Return the traffic of each node; ``states`` is the version that replicas computed on."""
        replicas = {report.replica: report for report in self.replicas}
        gradients = [
            (replicas[m].node_id, report.node_id, nbytes)
            for report in self.slices
            for m, nbytes in report.received.items()
        ]
        to_replicas = [
            (states[n].node_id, replica.node_id, nbytes)
            for replica in self.replicas
            for n, nbytes in replica.received.items()
        ]
        to_nodes = [
            (self.slices[n].node_id, node.node_id, copy.weights.nbytes)
            for node in self.installed
            for n, copy in node.copies.items()
        ]
        return between_nodes(gradients, [*to_replicas, *to_nodes])


def _faults(slices: Sequence[SliceReport]) -> tuple[Fault, ...]:
    found = tuple(fault for report in slices for fault in report.faults)
    for report in slices:
        if not found and report.passed != slices[0].passed:
            found = (Fault(UNLIKE, report.index, report.node_id),)
    return found


def states_of(reports: Sequence[SliceReport]) -> tuple[SliceHandle, ...]:
    """Return the handles of the slices' new version."""
    return tuple(report.state for report in reports if report.state)


def copies_by_node(installed: Sequence[NodeWeights]) -> NodeCopies:
    """Return the copies that nodes have of other nodes' slices, by node."""
    found: dict[str, dict[int, SliceHandle]] = {}
    for node in installed:
        found.setdefault(node.node_id, {}).update(node.copies)
    return found
