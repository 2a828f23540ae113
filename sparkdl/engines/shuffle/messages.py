"""The metadata beside the bytes: the messages, headers and reports of jobs and the driver.

Reports have the same form however an iteration's jobs ran. A *fault* is the reason why a task does no
work; some are errors that no submission resolves.

The placement of replicas and slices on nodes says how many bytes go between them. P bytes of
parameters are to be summed and returned among K nodes, each of which owns P / K of them. A node must
then send (K - 1) / K of its sum of the gradients, and its slice of the new weights to K - 1 others.
That is 2 P (K - 1) / K bytes in each direction, the minimum if every node does the same (Patarasuk and
Yuan, 2009, "Bandwidth optimal all-reduce algorithms"). :func:`least_bytes` computes this minimum, and
:func:`planned` the bytes of a job with given nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data.epoch import derive_seed
from sparkdl.engines.resources import samples_changed
from sparkdl.errors import StateLostError
from sparkdl.loop.advance import Traffic
from sparkdl.replica.iteration import (
    ALL_PARTS,
    Fault,
    IterationRows,
    PassedParts,
    ReplicaReport,
    ResidualHandle,
    SliceHandle,
    SliceReport,
)
from sparkdl.slab.pool import Reference
from sparkdl.slices.reduce import blocks
from sparkdl.slices.section import SectionLayout

FORWARD_BACKWARD = "forward-backward"
REDUCTION = "reduce"
SYNCHRONIZATION = "parameter synchronization"
"""The names of stages in the Spark UI."""


@dataclass(frozen=True)
class PendingGradients:
    """An iteration whose gradients lie in slabs and have not been applied yet.

    See :func:`sparkdl.engines.shuffle.replica_tasks.leave_gradients`.
    """

    index: int
    submission: int
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    headers: tuple[tuple[GradientHeader, ...], ...]  # by slice; of all replicas in order

    @staticmethod
    def of(step: IterationMessage, reports: Sequence[OneStageReport]) -> PendingGradients:
        """Make one of the reports that a step returned, one per replica in order."""
        by_slice = zip(*[report.headers for report in reports], strict=True)
        headers = tuple(tuple(replace(h, report=None) for h in some) for some in by_slice)
        return PendingGradients(step.index, step.submission, step.hyperparameters, headers)


NodeCopies = Mapping[str, Mapping[int, SliceHandle]]
"""The copies of slices' weights on nodes, by node id and slice."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A committed version of the state."""

    number: int  # updates since the state was loaded
    submission: int
    states: tuple[SliceHandle, ...]
    copies: NodeCopies = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IterationMessage(IterationRows):
    """One iteration as the driver submits it to tasks."""

    submission: int  # grows with every submission, repeated ones too
    oldest_needed: int  # state buffers of older submissions are free
    states: tuple[SliceHandle, ...] = ()  # the newest version, which is updated
    pending: PendingGradients | None = None  # applied to states first
    reads: tuple[SliceHandle, ...] = ()  # to compute on; empty: the newest, with pending
    copies: NodeCopies = field(default_factory=dict)
    residuals: tuple[ResidualHandle | None, ...] = ()  # by replica; None: none yet

    @property
    def read_states(self) -> tuple[SliceHandle, ...]:
        """Return the committed version that replicas compute on, before pending gradients."""
        return self.reads or self.states

    def update_seed(self, seed: int) -> int:
        """Return the seed of the update that this message requests.

        It is that of the pending iteration, if there is one.
        """
        updated = self.index if self.pending is None else self.pending.index
        return derive_seed(seed, "update", updated)

    @property
    def oldest_gradients(self) -> int:
        """Return the submission below which gradients are no longer needed."""
        return self.submission if self.pending is None else self.pending.submission


@dataclass(frozen=True)
class GradientHeader:
    """The header of the frame from a replica to one slice."""

    replica: int
    weight: float = 0.0
    loss: float = 0.0
    section: SectionLayout | None = None  # None: no samples
    reference: Reference | None = None  # None: the bytes follow in the frame
    absent: frozenset[int] = frozenset()
    others: bytes = b""  # after local steps: optimizer state not in arrays, pickled
    finite: bool = True
    report: ReplicaReport | None = None  # only in frames to slice 0
    fault: Fault | None = None
    passed: PassedParts = ALL_PARTS


@dataclass(frozen=True)
class GradientOffer:
    """The frame from a replica to a task that sums for a node.

    See :func:`sparkdl.engines.shuffle.update_tasks.reduce_on_node`.
    """

    replica: int
    weight: float | None  # None: no samples
    headers: Mapping[int, GradientHeader]  # by slice; of those summed for the replica's node


@dataclass(frozen=True)
class WeightsHeader:
    """The header of the frame from the owner of a slice to a replica."""

    index: int
    report: SliceReport | None  # only in the frame to the first replica
    weights: bool


@dataclass(frozen=True)
class NodeWeights:
    """The report of a task that received weights for its node."""

    node_id: str
    copies: Mapping[int, SliceHandle]
    reports: tuple[SliceReport, ...] = ()


@dataclass(frozen=True)
class OneStageReport:
    """The report of a task that is a whole iteration."""

    headers: tuple[GradientHeader, ...]
    slices: tuple[SliceReport, ...] = ()  # of the new version; empty: nothing was pending


@dataclass(frozen=True)
class ReducedHeader:
    """The header of the frame from the reduction of one slice to the update of another."""

    index: int  # of the reduced slice
    squares: float = 0.0
    loss: float = 0.0  # of the global batch; this and all below go only to the slice itself
    section: SectionLayout | None = None
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    report: SliceReport | None = None
    weight: float = 0.0


MOVED = "moved"
"""The task runs on another node than its references are for; sending bytes resolves that."""
SAMPLES_FOREIGN = "samples foreign"
"""The task was given samples that lie on another node."""
SAMPLES_CHANGED = "samples changed"
"""The partition was recomputed and holds other rows, because its source is not deterministic."""
STATE_FOREIGN = "state foreign"
"""The synchronization task does not run on the node that holds the slice's state."""
UNLIKE = "unlike"
"""The owner of a slice was given the gradient of another attempt of a replica than others were, and the
two attempts did not stop after as many micro-batches."""
RESIDUAL_FOREIGN = "residual foreign"
"""The task does not run on the node that holds its replica's residuals."""


def raise_unrecoverable(faults: Sequence[Fault], doing: str) -> None:
    """Raise an error if another submission could not resolve one of the faults."""
    for fault in faults:
        if fault.kind == STATE_FOREIGN:
            raise StateLostError(
                f"{doing}: the state of slice {fault.partition} is out of reach (its node or "
                "executor is gone)."
            )
        if fault.kind == RESIDUAL_FOREIGN:
            raise StateLostError(
                f"{doing}: what replica {fault.partition} keeps between iterations is "
                "out of reach (its node or executor is gone)."
            )
        if fault.kind == SAMPLES_CHANGED:
            raise samples_changed(doing, fault.partition)


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


def planned(nodes: Nodes, slices: Sequence[SliceBytes], summed: bool) -> dict[str, Traffic]:
    """Return the traffic that an iteration will cause per node, without tables and buffers."""
    gradients, weights = list[Transfer](), list[Transfer]()
    for node_id in nodes.node_ids:
        members = nodes.members(node_id)
        for owner, nbytes in zip(nodes.slices, slices, strict=True):
            if not summed:
                gradients.append((node_id, owner, len(members) * nbytes.wire))
                weights.append((owner, node_id, len(members) * nbytes.weights))
                continue
            for block in nodes.blocks(node_id):
                worth = sum_is_smaller(len(block), nbytes.wire, nbytes.flat)
                sent = nbytes.flat if worth else len(block) * nbytes.wire
                gradients.append((node_id, owner, sent))
            weights.append((owner, node_id, nbytes.weights))
    return between_nodes(gradients, weights)


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
