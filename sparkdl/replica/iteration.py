"""The description of an iteration, the reports of replicas and slices, and handles of what they
wrote."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.data.epoch import derive_seed
from sparkdl.slab.pool import Reference
from sparkdl.slices.histogram import Histogram


@dataclass(frozen=True)
class SliceHandle:
    """A handle of version t of a slice's state: references into the slabs of one node."""

    weights: Reference
    arrays: tuple[tuple[str, str, Reference], ...] = ()
    """(name, NumPy dtype, reference) of each array of element-wise optimizer state."""
    others: Reference | None = None
    """All other optimizer state, pickled."""

    @property
    def node_id(self) -> str:
        return self.weights.node_id

    @property
    def version(self) -> str:
        """Return a name that identifies exactly these weights."""
        return self.weights.nonce

    def references(self) -> list[Reference]:
        own = [self.weights, *(reference for _, _, reference in self.arrays)]
        return [*own, self.others] if self.others else own


@dataclass(frozen=True)
class ResidualHandle:
    """A handle of the state that a replica keeps between iterations. ``version`` counts from 1."""

    reference: Reference
    version: int


@dataclass(frozen=True)
class Fault:
    """A reason why an attempt did no work.

    ``kind`` is one of the constants of :mod:`sparkdl.engines.shuffle.faults`.
    """

    kind: str
    partition: int
    node_id: str


@dataclass(frozen=True)
class ReplicaReport:
    """The report of one replica.

    Attributes:
        replica: The number of the replica.
        count: The number of samples.
        weight: Their weight in the mean: their number, or the sum of their weights.
        loss: The mean loss over them.
        node_id: The node.
        seconds: Seconds by activity.
        not_finite: The first value that is inf or NaN ("the loss", or the gradient of a parameter),
            or empty.
        received: The bytes of weights that came from another node, by slice.
        residual: The handle of the state that the replica now keeps for compression.
        losses: Sum and count of each named loss of a step.
    """

    replica: int
    count: int
    weight: float
    loss: float
    node_id: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_finite: str = ""
    received: Mapping[int, int] = field(default_factory=dict)
    residual: ResidualHandle | None = None
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SliceReport:
    """The report of a synchronization task.

    Attributes:
        index: The number of the slice.
        node_id: The node.
        state: The handle of the new state, or None if there are faults.
        replicas: The reports of the replicas.
        faults: The reasons why nothing was done.
        seconds: Seconds by activity.
        received: The bytes of gradients that came from another node, by replica.
        skipped: A gradient was not finite, and ``state`` is the old state.
        norm: The global norm before clipping, if it was computed.
        histograms: Histograms by "weights" or "gradients" and parameter number.
    """

    index: int
    node_id: str
    state: SliceHandle | None
    replicas: tuple[ReplicaReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    skipped: bool = False
    norm: float | None = None
    histograms: Mapping[tuple[str, int], Histogram] = field(default_factory=dict)


class Clock:
    """Seconds by activity since the clock was made. Times of the same activity add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, activity: str) -> None:
        """Add the time since the last lap to ``activity``."""
        now = time.perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The request of the training loop to an engine.

    Attributes:
        index: The iteration's number in the run, from 0.
        epoch: The epoch, from 0.
        batch: The number of the global batch within the epoch, from 0.
        hyperparameters: A schedule's values, one mapping for each parameter group; None: unchanged.
        description: The text that the Spark UI shows.
        loss_scale: Factor of the loss before backward.
        histograms: Whether histograms of weights and gradients are wanted.
        staleness: If the iteration is repeated, the staleness of its update the first time; None: the
            engine decides.
    """

    index: int
    epoch: int
    batch: int = 0
    hyperparameters: tuple[Mapping[str, Any], ...] | None = None
    description: str = ""
    loss_scale: float = 1.0
    histograms: bool = False
    staleness: int | None = None

    def with_rows(self, rows: Sequence[tuple[int, int]]) -> IterationRows:
        """Return the iteration with the rows of each replica."""
        return IterationRows(**self.__dict__, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class IterationRows(Iteration):
    """An iteration, and the rows [start, stop) of each replica in its order of the epoch."""

    rows: tuple[tuple[int, int], ...]

    def update_seed(self, seed: int) -> int:
        """Return the seed of random draws of optimizers, derived from the run's ``seed``.

        It does not depend on where a slice is updated, or how often.
        """
        return derive_seed(seed, "update", self.index)
