"""Task bodies for snapshots of the state, which Spark keeps on more than one executor.

Spark persists a snapshot's frames with two copies, so that what one executor loses is available on
another. Restoring a snapshot writes slabs anew, wherever the owners are by then. The first frame of
a partition describes its content; the bytes follow in frames of bounded length, see
[Note: large bytes].
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.engines.shuffle.state_tasks import run_of
from sparkdl.engines.shuffle.store import copy_residuals, write_copy
from sparkdl.replica.iteration import ResidualHandle, SliceHandle, SliceReport
from sparkdl.slab.parts import frames_of, num_frames
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.spark.worker import finish_task

if TYPE_CHECKING:
    from sparkdl.engines.shuffle.replica_context import ReplicaContext
    from sparkdl.replica.run import RunSpec


@dataclass(frozen=True)
class TakeSnapshot:
    """Body over the owner RDD: copy the slice's state and its best weights into frames.

    ``best`` is empty if no best weights are kept. Every partition has :attr:`count` frames, some of
    them empty, because zipping requires equal numbers.
    """

    states: tuple[SliceHandle, ...]
    best: tuple[SliceHandle, ...]

    @property
    def count(self) -> int:
        return 1 + max(num_frames(_references(self._handles(n))) for n in range(len(self.states)))

    def _handles(self, partition: int) -> list[SliceHandle]:
        return [states[partition] for states in (self.states, self.best) if states]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        pool, handles = open_pool(run_of(frames).slab), self._handles(partition)
        yield pickle.dumps(handles)
        references = _references(handles)
        yield from frames_of(pool, references)
        for _ in range(self.count - 1 - num_frames(references)):
            yield b""
        finish_task()


def _references(handles: Sequence[SliceHandle]) -> list[Reference]:
    return [reference for handle in handles for reference in handle.references()]


@dataclass(frozen=True)
class RestoreSlice:
    """Body over (snapshot, owner) pairs: write the slice's state into this node's slabs.

    Yields a pickled pair: a :class:`SliceReport`, and the handle of the best weights or None.
    ``submission`` is the submission of the buffers.
    """

    submission: int

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        owner, handles, frames = _opened(pairs)
        run: RunSpec = pickle.loads(owner)
        pool = open_pool(run.slab)
        roles = zip(("state", "best"), handles, strict=False)
        found = [write_copy(pool, handle, frames, role, self.submission) for role, handle in roles]
        best = found[1] if len(found) > 1 else None
        for _ in frames:
            pass
        yield pickle.dumps((SliceReport(partition, pool.node_id, found[0]), best))
        finish_task()


@dataclass(frozen=True)
class TakeResidual:
    """Task at each replica: copy the replica's residuals into :attr:`count` frames."""

    handles: tuple[ResidualHandle | None, ...]

    @property
    def count(self) -> int:
        return 1 + max(num_frames([handle.reference]) for handle in self.handles if handle)

    def __call__(self, context: ReplicaContext) -> Iterator[bytes]:
        handle = self.handles[context.index]
        references = [handle.reference] if handle else []
        yield pickle.dumps((context.index, handle))
        yield from frames_of(context.pool, references)
        for _ in range(self.count - 1 - num_frames(references)):
            yield b""
        finish_task()


@dataclass(frozen=True)
class RestoreResidual:
    """Body over (snapshot, padded replica) pairs: write a replica's residuals into this node's slabs.

    Yields a pickled (replica, handle or None).
    """

    submission: int

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        pair, (replica, kept), frames = _opened(pairs)
        run: RunSpec = pickle.loads(pickle.loads(pair)[0]).run
        handle = None
        if kept is not None:
            nbytes = kept.reference.nbytes
            handle = copy_residuals(open_pool(run.slab), replica, nbytes, frames, self.submission)
        for _ in frames:
            pass
        yield pickle.dumps((replica, handle))
        finish_task()


def _opened(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, Any, Iterator[bytes]]:
    """Return the first right element (a slice or a replica), the first frame unpickled, and the rest.

    Read the others to the end, so that Spark keeps the Python worker.
    """
    rest = iter(pairs)
    first, place = next(rest)
    return place, pickle.loads(first), (frame for frame, _ in rest if frame)
