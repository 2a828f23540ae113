"""The metadata that travels beside the bytes: what jobs tell each other and the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.slab.pool import Reference


@dataclass(frozen=True)
class Step:
    """One iteration as the driver submits it.

    ``index`` counts iterations of the run from 0. ``tick`` grows with every submission, a repeated
    one too; ``floor`` is the tick of the committed state, below which state buffers are free.
    ``rows``: for each replica, the range of its epoch's permutation. ``hyperparameters``: one
    mapping a parameter group.
    """

    index: int
    epoch: int
    tick: int
    floor: int
    rows: tuple[tuple[int, int], ...]
    hyperparameters: tuple[Mapping[str, Any], ...] | None = None


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


MOVED = "moved"
"""The task ran on another node than the references it was given are for; bytes will do."""
SAMPLES_FOREIGN = "samples foreign"
"""The task was handed the samples of another node."""
SAMPLES_CHANGED = "samples changed"
"""The partition was computed again and holds other rows: the source is not deterministic."""
STATE_FOREIGN = "state foreign"
"""The synchronization task does not run where the slice's state lies."""


@dataclass(frozen=True)
class Fault:
    """A reason why an attempt did no work; ``kind`` is one of this module's constants."""

    kind: str
    partition: int
    token: str


@dataclass(frozen=True)
class ReplicaReport:
    """What replica ``replica`` did: samples, mean loss over them, node, seconds by activity."""

    replica: int
    count: int
    loss: float
    token: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientHeader:
    """The header of the frame from replica ``replica`` to one slice.

    ``reference`` is None where the bytes follow in the frame (or ``count`` is 0 and there are none).
    ``state`` comes with replica 0's frames, ``report`` with the frames to slice 0.
    """

    replica: int
    count: int
    reference: Reference | None = None
    absent: frozenset[int] = frozenset()
    state: SliceHandle | None = None
    report: ReplicaReport | None = None
    fault: Fault | None = None


@dataclass(frozen=True)
class SliceReport:
    """What a synchronization task tells the driver: the new state's handle, or the faults."""

    index: int
    token: str
    state: SliceHandle | None
    replicas: tuple[ReplicaReport, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_received: int = 0
