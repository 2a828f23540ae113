"""The metadata beside the bytes: the messages, headers and reports of jobs and the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data.epoch import derive_seed
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
from sparkdl.slices.section import SectionLayout

FORWARD_BACKWARD = "forward-backward"
REDUCTION = "reduce"
SYNCHRONIZATION = "parameter synchronization"
"""The names of stages in the Spark UI."""


@dataclass(frozen=True)
class PendingGradients:
    """An iteration whose gradients lie in slabs and have not been applied yet.

    See :class:`sparkdl.engines.shuffle.replica_tasks.OneStageTask`.

    Attributes:
        index: The index of that iteration.
        submission: Its submission.
        hyperparameters: Its hyperparameters.
        headers: For each slice, the headers of all replicas in order.
    """

    index: int
    submission: int
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    headers: tuple[tuple[GradientHeader, ...], ...]

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
    """A committed version of the state.

    Attributes:
        number: The number of updates since the state was loaded.
        submission: The submission of its buffers.
        states: The handle of every slice.
        copies: The copies of its weights that nodes have of other nodes' slices.
    """

    number: int
    submission: int
    states: tuple[SliceHandle, ...]
    copies: NodeCopies = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IterationMessage(IterationRows):
    """One iteration as the driver submits it to tasks.

    Attributes:
        submission: A number that grows with every submission, including repeated ones.
        oldest_needed: The submission of the oldest version that is kept; older state buffers are free.
        states: The newest version of every slice, which the update is applied to.
        pending: The gradients to apply to ``states`` first; None: nothing.
        reads: The version that replicas compute on, if that is an older one; empty: the newest, which
            is the one made of pending gradients if there are any.
        copies: The copies that nodes have of other nodes' slices of the version that replicas compute
            on, see :mod:`sparkdl.engines.shuffle.node_reduce`.
        residuals: If gradients are compressed, the residuals of each replica; None before its first
            iteration.
    """

    submission: int
    oldest_needed: int
    states: tuple[SliceHandle, ...] = ()
    pending: PendingGradients | None = None
    reads: tuple[SliceHandle, ...] = ()
    copies: NodeCopies = field(default_factory=dict)
    residuals: tuple[ResidualHandle | None, ...] = ()

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
    """The header of the frame from a replica to one slice.

    Attributes:
        replica: The number of the replica.
        weight: The weight of its samples in the mean.
        loss: Its mean loss.
        section: The layout of the bytes; None if the replica had no samples.
        reference: The reference to the bytes; None if they follow in the frame.
        absent: The parameters without a gradient.
        others: After local steps, the replica's optimizer state that is not in arrays, pickled.
        finite: Whether the loss and all gradients are finite.
        report: The replica's report; only in frames to slice 0.
        fault: The reason why the replica did no work, if any.
        passed: What the replica did of its rows.
    """

    replica: int
    weight: float = 0.0
    loss: float = 0.0
    section: SectionLayout | None = None
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    others: bytes = b""
    finite: bool = True
    report: ReplicaReport | None = None
    fault: Fault | None = None
    passed: PassedParts = ALL_PARTS


@dataclass(frozen=True)
class GradientOffer:
    """The frame from a replica to a task that sums for a node.

    See :class:`sparkdl.engines.shuffle.node_reduce.ReduceOnNode`.

    Attributes:
        replica: The number of the replica.
        weight: The weight of its samples; None if it had no samples.
        headers: By slice number, the headers of the slices that the task sums for the replica's own
            node.
    """

    replica: int
    weight: float | None
    headers: Mapping[int, GradientHeader]


@dataclass(frozen=True)
class WeightsHeader:
    """The header of the frame from the owner of a slice to a replica.

    Attributes:
        index: The number of the slice.
        report: The slice's report; only in the frame to the first replica.
        weights: Whether new weights follow.
    """

    index: int
    report: SliceReport | None
    weights: bool


@dataclass(frozen=True)
class NodeWeights:
    """The report of a task that received weights for its node.

    Attributes:
        node_id: The id of the node.
        copies: The copies that the task wrote, by slice.
        reports: The reports of the owners that came with the weights.
    """

    node_id: str
    copies: Mapping[int, SliceHandle]
    reports: tuple[SliceReport, ...] = ()


@dataclass(frozen=True)
class OneStageReport:
    """The report of a task that is a whole iteration.

    Attributes:
        headers: The headers of its replica, one per slice.
        slices: The reports of the slices' new version; empty if nothing was pending.
    """

    headers: tuple[GradientHeader, ...]
    slices: tuple[SliceReport, ...] = ()


@dataclass(frozen=True)
class ReducedHeader:
    """The header of the frame from the reduction of one slice to the update of another.

    Attributes:
        index: The number of the reduced slice.
        squares: The slice's part of the squared global norm.
        loss: The mean loss over the global batch. It comes only with the frame to the slice itself,
            as do all fields below.
        section: The layout of the reduced gradient.
        reference: The reference to the reduced gradient.
        absent: The parameters without a gradient.
        report: The slice's report so far.
        weight: The weight of all replicas.
    """

    index: int
    squares: float = 0.0
    loss: float = 0.0
    section: SectionLayout | None = None
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    report: SliceReport | None = None
    weight: float = 0.0
