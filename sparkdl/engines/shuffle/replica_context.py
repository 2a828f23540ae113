"""The bodies of tasks that run at replicas, and the context that they give to each of them.

Such a task runs on a partition of the replica RDD, zipped with the replica's samples. It has the
replica, its samples, and version t of every slice, by reference or as bytes from other nodes.

Task bodies over the owner RDD that create, read and copy the slices' state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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


Pairs = Iterable[tuple[bytes, bytes]]
"""The zipped frames of two RDDs in a partition."""


def prepare_slice(
    run: RunSpec, recipe: RecipeSource, count: int, partition: int, records: Iterable[object]
) -> Iterator[bytes]:
    """Body of the owner RDD: write the recipe to the node; yields ``count`` frames, the run first.

    The owner RDD is persisted and never changes. Spark runs a slice's synchronization where the
    slice's partition of this RDD lies. It has as many records as frames arrive, because zipping
    requires that.
    """
    for _ in records:
        pass
    recipe.install(run)
    yield from counted_frames(pickle.dumps(run), count)


def counted_frames(content: bytes, count: int) -> Iterator[bytes]:
    """Yield ``count`` frames, all but the first of which are empty."""
    yield content
    for _ in range(count - 1):
        yield b""


def recount(count: int, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Body over the owner RDD or the replica RDD: yield the same content with ``count`` frames."""
    yield from counted_frames(next(frame for frame in list(frames) if frame), count)


def at_owner(
    work: Callable[[int, RunSpec], Any], partition: int, frames: Iterable[bytes]
) -> Iterator[bytes]:
    """Body over the owner RDD: yield the pickled result of ``work(partition, run)``."""
    yield pickle.dumps(work(partition, run_of(frames)))


def initial_state(
    read: Callable[[SliceSpec, torch.dtype], SliceState] | None,
    role: str,
    submission: int,
    partition: int,
    run: RunSpec,
) -> SliceReport | Exception:
    """Write version 0 of the slice.

    If ``read`` raises DamagedCheckpoint, or the model cannot be built again, the exception is
    returned. Without ``read`` the slice gets the weights of a replica that is built for this
    purpose, and no optimizer state.
    """
    try:
        begun = build_replica(run).flat.flat if read is None else None
        plans, pool = plans_of(run), open_pool(run.slab)
        plan = plans.slices[partition]
        if begun is not None:
            state = SliceState(begun[plan.start : plan.stop].cpu())
        else:
            assert read is not None
            state = read(plan, plans.dtype)
    except (DamagedCheckpoint, ModelError) as error:
        return error
    return SliceReport(partition, pool.node_id, first_version(pool, state, submission, role))


def publish_weights(
    states: tuple[SliceHandle, ...],
    node_ids: tuple[str, ...],
    everything: bool,
    partition: int,
    frames: Iterable[bytes],
) -> Iterator[bytes]:
    """Body over the owner RDD if replicas are on other nodes: send weights to each replica."""
    run = run_of(frames)
    pool = open_pool(run.slab)
    handle = states[partition]
    here = handle.node_id == pool.node_id
    by_reference = encode((partition, here, None))
    with_bytes = None
    for replica, node_id in enumerate(node_ids):
        if node_id == pool.node_id or not here:
            yield from send(replica, by_reference)
            continue
        if with_bytes is None:
            with_bytes = version_frame(pool, partition, handle, plans_of(run).dtype, everything)
        yield from send(replica, with_bytes)


def copy_slice(
    states: tuple[SliceHandle, ...], role: str, submission: int, partition: int, run: RunSpec
) -> SliceHandle:
    """Copy the slice's weights that count, for longer than the next iterations.

    The previous copy of the same role is given up.
    """
    return copy_weights(open_pool(run.slab), states[partition], role, submission)


def map_slice(
    states: tuple[SliceHandle, ...],
    use: Callable[[int, SliceSpec, SliceState], Any],
    submission: int,
    partition: int,
    run: RunSpec,
) -> Any:
    """Return ``use(partition, plan, state)`` for the slice's state.

    A large result is left in a slab with ``submission``, see :func:`left_where_large`.
    """
    pool, plans = open_pool(run.slab), plans_of(run)
    handle = states[partition]
    state = read_version(pool, handle, plans.dtype)
    result = use(partition, plans.slices[partition], state)
    for reference in handle.references():
        pool.check(reference)
    return left_where_large(pool, result, submission)


def read_parts(
    parts: Mapping[int, Reference], partition: int, frames: Iterable[bytes]
) -> Iterator[bytes]:
    """Body over the owner RDD: the owners that ``parts`` names each yield one frame of raw bytes."""
    run = run_of(frames)
    if partition in parts:
        yield read_part(open_pool(run.slab), parts[partition])


def run_of(frames: Iterable[bytes]) -> RunSpec:
    """Return the run from an owner's frames; read them to the end, so that Spark keeps the worker."""
    return next(pickle.loads(frame) for frame in list(frames) if frame)


def prepare_replica(
    recipe: RecipeSource, partition: int, frames: Iterable[bytes]
) -> Iterator[bytes]:
    """Body of the replica RDD: write the recipe to the node; yields one frame, the replica's handle."""
    for frame in list(frames):
        recipe.install(pickle.loads(frame).run)
        yield frame


def check_replica(built: Description, partition: int, pairs: Pairs) -> Iterator[bytes]:
    """Body over (replica, samples) pairs: build the replica and compare it with the driver's model.

    Yields a pickled (node id, comparison with ``built``, whether the samples are on this node).
    If building fails because of a user's mistake, the exception takes the place of the comparison.
    """
    for replica, samples in list(pairs):
        run = pickle.loads(replica).run
        node_id = open_pool(run.slab).node_id
        found: Compared | UserError
        try:
            found = compared(build_replica(run).flat.module, built)
        except UserError as error:
            found = error
        except ModuleNotFoundError as error:
            found = model_needs(error, "the executors")
        yield pickle.dumps((node_id, found, lies_here(pickle.loads(samples), node_id)))


def pad_frames(count: int, partition: int, pairs: Pairs) -> Iterator[bytes]:
    """Body over (replica, samples) pairs: pad the one pair to ``count`` frames.

    It can then be zipped with weights.
    """
    for pair in pairs:
        yield from counted_frames(pickle.dumps(pair), count)


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
        states: tuple[SliceHandle, ...],
        checksums: tuple[int, ...] | None,
        replica: bytes,
        samples: bytes,
        arrived: RemoteWeights,
        copies: NodeCopies,
    ) -> ReplicaContext:
        """Open what a task needs: its handles, this node's slabs, and the version to compute on.

        :meth:`fault` says whether all of it is here.
        """
        handle: ReplicaHandle = pickle.loads(replica)
        run, index, pool = handle.run, handle.index, open_pool(handle.run.slab)
        checksum = handle.checksum if checksums is None else checksums[index]
        mine, found = copies.get(pool.node_id, {}), pickle.loads(samples)
        return ReplicaContext(run, index, found, checksum, states, mine, arrived, pool)

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


def at_replicas(
    task: ReplicaTask,
    states: tuple[SliceHandle, ...],
    checksums: tuple[int, ...] | None,
    copies: NodeCopies,
    partition: int,
    pairs: Pairs,
) -> Iterator[bytes]:
    """Body over (replica, samples) pairs: run ``task`` at each, with weights by reference.

    ``checksums`` are those of the samples, if they are not the training samples.
    """
    for replica, samples in list(pairs):
        yield from task(ReplicaContext.open(states, checksums, replica, samples, {}, copies))


def at_replicas_with_weights(
    task: ReplicaTask,
    states: tuple[SliceHandle, ...],
    checksums: tuple[int, ...] | None,
    partition: int,
    pairs: Pairs,
) -> Iterator[bytes]:
    """Body like :func:`at_replicas`, with the weights of other nodes as bytes from zipped frames."""
    padded, frames, clock = b"", [], Clock()
    for pad, frame in pairs:
        padded = padded or pad
        frames.append(frame)
    replica, samples = pickle.loads(padded)
    dtype = plans_of(pickle.loads(replica).run).dtype
    arrived = dict(found for found in (read_frame(f, dtype) for f in frames) if found)
    context = ReplicaContext.open(states, checksums, replica, samples, arrived, {})
    clock.lap("fetch")
    yield from task(replace(context, waited=clock.seconds["fetch"]))
