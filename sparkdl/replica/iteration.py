"""The description of an iteration, the reports of replicas and slices, and handles of what they
wrote.

The decision of a replica to leave out the rest of its rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.data.epoch import derive_seed
from sparkdl.slab.pool import Reference
from sparkdl.slices.update import Histogram

Decisions = Mapping[str, int]
"""The type of what a consistency model decided on an iteration, by name; what is not there is 0."""
STALENESS, COMMITS = "staleness", "commits/"
MICRO_BATCHES, INNER_STEPS = "micro_batches/", "inner_steps/"
"""Names of decisions: the staleness of the update (of several, the largest); followed by a number in
order, the turns whose gradients were applied; and, followed by the number of a replica, how many
micro-batches or steps of its own it did, if any replica stopped early."""


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
class PassedParts:
    """The parts of its iteration that a replica did, if it may stop early."""

    parts: int = 0  # 0: it could not stop early
    of: int = 0
    missed: int = 0  # the rows of the parts left out
    recorded_as: str = MICRO_BATCHES


ALL_PARTS = PassedParts()
"""All parts of an iteration, without a limit."""


@dataclass(frozen=True)
class Fault:
    """A reason why an attempt did no work.

    ``kind`` is one of the constants of :mod:`sparkdl.engines.shuffle.messages`.
    """

    kind: str
    partition: int
    node_id: str


@dataclass(frozen=True)
class ReplicaReport:
    """The report of one replica."""

    replica: int
    count: int
    weight: float  # the number of samples, or the sum of their weights
    loss: float
    node_id: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_finite: str = ""  # the first value that is inf or NaN, by name
    received: Mapping[int, int] = field(default_factory=dict)  # from other nodes, by slice
    residual: ResidualHandle | None = None
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (sum, count)
    passed: PassedParts = field(default_factory=lambda: ALL_PARTS)


@dataclass(frozen=True)
class SliceReport:
    """The report of a synchronization task."""

    index: int
    node_id: str
    state: SliceHandle | None  # None: there are faults
    replicas: tuple[ReplicaReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)  # from other nodes, by replica
    skipped: bool = False  # a gradient was not finite, and state is the old one
    norm: float | None = None
    histograms: Mapping[tuple[str, int], Histogram] = field(default_factory=dict)
    passed: tuple[PassedParts, ...] = ()  # of each replica; empty without a limit


class Clock:
    """Seconds by activity since the clock was made. Times of the same activity add up."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._last = now, now()

    def lap(self, activity: str) -> None:
        """Add the time since the last lap to ``activity``."""
        now = self._now()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The request of the training loop to an engine."""

    index: int  # in the run, from 0
    epoch: int
    batch: int = 0  # within the epoch, from 0
    hyperparameters: tuple[Mapping[str, Any], ...] | None = None  # None: unchanged
    description: str = ""
    loss_scale: float = 1.0
    histograms: bool = False
    decisions: Decisions | None = None  # of the first time, if it is repeated; None: decide

    def with_rows(self, rows: Sequence[tuple[int, int]]) -> IterationRows:
        """Return the iteration with the rows of each replica."""
        return IterationRows(**self.__dict__, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit for the replicas of an iteration, beyond which they leave out the rest of their parts:
    micro-batches, or steps of their own.
    """

    seconds: float | None = None  # of a replica's work; None: none is measured
    may_miss: int = sys.maxsize  # rows of all together; beyond, slices are not updated
    parts: tuple[int, ...] = ()  # if it is repeated: what each replica does


@dataclass(frozen=True, kw_only=True)
class IterationRows(Iteration):
    """An iteration, and the rows [start, stop) of each replica in its order of the epoch."""

    rows: tuple[tuple[int, int], ...]
    limit: Limit | None = None  # None: each replica does all of its rows

    @property
    def size(self) -> int:
        """Return the number of rows of all replicas."""
        return sum(stop - start for start, stop in self.rows)

    def falls_short(self, passed: Iterable[PassedParts]) -> bool:
        """Return whether replicas left out so many rows that the update does not count."""
        return self.limit is not None and sum(each.missed for each in passed) > self.limit.may_miss

    def update_seed(self, seed: int) -> int:
        """Return the seed of random draws of optimizers, derived from the run's ``seed``.

        It does not depend on where a slice is updated, or how often.
        """
        return derive_seed(seed, "update", self.index)


class EarlyStop:
    """A function object that says after each part whether to leave out the others.

    A part is a micro-batch, or a step of the replica's own. A replica stops after the part that ends
    nearest to the limit: another one, as long as those before, would end farther beyond it. Every
    replica does one at least.
    """

    passed: PassedParts = ALL_PARTS
    """The parts that the replica did; set when it has finished."""

    def __init__(self, limit: Limit, replica: int, clock: Clock, device: torch.device) -> None:
        self._limit, self._replica, self._clock, self._device = limit, replica, clock, device

    def finish(self, passed: PassedParts) -> None:
        """Note what was done."""
        self.passed = passed

    def __call__(self, done: int) -> bool:
        """Return whether to stop after ``done`` parts."""
        limit, clock = self._limit, self._clock
        if limit.parts:
            return done >= limit.parts[self._replica]
        if limit.seconds is None:
            return False
        if self._device.type == "cuda":  # which is behind what it was told
            torch.cuda.synchronize(self._device)
            clock.lap("backward")
        half = seconds_of_parts(clock.seconds) / done / 2
        return sum(clock.seconds.values()) + half > limit.seconds


def seconds_of_parts(seconds: Mapping[str, float]) -> float:
    """Return the seconds of a replica that grow with the parts that it does, from those by activity."""
    return sum(seconds.get(activity, 0.0) for activity in ("forward", "backward", "update"))
