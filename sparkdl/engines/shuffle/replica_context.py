"""The bodies of tasks that run at replicas, and the context that they give to each of them.

Such a task runs on a partition of the replica RDD, zipped with the replica's samples. It has the
replica, its samples, and version t of every slice, by reference or as bytes from other nodes.

Task bodies over the owner RDD that create, read and copy the slices' state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sparkdl.codec.packed import encode
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import lies_here, open_partition
from sparkdl.engines.shuffle.messages import (
    MOVED,
    SAMPLES_CHANGED,
    SAMPLES_FOREIGN,
    STATE_FOREIGN,
    NodeCopies,
)
from sparkdl.engines.shuffle.store import (
    RemoteWeights,
    copy_weights,
    first_version,
    load_weights,
    map_weights,
    read_frame,
    read_version,
    version_frame,
)
from sparkdl.errors import DamagedCheckpoint, ModelError, StaleReferenceError, UserError
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.compare import Compared, Description, compared
from sparkdl.replica.iteration import Clock, Fault, SliceHandle, SliceReport
from sparkdl.replica.run import (
    ReplicaHandle,
    RunSpec,
    build_replica,
    install_recipe,
    open_replica,
    plans_of,
)
from sparkdl.slab.pool import Pool, Reference, left_where_large, open_pool, read_part
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.frames import send
from sparkdl.usercode.travel import model_needs


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

    Yields a pickled :class:`SliceReport`. If ``read`` raises DamagedCheckpoint, or the model
    cannot be built again, the frame is the pickled exception. Without ``read`` the slice gets the
    weights of a replica that is built for this purpose, and no optimizer state.
    """

    read: Callable[[SliceSpec, torch.dtype], SliceState] | None = None
    role: str = "state"
    submission: int = 0

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        try:
            begun = build_replica(run).flat.flat if self.read is None else None
            plans, pool = plans_of(run), open_pool(run.slab)
            plan = plans.slices[partition]
            if begun is not None:
                state = SliceState(begun[plan.start : plan.stop].cpu())
            else:
                assert self.read is not None
                state = self.read(plan, plans.dtype)
        except (DamagedCheckpoint, ModelError) as error:
            yield pickle.dumps(error)
        else:
            handle = first_version(pool, state, self.submission, self.role)
            yield pickle.dumps(SliceReport(partition, pool.node_id, handle))


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


@dataclass(frozen=True)
class ReadParts:
    """Body over the owner RDD: the owners that ``parts`` names each yield one frame of raw bytes."""

    parts: Mapping[int, Reference]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        if partition in self.parts:
            yield read_part(open_pool(run.slab), self.parts[partition])


def run_of(frames: Iterable[bytes]) -> RunSpec:
    """Return the run from an owner's frames; read them to the end, so that Spark keeps the worker."""
    return next(pickle.loads(frame) for frame in list(frames) if frame)


@dataclass(frozen=True)
class PrepareReplica:
    """Body of the replica RDD: write the recipe to the node; yields one frame, the replica's handle."""

    recipe: RecipeSource

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for frame in list(frames):
            handle: ReplicaHandle = pickle.loads(frame)
            self.recipe.install(handle.run)
            yield frame


@dataclass(frozen=True)
class CheckReplica:
    """Body over (replica, samples) pairs: build the replica and compare it with the driver's model.

    Yields a pickled (node id, comparison with ``built``, whether the samples are on this node).
    If building fails because of a user's mistake, the exception takes the place of the comparison.
    """

    built: Description

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in list(pairs):
            run = pickle.loads(replica).run
            node_id = open_pool(run.slab).node_id
            found: Compared | UserError
            try:
                found = compared(build_replica(run).flat.module, self.built)
            except UserError as error:
                found = error
            except ModuleNotFoundError as error:
                found = model_needs(error, "the executors")
            yield pickle.dumps((node_id, found, lies_here(pickle.loads(samples), node_id)))


@dataclass(frozen=True)
class PadFrames:
    """Body over (replica, samples) pairs: pad the one pair to the number of frames in ``counts``.

    It can then be zipped with weights.
    """

    counts: Sequence[int]

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in pairs:
            yield pickle.dumps((replica, samples))
            for _ in range(self.counts[partition] - 1):
                yield b""


@dataclass(frozen=True)
class ReplicaContext:
    """The context of a task at a replica."""

    run: RunSpec
    index: int
    samples: SampleHandle
    checksum: int
    states: tuple[SliceHandle, ...]
    copies: Mapping[int, SliceHandle]
    arrived: RemoteWeights
    pool: Pool
    waited: float = 0.0

    @staticmethod
    def open(
        body: AtReplicas | AtReplicasWithWeights,
        replica: bytes,
        samples: bytes,
        arrived: RemoteWeights,
        copies: NodeCopies,
    ) -> ReplicaContext:
        """Open what a task needs: its handles, this node's slabs, and the version to compute on.

        :meth:`fault` says whether all of it is here.
        """
        handle: ReplicaHandle = pickle.loads(replica)
        checksum = handle.checksum if body.checksums is None else body.checksums[handle.index]
        pool = open_pool(handle.run.slab)
        mine = copies.get(pool.node_id, {})
        found = pickle.loads(samples)
        return ReplicaContext(
            handle.run, handle.index, found, checksum, body.states, mine, arrived, pool
        )

    @property
    def near(self) -> tuple[SliceHandle, ...]:
        """Return version t, with the copies on this node for other nodes' slices."""
        return tuple(self.copies.get(n, state) for n, state in enumerate(self.states))

    def fault(self) -> Fault | None:
        """Return the reason why nothing can be done here, if there is one."""

        def fault(kind: str) -> Fault:
            return Fault(kind, self.index, self.pool.node_id)

        if not self._samples_here():
            return fault(SAMPLES_FOREIGN)
        if self.samples.checksum != self.checksum:
            return fault(SAMPLES_CHANGED)
        for n, state in enumerate(self.near):
            if n in self.arrived and self.arrived[n] is None:
                return fault(STATE_FOREIGN)
            if n not in self.arrived and state.node_id != self.pool.node_id:
                return fault(MOVED)
        return None

    def _samples_here(self) -> bool:
        """Return whether the samples are on this node and can be mapped, or are mapped already."""
        if not self.samples.num_rows:
            return True
        try:
            return self.samples.node_id == self.pool.node_id and bool(open_partition(self.samples))
        except StaleReferenceError:
            return False

    @property
    def received(self) -> dict[int, int]:
        """Return the bytes of state that came from other nodes, by slice."""
        return {n: state.nbytes for n, state in self.arrived.items() if state is not None}

    def replica(self) -> LiveReplica:
        """Return the live replica with version t copied into it."""
        live = open_replica(self.run)
        load_weights(live, plans_of(self.run).slices, self.near, self.arrived, self.pool)
        return live

    def borrowing(self) -> LiveReplica:
        """Return the live replica with version t used in slabs; call :meth:`check` afterwards."""
        live = open_replica(self.run)
        map_weights(live, plans_of(self.run).slices, self.near, self.pool)
        return live

    def check(self) -> None:
        """Raise :class:`sparkdl.errors.StaleReferenceError` if version t was overwritten."""
        for n, state in enumerate(self.near):
            if n not in self.arrived:
                self.pool.check(state.weights)


ReplicaTask = Callable[[ReplicaContext], Iterator[bytes]]


@dataclass(frozen=True)
class AtReplicas:
    """Body over (replica, samples) pairs: run ``task`` at each, with weights by reference."""

    task: ReplicaTask
    states: tuple[SliceHandle, ...]
    checksums: tuple[int, ...] | None = None  # if not of the training samples
    copies: NodeCopies = field(default_factory=dict)

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in list(pairs):
            yield from self.task(ReplicaContext.open(self, replica, samples, {}, self.copies))


@dataclass(frozen=True)
class AtReplicasWithWeights:
    """Body like :class:`AtReplicas`, with the weights of other nodes as bytes from zipped frames."""

    task: ReplicaTask
    states: tuple[SliceHandle, ...]
    checksums: tuple[int, ...] | None = None

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        padded, frames, clock = b"", [], Clock()
        for pad, frame in pairs:
            padded = padded or pad
            frames.append(frame)
        replica, samples = pickle.loads(padded)
        dtype = plans_of(pickle.loads(replica).run).dtype
        arrived = dict(found for found in (read_frame(f, dtype) for f in frames) if found)
        context = ReplicaContext.open(self, replica, samples, arrived, {})
        clock.lap("fetch")
        yield from self.task(replace(context, waited=clock.seconds["fetch"]))
