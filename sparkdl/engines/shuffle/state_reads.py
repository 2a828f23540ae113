"""Reading a version of the state between two iterations: jobs that change nothing.

Task bodies for snapshots of the state, which Spark keeps on more than one executor.

Spark persists a snapshot's frames with two copies, so that what one executor loses is available on
another. Restoring a snapshot writes slabs anew, wherever the owners are by then. The first frame of
a partition describes its content; the bytes follow in frames of bounded length, see
[Note: large bytes].
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pyspark import RDD

from sparkdl.codec.packed import ByParameter
from sparkdl.engines.delivery import ValidationSet, Wanted, bring, most_at_once, not_here
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.messages import Version
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_context import (
    Pairs,
    ReplicaContext,
    map_slice,
    read_parts,
    run_of,
)
from sparkdl.engines.shuffle.replica_tasks import map_residuals, score_samples
from sparkdl.engines.shuffle.store import copy_residuals, weights_at, write_copy
from sparkdl.loop.engine import CURRENT
from sparkdl.replica.iteration import Fault, ResidualHandle, SliceHandle, SliceReport
from sparkdl.slab.pool import Left, Reference, frames_of, num_frames, open_pool
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import collect_frames, map_frames, stage_name
from sparkdl.usercode import accompanied


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


def _references(handles: Sequence[SliceHandle]) -> list[Reference]:
    return [reference for handle in handles for reference in handle.references()]


def restore_slice(submission: int, partition: int, pairs: Pairs) -> Iterator[bytes]:
    """Body over (snapshot, owner) pairs: write the slice's state into this node's slabs.

    Yields a pickled pair: a :class:`SliceReport`, and the handle of the best weights or None.
    ``submission`` is the submission of the buffers.
    """
    owner, handles, frames = _opened(pairs)
    pool = open_pool(pickle.loads(owner).slab)
    roles = zip(("state", "best"), handles, strict=False)
    found = [write_copy(pool, handle, frames, role, submission) for role, handle in roles]
    best = found[1] if len(found) > 1 else None
    for _ in frames:
        pass
    yield pickle.dumps((SliceReport(partition, pool.node_id, found[0]), best))


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


def restore_residual(submission: int, partition: int, pairs: Pairs) -> Iterator[bytes]:
    """Body over (padded replica, snapshot) pairs: write a replica's residuals into this node's slabs.

    Yields a pickled (replica, handle or None).
    """
    pair, (replica, kept), frames = _opened((frame, pair) for pair, frame in pairs)
    handle = None
    if kept is not None:
        pool = open_pool(pickle.loads(pickle.loads(pair)[0]).run.slab)
        handle = copy_residuals(pool, replica, kept.reference.nbytes, frames, submission)
    for _ in frames:
        pass
    yield pickle.dumps((replica, handle))


def _opened(pairs: Pairs) -> tuple[bytes, Any, Iterator[bytes]]:
    """Return the first right element (a slice or a replica), the first frame unpickled, and the rest.

    Read the others to the end, so that Spark keeps the Python worker.
    """
    rest = iter(pairs)
    first, place = next(rest)
    return place, pickle.loads(first), (frame for frame, _ in rest if frame)


@dataclass(frozen=True)
class SnapshotRdds:
    """A snapshot of the state that Spark keeps, on two executors if there are two."""

    slices: RDD
    slice_frames: int
    residuals: RDD | None
    residual_frames: int


class StateReader:
    """The jobs that read the state at the places of replicas and slices."""

    def __init__(self, placement: Placement, resources: FitResources) -> None:
        self._placement, self._resources = placement, resources
        self._context = resources.context

    def score(self, version: Version, validation: ValidationSet) -> list[Any]:
        """Score the validation samples in one job at the replicas; return the merged states."""
        samples = validation.samples
        rdd = samples.rdd
        assert rdd is not None
        scorer, how = accompanied(validation.scorer), (validation.batch_spec, validation.batch_size)
        task = partial(score_samples, scorer, *how)
        checksums = tuple(handle.checksum for handle in samples.handles)

        def submit() -> tuple[dict[int, Any], list[Fault]]:
            with stage_name(self._context, "validation"):
                scored = self._placement.tasks_with_weights(
                    task, rdd, version.states, version.copies, checksums
                )
                found = self._placement.pickled(scored)
            states = dict(found)
            return states, [fault for fault in states.values() if isinstance(fault, Fault)]

        states = self._placement.retry(submit, "validation", rdd)
        return validation.scorer.merge([states[replica] for replica in sorted(states)])

    def weights(
        self, states: Sequence[SliceHandle], dtype: torch.dtype, which: str = CURRENT
    ) -> torch.Tensor:
        """Return the flat weights, from slabs on the driver's node or fetched by jobs in parts."""
        fragments = [weights_at(state, which) for state in states]
        flat = torch.empty(
            sum(r.nbytes for some in fragments for r in some) // dtype.itemsize, dtype=dtype
        )
        wanted: list[Wanted] = []
        rest = flat.numpy().view(np.uint8)
        for number, some in enumerate(fragments):
            for reference in some:
                wanted.append((number, reference, rest[: reference.nbytes]))
                rest = rest[reference.nbytes :]
        self._deliver(wanted, "collecting the weights", "collect the weights")
        return flat

    def map_slices(
        self,
        states: tuple[SliceHandle, ...],
        use: Callable[[int, SliceSpec, SliceState], Any],
        submission: int,
    ) -> list[Any]:
        """Call ``use`` on every slice with one task per slice, in parallel.

        Large results come back like the weights.
        """
        with faults_explained("reading the state"):
            task = partial(map_slice, states, use, submission)
            results = self._placement.at_slices(task, "read the state")
        for number, result in enumerate(results):
            if isinstance(result, Left):
                data = np.empty(result.reference.nbytes, dtype=np.uint8)
                wanted = [(number, result.reference, data)]
                self._deliver(wanted, "reading the state", "bring the state")
                results[number] = data.tobytes()
        return results

    def map_residuals(
        self, residuals: Sequence[ResidualHandle | None], use: Callable[[int, ByParameter], Any]
    ) -> list[Any]:
        """Call ``use`` on all residuals, in parallel with one task per replica.

        No job runs if there are none.
        """
        if not any(residuals):
            return []
        with faults_explained("reading the replicas' residuals"):
            task = partial(map_residuals, tuple(residuals), use)
            found = dict(self._placement.at_replicas(task, "read the replicas' residuals"))
        return [found[m] for m, handle in enumerate(residuals) if handle is not None]

    def take_snapshot(
        self,
        states: tuple[SliceHandle, ...],
        best: tuple[SliceHandle, ...],
        residuals: tuple[ResidualHandle | None, ...],
    ) -> SnapshotRdds:
        """Have Spark keep a copy of the state; ``best`` is empty if no best weights are kept."""
        self._context.setJobDescription("sparkdl: taking a snapshot")
        task = TakeSnapshot(states, best)
        with faults_explained("taking a snapshot"), stage_name(self._context, "take a snapshot"):
            slices = self._resources.replicated(map_frames(self._placement.slice_rdd, task))
            kept, count = None, 0
            if any(residuals):
                try:
                    taking = TakeResidual(residuals)
                    count = taking.count
                    kept = self._resources.replicated(self._placement.tasks_without_weights(taking))
                except BaseException:
                    self._resources.forget(slices)
                    raise
        return SnapshotRdds(slices, task.count, kept, count)

    def drop(self, snapshot: SnapshotRdds) -> None:
        """Have Spark delete a snapshot."""
        for rdd in (snapshot.slices, snapshot.residuals):
            if rdd is not None:
                self._resources.forget(rdd)

    def _deliver(self, wanted: Sequence[Wanted], doing: str, stage: str) -> None:
        def read(parts: Mapping[int, Reference]) -> list[bytes]:
            return collect_frames(map_frames(self._placement.slice_rdd, partial(read_parts, parts)))

        far = not_here(self._resources.slab, wanted)
        if far:
            self._context.setJobDescription(f"sparkdl: {doing}")
            with faults_explained(doing), stage_name(self._context, stage):
                bring(far, read, most_at_once(self._context))
