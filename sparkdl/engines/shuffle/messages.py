"""The metadata that travels beside the bytes: what jobs tell each other and the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.data.epoch import derive_seed
from sparkdl.replica.iteration import (
    Fault,
    IterationRows,
    ReplicaReport,
    ResidualHandle,
    SliceHandle,
    SliceReport,
)
from sparkdl.slab.pool import Reference
from sparkdl.slices.section import SectionLayout


@dataclass(frozen=True)
class PendingGradients:
    """An iteration whose gradients lie in slabs and are not applied yet, see :class:`AtOnce`.

    ``index``, ``tick`` and ``hyperparameters`` are that iteration's; ``headers``: for each slice,
    those of the replicas that had samples, in replica order.
    """

    index: int
    tick: int
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    headers: tuple[tuple[GradientHeader, ...], ...]

    @staticmethod
    def of(step: IterationMessage, seats: Sequence[OneStageReport]) -> PendingGradients:
        """What a step leaves; ``seats``: of every replica, in order."""
        by_slice = zip(*[seat.headers for seat in seats], strict=True)
        headers = tuple(tuple(replace(h, report=None) for h in some) for some in by_slice)
        return PendingGradients(step.index, step.tick, step.hyperparameters, headers)


NodeCopies = Mapping[str, Mapping[int, "SliceHandle"]]
"""By node (its token) and slice."""


@dataclass(frozen=True, kw_only=True)
class IterationMessage(IterationRows):
    """One iteration as the driver submits it to tasks.

    Attributes:
        tick: Grows with every submission, a repeated one too.
        floor: The tick of the committed state, below which state buffers are free.
        states: The committed version of every slice.
        pending: What is to be applied to it first; None: nothing.
        copies: Of the weights of other nodes' slices, where nodes have them, see
            :mod:`sparkdl.engines.shuffle.node_reduce`.
        residuals: Where gradients are compressed, what each replica keeps; None before its first
            iteration.
    """

    tick: int
    floor: int
    states: tuple[SliceHandle, ...] = ()
    pending: PendingGradients | None = None
    copies: NodeCopies = field(default_factory=dict)
    residuals: tuple[ResidualHandle | None, ...] = ()

    @staticmethod
    def of(iteration: IterationRows, **rest: Any) -> IterationMessage:
        """Make one of an iteration; ``rest``: the fields that are a message's own."""
        return IterationMessage(**iteration.__dict__, **rest)

    def update_seed(self, seed: int) -> int:
        """Return the seed of the update that this message asks for: a pending one's, where there is
        one."""
        updated = self.index if self.pending is None else self.pending.index
        return derive_seed(seed, "update", updated)

    @property
    def gradients_floor(self) -> int:
        """The tick below which nobody needs gradients any more."""
        return self.tick if self.pending is None else self.pending.tick


MOVED = "moved"
"""The task ran on another node than the references it was given are for; bytes will do."""
SAMPLES_FOREIGN = "samples foreign"
"""The task was handed the samples of another node."""
SAMPLES_CHANGED = "samples changed"
"""The partition was computed again and holds other rows: the source is not deterministic."""
STATE_FOREIGN = "state foreign"
"""The synchronization task does not run where the slice's state lies."""
RESIDUAL_FOREIGN = "residual foreign"
"""The task does not run where what its replica left out of its gradients lies."""

WEIGHTS_GONE = "weights gone"
"""Blocks of weights are not stored any more; those in slabs will do."""
REPORT_MISSING = "report missing"
"""A slice was updated by a task of which Spark does not tell the report."""


@dataclass(frozen=True)
class GradientHeader:
    """The header of the frame from replica ``replica`` to one slice.

    ``section`` says how to read the bytes: those of ``reference``, or where it is None those that
    follow in the frame; None where there are none. ``absent``: parameters without a gradient.
    ``others``: of a replica that stepped by itself, the optimizer state that is not in arrays,
    pickled. ``state`` comes with replica 0's frames, ``report`` with the frames to slice 0.
    """

    replica: int
    weight: float = 0.0
    loss: float = 0.0
    section: SectionLayout | None = None
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    others: bytes = b""
    finite: bool = True
    state: SliceHandle | None = None
    report: ReplicaReport | None = None
    fault: Fault | None = None


@dataclass(frozen=True)
class GradientOffer:
    """What a replica tells a task that sums for a node, see
    :class:`sparkdl.engines.shuffle.node_reduce.ReduceOnNode`.

    ``weight``: None of a replica that had no samples. ``headers``: of the slices that the task sums
    for the replica's own node, by number.
    """

    replica: int
    weight: float | None
    headers: Mapping[int, GradientHeader]


@dataclass(frozen=True)
class WeightsHeader:
    """The header of the frame from the owner of slice ``index`` to a replica's place: whether new
    ``weights`` follow; ``report`` goes to the first place."""

    index: int
    report: SliceReport | None
    weights: bool


@dataclass(frozen=True)
class NodeWeights:
    """What a task that took weights for its node tells the driver: the copies by slice, on node
    ``token``; and what the owners told it."""

    token: str
    copies: Mapping[int, SliceHandle]
    reports: tuple[SliceReport, ...] = ()


@dataclass(frozen=True)
class OneStageReport:
    """What a task that is a whole iteration tells the driver: its replica's headers, one a slice, and
    the slices' new version, where something was pending."""

    headers: tuple[GradientHeader, ...]
    slices: tuple[SliceReport, ...] = ()


@dataclass(frozen=True)
class ReducedHeader:
    """The header of the frame from the reduction of slice ``index`` to the update of another.

    ``squares``: its part of the squared global norm. To its own slice come ``section`` and
    ``reference``, the reduced gradient; ``report`` is then the report so far.
    """

    index: int
    squares: float = 0.0
    loss: float = 0.0
    section: SectionLayout | None = None
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    state: SliceHandle | None = None
    report: SliceReport | None = None
