"""The metadata beside the bytes: the messages, headers and reports of jobs and the driver.

Faults: the reasons why a task does no work, and errors for those that no submission resolves.

The constants of a run on the shuffle engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data.epoch import derive_seed
from sparkdl.data.samples import SampleSet
from sparkdl.engines.resources import FitResources, samples_changed
from sparkdl.errors import StateLostError
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.replica.compare import Description
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
from sparkdl.replica.run import RunSpec
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

    See :class:`sparkdl.engines.shuffle.node_reduce.ReduceOnNode`.
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


@dataclass(frozen=True, kw_only=True)
class ShuffleSpec:
    """The constants that the parts of the engine share."""

    samples: SampleSet
    layout: Layout
    run: RunSpec
    recipe: bytes
    options: TrainingOptions
    built: Description
    resources: FitResources
