"""Snapshots of the state, which Spark keeps on more than one executor. Task bodies only.

A snapshot's frames are persisted by Spark with two copies; what is lost with one executor is there on
another. Reading one writes slabs anew, wherever the owners are by then.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.slab.pool import open_pool
from sparkdl.sync.owners import run_of
from sparkdl.sync.packing import ByParameter
from sparkdl.sync.records import SliceHandle, SliceReport
from sparkdl.sync.residuals import write_residuals
from sparkdl.sync.store import copy_of, write_copy
from sparkdl.worker import settle_worker

if TYPE_CHECKING:
    from sparkdl.replica.run import Run


@dataclass(frozen=True)
class TakeSnapshot:
    """Body over the owner RDD: the slice's state, and what is kept as the best, in one frame.

    ``count``: how many frames, the rest of them empty, because a zip with the owner RDD wants as
    many. ``best`` is empty where none is kept.
    """

    states: tuple[SliceHandle, ...]
    best: tuple[SliceHandle, ...]
    count: int

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        pool = open_pool(run_of(frames).slab)
        kept = copy_of(pool, self.best[partition]) if self.best else None
        yield pickle.dumps((copy_of(pool, self.states[partition]), kept), protocol=5)
        for _ in range(self.count - 1):
            yield b""
        settle_worker()


@dataclass(frozen=True)
class RestoreSlice:
    """Body over (snapshot, owner) pairs: write the slice's state into this node's slabs, in ``tick``.

    Yields a pickled :class:`SliceReport` and the handle of the best weights, or None.
    """

    tick: int

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        snapshot, owner = _first(pairs)
        run: Run = pickle.loads(owner)
        pool = open_pool(run.slab)
        current, kept = pickle.loads(snapshot)
        handle = write_copy(pool, current, "state", self.tick)
        best = None if kept is None else write_copy(pool, kept, "best", self.tick)
        yield pickle.dumps((SliceReport(partition, pool.token, handle), best))
        settle_worker()


def copied(replica: int, kept: ByParameter) -> ByParameter:
    """Run at a replica's place: what it keeps between iterations, with memory of its own."""
    return {m: {name: tensor.clone() for name, tensor in some.items()} for m, some in kept.items()}


@dataclass(frozen=True)
class RestoreResidual:
    """Body over (snapshot, padded seat) pairs: write what a replica kept into this node's slabs.

    The snapshot's frame is a pickled (replica, kept or None). Yields a pickled (replica, handle or
    None).
    """

    tick: int

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        snapshot, seat = _first(pairs)
        replica, kept = pickle.loads(snapshot)
        run: Run = pickle.loads(pickle.loads(seat)[0]).run
        handle = None
        if kept is not None:
            handle = write_residuals(open_pool(run.slab), replica, None, kept, self.tick)
        yield pickle.dumps((replica, handle))
        settle_worker()


def _first(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The first that is not empty of each; reads all, so that Spark keeps the worker."""
    left = right = b""
    for one, other in pairs:
        left, right = left or one, right or other
    return left, right
