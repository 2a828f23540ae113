"""The reports of an iteration, in the same form however its jobs ran.

The placement of replicas and slices on nodes, and the bytes between nodes that follow from it.

All functions here are pure. P bytes of parameters are to be summed and returned among K nodes, each
of which owns P / K of them. A node must then send (K - 1) / K of its sum of the gradients, and its
slice of the new weights to K - 1 others. That is 2 P (K - 1) / K bytes in each direction, the
minimum if every node does the same (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce
algorithms"). :func:`least_bytes` computes this minimum, and :func:`planned` the bytes of a job with
given nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.engines.shuffle.messages import UNLIKE, NodeCopies, NodeWeights, PendingGradients
from sparkdl.loop.iteration_result import Traffic
from sparkdl.replica.iteration import Fault, ReplicaReport, SliceHandle, SliceReport
from sparkdl.slices.reduce import blocks


@dataclass(frozen=True)
class Nodes:
    """The node (its id) of each replica and of each slice's owner."""

    replicas: tuple[str, ...]
    slices: tuple[str, ...]

    @functools.cached_property
    def _members(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for replica, node_id in enumerate(self.replicas):
            found.setdefault(node_id, []).append(replica)
        return found

    @property
    def node_ids(self) -> list[str]:
        """Return the nodes that have replicas."""
        return list(self._members)

    def members(self, node_id: str) -> list[int]:
        """Return the replicas of a node."""
        return self._members[node_id]

    def representative(self, node_id: str, n: int) -> int:
        """Return the replica at which the node sums slice ``n`` and receives its weights.

        The node's replicas take turns over the slices, so that its task slots share the work.
        """
        members = self._members[node_id]
        return members[n % len(members)]

    def blocks(self, node_id: str) -> list[range]:
        """Return the parts of the sum that the node can compute, see [Note: the shape of a sum]."""
        return blocks(self._members[node_id], len(self.replicas))


Transfer = tuple[str, str, int]
"""A transfer: from node, to node, bytes."""


def between_nodes(gradients: Iterable[Transfer], weights: Iterable[Transfer]) -> dict[str, Traffic]:
    """Sum the bytes that left and arrived at each node; transfers within a node do not count."""
    sums: dict[str, dict[str, int]] = {}
    for kind, transfers in (("gradients", gradients), ("weights", weights)):
        for source, target, nbytes in transfers:
            if source != target and nbytes:
                for node, way in ((source, "sent"), (target, "received")):
                    mine = sums.setdefault(node, {})
                    mine[f"{kind}_{way}"] = mine.get(f"{kind}_{way}", 0) + nbytes
    return {node: Traffic(**found) for node, found in sums.items()}


def least_bytes(parameter_bytes: int, nodes: int) -> float:
    """Return 2 P (K - 1) / K, the bytes that a node must send, and receive, in an iteration."""
    return 2 * parameter_bytes * (nodes - 1) / nodes


@dataclass(frozen=True)
class SliceBytes:
    """The sizes of a slice in bytes."""

    wire: int  # of the dense gradient as it travels
    flat: int  # of the dense gradient in the flat vector's dtype
    weights: int


def sum_is_smaller(terms: int, wire: int, flat: int) -> bool:
    """Return whether a sum of gradients takes fewer bytes than the gradients themselves."""
    return terms > 1 and terms * wire > flat


@dataclass(frozen=True)
class _Plan:
    gradients: list[Transfer] = field(default_factory=list)
    weights: list[Transfer] = field(default_factory=list)


def planned(nodes: Nodes, slices: Sequence[SliceBytes], summed: bool) -> dict[str, Traffic]:
    """Return the traffic that an iteration will cause per node, without tables and buffers."""
    plan = _Plan()
    for node_id in nodes.node_ids:
        members = nodes.members(node_id)
        for owner, nbytes in zip(nodes.slices, slices, strict=True):
            if not summed:
                plan.gradients.append((node_id, owner, len(members) * nbytes.wire))
                plan.weights.append((owner, node_id, len(members) * nbytes.weights))
                continue
            for block in nodes.blocks(node_id):
                worth = sum_is_smaller(len(block), nbytes.wire, nbytes.flat)
                sent = nbytes.flat if worth else len(block) * nbytes.wire
                plan.gradients.append((node_id, owner, sent))
            plan.weights.append((owner, node_id, nbytes.weights))
    return between_nodes(plan.gradients, plan.weights)


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
