"""What replicas and slices report of an iteration, and where what they wrote lies."""

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
    """Where version t of a slice's state lies: references into one node's slabs."""

    weights: Reference
    arrays: tuple[tuple[str, str, Reference], ...] = ()
    """(name, NumPy dtype, reference) of each element-wise optimizer state."""
    others: Reference | None = None
    """All other optimizer state, pickled."""

    @property
    def token(self) -> str:
        return self.weights.token

    @property
    def version(self) -> str:
        """A name of exactly these weights."""
        return self.weights.nonce

    def references(self) -> list[Reference]:
        own = [self.weights, *(reference for _, _, reference in self.arrays)]
        return [*own, self.others] if self.others else own


@dataclass(frozen=True)
class ResidualHandle:
    """Where what a replica keeps between iterations lies: the ``version``-th of its kind, from 1."""

    reference: Reference
    version: int


@dataclass(frozen=True)
class Fault:
    """A reason why an attempt did no work; ``kind`` is one of this module's constants."""

    kind: str
    partition: int
    token: str


@dataclass(frozen=True)
class ReplicaReport:
    """What replica ``replica`` did: samples, their weight in the mean (their number, or the sum of
    their weights), mean loss over them, node, seconds by activity. ``not_finite``: what is inf or
    NaN ("the loss", or a parameter's gradient), else empty. ``received``: the bytes of weights that
    came from another node, by slice. ``residual``: what it keeps now, of what it did not send."""

    replica: int
    count: int
    weight: float
    loss: float
    token: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_finite: str = ""
    received: Mapping[int, int] = field(default_factory=dict)
    residual: ResidualHandle | None = None


@dataclass(frozen=True)
class SliceReport:
    """What a synchronization task tells the driver: the new state's handle, or the faults.

    ``skipped``: a gradient was not finite, and ``state`` is the old one. ``norm``: the global norm
    before clipping, where it was asked for. ``histograms``: by "weights" or "gradients" and number.
    ``received``: the bytes of gradients that came from another node, by replica.
    """

    index: int
    token: str
    state: SliceHandle | None
    replicas: tuple[ReplicaReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    skipped: bool = False
    norm: float | None = None
    histograms: Mapping[tuple[str, int], Histogram] = field(default_factory=dict)


class Clock:
    """Seconds by activity since the clock was made; an activity that comes again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, activity: str) -> None:
        """Book the time since the last lap to ``activity``."""
        now = time.perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What the loop asks of an engine.

    Attributes:
        index: The iteration's number in the run, from 0.
        epoch: The epoch, from 0.
        batch: The number of the global batch within the epoch, from 0.
        hyperparameters: A schedule's values, one mapping a parameter group; None: as they are.
        description: The text that the Spark UI shows.
        loss_scale: Factor of the loss before backward.
        histograms: Whether histograms of weights and gradients are wanted.
    """

    index: int
    epoch: int
    batch: int = 0
    hyperparameters: tuple[Mapping[str, Any], ...] | None = None
    description: str = ""
    loss_scale: float = 1.0
    histograms: bool = False

    def with_rows(self, rows: Sequence[tuple[int, int]]) -> IterationRows:
        """Return the iteration with the rows of each replica."""
        return IterationRows(**self.__dict__, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class IterationRows(Iteration):
    """An iteration, and the rows [start, stop) of each replica in its order of the epoch."""

    rows: tuple[tuple[int, int], ...]

    def update_seed(self, seed: int) -> int:
        """Return the seed of what optimizers draw, out of the run's ``seed``.

        It is the same wherever a slice is updated, and however often.
        """
        return derive_seed(seed, "update", self.index)
