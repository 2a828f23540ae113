"""Task bodies over the owner RDD that create, read and copy the slices' state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.codec.frames import encode
from sparkdl.engines.shuffle.store import copy_weights, first_version, read_version
from sparkdl.engines.shuffle.weights import version_frame
from sparkdl.errors import ModelError
from sparkdl.replica.iteration import SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec, build_replica, install_recipe, plans_of
from sparkdl.slab.parts import left_where_large, read_part
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.frames import send
from sparkdl.spark.worker import finish_task


@dataclass(frozen=True)
class RecipeSource:
    """The pickled recipe: in the task itself if it is small, otherwise in a broadcast."""

    inline: bytes | None
    broadcast: BroadcastBytes | None = None

    def install(self, run: RunSpec) -> None:
        """Write the recipe to this node."""
        if self.broadcast is not None:
            install_recipe(run, self.broadcast, sum(self.broadcast.lengths))
        elif self.inline is not None:
            install_recipe(run, [self.inline], len(self.inline))


@dataclass(frozen=True)
class PrepareSlice:
    """Body of the owner RDD: write the recipe to the node; yields ``count`` frames, the run first.

    The owner RDD is persisted and never changes. Spark runs a slice's synchronization where the
    slice's partition of this RDD lies. It has as many records as frames arrive, because zipping
    requires that.
    """

    run: RunSpec
    recipe: RecipeSource
    count: int

    def __call__(self, partition: int, records: Iterable[object]) -> Iterator[bytes]:
        for _ in records:
            pass
        self.recipe.install(self.run)
        yield pickle.dumps(self.run)
        for _ in range(self.count - 1):
            yield b""


@dataclass(frozen=True)
class Recount:
    """Body over the owner RDD or the replica RDD: yield the same content with ``count`` frames."""

    count: int

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        yield next(frame for frame in list(frames) if frame)
        for _ in range(self.count - 1):
            yield b""


@dataclass(frozen=True)
class InitialState:
    """Body over the owner RDD: write version 0 of the slice.

    Yields a pickled :class:`SliceReport`. If ``read`` raises one of ``reported``, or the model
    cannot be built again, the frame is the pickled exception. Without ``read`` the slice gets the
    weights of a replica that is built for this purpose, and no optimizer state.
    """

    read: Callable[[SliceSpec, torch.dtype], SliceState] | None = None
    reported: tuple[type[Exception], ...] = ()
    role: str = "state"
    submission: int = 0

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        reported: tuple[type[Exception], ...] = (*self.reported, ModelError)
        try:
            begun = build_replica(run).flat.flat if self.read is None else None
            plans, pool = plans_of(run), open_pool(run.slab)
            plan = plans.slices[partition]
            if begun is not None:
                state = SliceState(begun[plan.start : plan.stop].cpu())
            else:
                assert self.read is not None
                state = self.read(plan, plans.dtype)
        except reported as error:
            yield pickle.dumps(error)
        else:
            handle = first_version(pool, state, self.submission, self.role)
            yield pickle.dumps(SliceReport(partition, pool.node_id, handle))
        finish_task()


@dataclass(frozen=True)
class PublishWeights:
    """Body over the owner RDD if replicas are on other nodes: send weights to each replica."""

    states: tuple[SliceHandle, ...]
    replica_tokens: tuple[str | None, ...]  # nodes; None: bytes must be sent whatever the node
    everything: bool = False

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        pool = open_pool(run.slab)
        handle = self.states[partition]
        here = handle.node_id == pool.node_id
        by_reference = encode((partition, here, None))
        with_bytes = None
        for replica, node_id in enumerate(self.replica_tokens):
            if node_id == pool.node_id or not here:
                yield from send(replica, by_reference)
                continue
            if with_bytes is None:
                with_bytes = version_frame(
                    pool, partition, handle, plans_of(run).dtype, self.everything
                )
            yield from send(replica, with_bytes)


@dataclass(frozen=True)
class CopyWeights:
    """Body over the owner RDD: copy the slice's weights that count, for longer than the next
    iterations.

    Yields the copy's pickled :class:`SliceHandle`. The previous copy of the same role is given up.
    """

    states: tuple[SliceHandle, ...]
    role: str
    submission: int

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        pool = open_pool(run.slab)
        copy = copy_weights(pool, self.states[partition], self.role, self.submission)
        yield pickle.dumps(copy)
        finish_task()


@dataclass(frozen=True)
class MapSlice:
    """Body over the owner RDD: call ``use(partition, plan, state)`` on the slice's state.

    Yields one frame, the pickled result. A large result is left in a slab with ``submission``, see
    :func:`left_where_large`.
    """

    states: tuple[SliceHandle, ...]
    use: Callable[[int, SliceSpec, SliceState], Any]
    submission: int

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        pool, plans = open_pool(run.slab), plans_of(run)
        handle = self.states[partition]
        state = read_version(pool, handle, plans.dtype)
        result = self.use(partition, plans.slices[partition], state)
        for reference in handle.references():
            pool.check(reference)
        yield pickle.dumps(left_where_large(pool, result, self.submission))
        finish_task()


@dataclass(frozen=True)
class ReadParts:
    """Body over the owner RDD: the owners that ``parts`` names each yield one frame of raw bytes."""

    parts: Mapping[int, Reference]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        if partition in self.parts:
            yield read_part(open_pool(run.slab), self.parts[partition])
        finish_task()


def run_of(frames: Iterable[bytes]) -> RunSpec:
    """Return the run from an owner's frames; read them to the end, so that Spark keeps the worker."""
    return next(pickle.loads(frame) for frame in list(frames) if frame)
