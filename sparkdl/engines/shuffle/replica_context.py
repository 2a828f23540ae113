"""The bodies of tasks that run at replicas, and the context that they give to each of them.

Such a task runs on a partition of the replica RDD, zipped with the replica's samples. It has the
replica, its samples, and version t of every slice, by reference or as bytes from other nodes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import lies_here, open_partition
from sparkdl.engines.shuffle.faults import MOVED, SAMPLES_CHANGED, SAMPLES_FOREIGN, STATE_FOREIGN
from sparkdl.engines.shuffle.messages import NodeCopies
from sparkdl.engines.shuffle.state_tasks import RecipeSource
from sparkdl.engines.shuffle.weights import RemoteWeights, load_weights, map_weights, read_frame
from sparkdl.errors import StaleReferenceError, UserError
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compare import Compared, Description, compared
from sparkdl.replica.iteration import Clock, Fault, SliceHandle
from sparkdl.replica.run import ReplicaHandle, RunSpec, build_replica, open_replica, plans_of
from sparkdl.slab.pool import Pool, open_pool
from sparkdl.spark.worker import finish_task
from sparkdl.usercode.travel import model_needs


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
        finish_task()


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
