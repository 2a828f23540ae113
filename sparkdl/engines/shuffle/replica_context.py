"""A replica's place: its seat, and how a task comes to it. Task bodies only.

A task at a seat has the replica, its samples, and version t of every slice: by reference, or as bytes
from other nodes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import lies_here, open_partition
from sparkdl.engines.shuffle.messages import (
    MOVED,
    SAMPLES_CHANGED,
    SAMPLES_FOREIGN,
    STATE_FOREIGN,
    IterationMessage,
    NodeCopies,
)
from sparkdl.engines.shuffle.state_tasks import RecipeSource
from sparkdl.engines.shuffle.weights import RemoteWeights, load_weights, map_weights, read_frame
from sparkdl.errors import StaleReferenceError, UserError
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compare import Compared, Description, compared
from sparkdl.replica.iteration import Clock, Fault, SliceHandle
from sparkdl.replica.run import ReplicaHandle, RunSpec, build_replica, open_replica, plans_of
from sparkdl.slab.pool import Pool, open_pool
from sparkdl.spark.message import posted
from sparkdl.spark.worker import finish_task
from sparkdl.usercode.travel import model_needs


@dataclass(frozen=True)
class PrepareReplica:
    """Body of the replica RDD: put the recipe on the node; one frame, the replica's handle."""

    recipe: RecipeSource

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for frame in list(frames):
            handle: ReplicaHandle = pickle.loads(frame)
            self.recipe.install(handle.run)
            yield frame


@dataclass(frozen=True)
class CheckReplica:
    """Body over (replica, samples) pairs: build the replica; a pickled (node token, how it compares
    with the driver's, ``built``, whether its samples are on the node). A mistake of the user's that is
    found meanwhile is in place of the comparison."""

    built: Description

    def __call__(self, partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in list(seats):
            run = pickle.loads(replica).run
            token = open_pool(run.slab).token
            found: Compared | UserError
            try:
                found = compared(build_replica(run).flat.module, self.built)
            except UserError as error:
                found = error
            except ModuleNotFoundError as error:
                found = model_needs(error, "the executors")
            yield pickle.dumps((token, found, lies_here(pickle.loads(samples), token)))
        finish_task()


@dataclass(frozen=True)
class PadFrames:
    """One seat (replica frame, sample frame) -> as many frames as ``counts`` says of its partition, to
    be zipped with weights."""

    counts: Sequence[int]

    def __call__(self, partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in seats:
            yield pickle.dumps((replica, samples))
            for _ in range(self.counts[partition] - 1):
                yield b""


@dataclass(frozen=True)
class ReplicaContext:
    """What a task at a replica's place works with. ``waited``: seconds for what ``arrived``."""

    run: RunSpec
    index: int
    samples: SampleHandle
    checksum: int
    states: tuple[SliceHandle, ...]
    copies: Mapping[int, SliceHandle]
    arrived: RemoteWeights
    pool: Pool
    waited: float = 0.0

    @property
    def near(self) -> tuple[SliceHandle, ...]:
        """Version t, of other nodes' slices the copies that this node has."""
        return tuple(self.copies.get(n, state) for n, state in enumerate(self.states))

    def fault(self) -> Fault | None:
        """Why nothing can be done here, if so."""

        def fault(kind: str) -> Fault:
            return Fault(kind, self.index, self.pool.token)

        if not self._samples_here():
            return fault(SAMPLES_FOREIGN)
        if self.samples.checksum != self.checksum:
            return fault(SAMPLES_CHANGED)
        for n, state in enumerate(self.near):
            if n in self.arrived and self.arrived[n] is None:
                return fault(STATE_FOREIGN)
            if n not in self.arrived and state.token != self.pool.token:
                return fault(MOVED)
        return None

    def _samples_here(self) -> bool:
        """Whether the samples are on this node, and there: mapped already, or to be mapped."""
        if not self.samples.num_rows:
            return True
        try:
            return self.samples.token == self.pool.token and bool(open_partition(self.samples))
        except StaleReferenceError:
            return False

    @property
    def received(self) -> dict[int, int]:
        """Bytes of state that came from another node, by slice."""
        return {n: state.nbytes for n, state in self.arrived.items() if state is not None}

    def replica(self) -> LiveReplica:
        """The live replica with version t in it."""
        live = open_replica(self.run)
        load_weights(live, plans_of(self.run).slices, self.near, self.arrived, self.pool)
        return live

    def borrowing(self) -> LiveReplica:
        """Likewise, with version t where it lies; :meth:`check` afterwards."""
        live = open_replica(self.run)
        map_weights(live, plans_of(self.run).slices, self.near, self.pool)
        return live

    def check(self) -> None:
        """Raise :class:`sparkdl.errors.StaleReferenceError` where version t was overwritten."""
        for n, state in enumerate(self.near):
            if n not in self.arrived:
                self.pool.check(state.weights)


ReplicaTask = Callable[[ReplicaContext], Iterator[bytes]]


@dataclass(frozen=True)
class AtReplicas:
    """Body over (replica, samples) pairs: ``task`` at each, weights by reference.

    ``states``: version t of every slice; None: of the step that the job was told, see
    :mod:`sparkdl.spark.message`. ``checksums``: of the samples of each partition, where they are
    not the training samples. ``copies``: as in a :class:`IterationMessage`.
    """

    task: ReplicaTask
    states: tuple[SliceHandle, ...] | None = None
    checksums: tuple[int, ...] | None = None
    copies: NodeCopies = field(default_factory=dict)

    def __call__(self, partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in list(seats):
            yield from self.task(_seat(self, replica, samples, {}, self.copies))


@dataclass(frozen=True)
class AtReplicasWithWeights:
    """Likewise, with the weights of other nodes as bytes through a shuffle."""

    task: ReplicaTask
    states: tuple[SliceHandle, ...] | None = None
    checksums: tuple[int, ...] | None = None

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        padded, frames, clock = b"", [], Clock()
        for pad, frame in pairs:
            padded = padded or pad
            frames.append(frame)
        replica, samples = pickle.loads(padded)
        dtype = plans_of(pickle.loads(replica).run).dtype
        arrived = dict(found for found in (read_frame(f, dtype) for f in frames) if found)
        seat = _seat(self, replica, samples, arrived, {})
        clock.lap("fetch")
        yield from self.task(replace(seat, waited=clock.seconds["fetch"]))


def _seat(
    body: AtReplicas | AtReplicasWithWeights,
    replica: bytes,
    samples: bytes,
    arrived: RemoteWeights,
    copies: NodeCopies,
) -> ReplicaContext:
    handle: ReplicaHandle = pickle.loads(replica)
    checksum = handle.checksum if body.checksums is None else body.checksums[handle.index]
    pool = open_pool(handle.run.slab)
    states = body.states
    if states is None:
        step: IterationMessage = posted(handle.run.key)
        states, copies = step.states, step.copies
    mine = copies.get(pool.token, {})
    found = pickle.loads(samples)
    return ReplicaContext(handle.run, handle.index, found, checksum, states, mine, arrived, pool)
