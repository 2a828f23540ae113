"""Where a run's replicas and owners are: the persisted RDDs, and tasks at their places."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.core.rdd import RDD

from sparkdl.data.samples import SampleSet
from sparkdl.engines.resources import MAX_SUBMISSIONS, FitResources, compute_again, samples_changed
from sparkdl.engines.shuffle.messages import (
    MOVED,
    RESIDUAL_FOREIGN,
    SAMPLES_CHANGED,
    SAMPLES_FOREIGN,
    STATE_FOREIGN,
    NodeCopies,
    NodeWeights,
)
from sparkdl.engines.shuffle.replica_context import (
    AtReplicas,
    AtReplicasWithWeights,
    CheckReplica,
    PadFrames,
    PrepareReplica,
    ReplicaTask,
)
from sparkdl.engines.shuffle.state_tasks import PrepareSlice, PublishWeights, RecipeSource, Recount
from sparkdl.errors import StateLostError, TrainingError
from sparkdl.model.flat import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.compare import Description, check_same
from sparkdl.replica.iteration import Fault, SliceHandle
from sparkdl.replica.run import ReplicaHandle, RunSpec
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import (
    collect_and_forget,
    is_local,
    map_frames,
    shuffle_frames,
    stage_name,
    store_frames,
    stored_for,
    stored_frames,
    zip_frames,
)

INLINE_BYTES = 1 << 20
"""A recipe or a state up to this size travels inside the task, a larger one in a broadcast."""
FEW_BYTES = 64 << 20
"""Of weights or gradients: so much a task may send from the memory of its JVM."""


class Placement:
    """The persisted RDDs of a run, and the node of each replica.

    ``owners`` lie where the slices' state lies, in as many records as there are replicas;
    ``updaters`` are the same in as many as there are slices, where a job needs them so.
    """

    def __init__(
        self,
        samples: SampleSet,
        layout: Layout,
        run: RunSpec,
        recipe: bytes,
        policy: TrainingOptions,
        built: Description,
        resources: FitResources,
    ) -> None:
        """``built``: what the driver's model is to begin with."""
        self.few_bytes = layout.nbytes <= FEW_BYTES
        assert samples.rdd is not None
        self.samples, self._run, self._policy = samples.rdd, run, policy
        self._built = built
        self._context = resources.context
        self.tokens: tuple[str, ...] = ()
        self._stored: dict[RDD, RDD] = {}
        context = self._context
        if len(recipe) > INLINE_BYTES:
            source = RecipeSource(None, resources.broadcast([recipe]))
        else:
            source = RecipeSource(recipe)
        handles = [
            pickle.dumps(ReplicaHandle(run, index, handle.checksum))
            for index, handle in enumerate(samples.handles)
        ]
        replicas = map_frames(context.parallelize(handles, run.replicas), PrepareReplica(source))
        owners = map_frames(
            context.parallelize(range(run.slices), run.slices),
            PrepareSlice(run, source, run.replicas),
        )
        self._replicas, self.owners = resources.persist(replicas), resources.persist(owners)
        self._counted: dict[int, RDD] = {}
        self._copied: tuple[SliceHandle, ...] = ()
        self._copies: dict[str, dict[int, SliceHandle]] = {}
        self._resources = resources
        self.two_stages = not policy.clips_norm or run.slices == 1
        self.updaters = self.owners
        if not self.two_stages and run.slices != run.replicas:
            self.updaters = resources.persist(map_frames(owners, Recount(run.slices)))

    def place_replicas(self) -> None:
        """Build every replica where its samples are; note its node."""
        for _ in range(MAX_SUBMISSIONS):
            with stage_name(self._context, "set up replicas"):
                seats = zip_frames(self._replicas, self.samples)
                checked = self.pickled(map_frames(seats, CheckReplica(self._built)))
            tokens, found, here = zip(*checked, strict=True)
            if all(here):
                break
            self._write_again(self.samples)
        check_same(found)
        self.tokens = tokens

    def counted(self, count: int) -> RDD:
        """The replica RDD with ``count`` records a partition, the first the replica's."""
        if count not in self._counted:
            recounted = map_frames(self._replicas, Recount(count))
            self._counted[count] = self._resources.persist(recounted)
        return self._counted[count]

    def note_copies(
        self, states: tuple[SliceHandle, ...], installed: Sequence[NodeWeights]
    ) -> None:
        """Nodes have these copies of ``states``."""
        self._copied, self._copies = states, {}
        for node in installed:
            self._copies[node.token] = {**self._copies.get(node.token, {}), **node.copies}

    def copies_of(self, states: tuple[SliceHandle, ...]) -> NodeCopies:
        """What copies nodes have of other nodes' slices of ``states``."""
        return self._copies if states == self._copied else {}

    def forget(self) -> None:
        """Nobody knows what is left of the nodes: replicas and owners are to be placed anew.

        Samples that are still where they were written stay there.
        """
        self.tokens = ()
        for rdd in {self._replicas, self.owners, self.updaters, *self._counted.values()}:
            compute_again(rdd)
        self._copied, self._copies = (), {}

    def at_owners(self, task: Callable[..., Any], name: str) -> list[Any]:
        """The pickled results of a task over the owner RDD, in slice order."""
        with stage_name(self._context, name):
            return self.pickled(map_frames(self.owners, task))

    def at_replicas(self, task: ReplicaTask, name: str) -> list[Any]:
        """The pickled results of a task at every replica's place that needs no weights."""
        with stage_name(self._context, name):
            return self.pickled(self.seats_of(task))

    def seats_of(self, task: ReplicaTask) -> RDD:
        """A task at every replica's place that needs no weights."""
        return map_frames(zip_frames(self._replicas, self.samples), AtReplicas(task, ()))

    def zipped_with_owners(self, frames: RDD, count: int, task: Callable[..., Any]) -> list[Any]:
        """The pickled results of a task over (frame, owner) pairs, ``count`` in a partition."""
        owners = map_frames(self.owners, Recount(count))
        return self.pickled(map_frames(zip_frames(frames, owners), task))

    def zipped_with_seats(self, frames: RDD, count: int, task: Callable[..., Any]) -> list[Any]:
        """Likewise over (frame, padded seat) pairs."""
        seats = self._padded(self.samples, (count,) * self._run.replicas)
        return self.pickled(map_frames(zip_frames(frames, seats), task))

    def pickled(self, rdd: RDD) -> list[Any]:
        """The results of a job, unpickled; the shuffles behind it are deleted."""
        return [pickle.loads(frame) for frame in collect_and_forget(rdd)]

    def at_seats(
        self,
        task: ReplicaTask,
        samples: RDD,
        states: tuple[SliceHandle, ...],
        checksums: tuple[int, ...] | None = None,
        told: bool = False,
    ) -> RDD:
        """``task`` at every replica's place, with version t (``states``) by reference or as bytes.

        ``samples``: a record for each replica; ``checksums``: of them, where they are not the
        training samples. ``told``: the tasks find version t in what their job is told.
        """
        given = None if told else states
        if self.near(states):
            seats = zip_frames(self._replicas, self._light(samples))
            copies = {} if told else self.copies_of(states)
            return map_frames(seats, AtReplicas(task, given, checksums, copies))
        publish = PublishWeights(given, self.tokens, everything=self.everything_travels)
        published = shuffle_frames(
            map_frames(self.owners, publish), self._run.replicas, self.few_bytes
        )
        padded = self._padded(samples, (self._run.slices,) * self._run.replicas)
        body = AtReplicasWithWeights(task, given, checksums)
        return map_frames(zip_frames(padded, published), body)

    @property
    def fit(self) -> str:
        """The key of the run, by which its tasks know what they are told."""
        return self._run.key

    @property
    def everything_travels(self) -> bool:
        """Whether replicas need the optimizer's state beside the weights."""
        return self._policy.local_steps > 1

    def at_seats_from(self, stored: RDD, task: ReplicaTask, states: tuple[SliceHandle, ...]) -> RDD:
        """Likewise with the training samples, in a job that is told the step; the weights of other
        nodes' slices are blocks of ``stored``, see
        :class:`sparkdl.engines.shuffle.report_sinks.ToBlocks`."""
        missing = self.missing(states)
        padded = self._padded(self.samples, tuple(map(len, missing)))
        body = AtReplicasWithWeights(task)
        return map_frames(zip_frames(padded, stored_for(stored, missing)), body)

    def _padded(self, samples: RDD, counts: tuple[int, ...]) -> RDD:
        """The seats, with as many records each as ``counts`` says."""
        return map_frames(zip_frames(self._replicas, self._light(samples)), PadFrames(counts))

    def missing(self, states: tuple[SliceHandle, ...]) -> list[list[int]]:
        """For each replica the slices that lie on other nodes."""
        far = {
            token: [n for n, state in enumerate(states) if state.token != token]
            for token in set(self.tokens)
        }
        return [far[token] for token in self.tokens]

    def near(self, states: tuple[SliceHandle, ...]) -> bool:
        """Whether every replica has all slices, or copies of them, on its node."""
        copies = self.copies_of(states)
        return all(
            state.token == token or n in copies.get(token, {})
            for token in set(self.tokens)
            for n, state in enumerate(states)
        )

    def _light(self, samples: RDD) -> RDD:
        """The persisted samples, without what their tasks would carry where they need not."""
        if not is_local(self._context):
            return samples
        if samples not in self._stored:
            self._stored[samples] = stored_frames(samples)
        return self._stored[samples]

    def one_node(self, states: tuple[SliceHandle, ...]) -> bool:
        """Whether all replicas and all slices are on one node."""
        return len({*self.tokens, *[state.token for state in states]}) == 1

    def retry(self, submit: Callable[[], tuple[Any, list[Fault]]], doing: str, samples: RDD) -> Any:
        """Submit, again where tasks found themselves on another node than expected."""
        faults: list[Fault] = []
        for submission in range(MAX_SUBMISSIONS):
            with faults_explained(doing):
                result, faults = submit()
            if not faults:
                return result
            if submission:  # once, a task may only have been sent to a node that was less busy
                self.raise_unrecoverable(faults, doing)
            self._resolve(faults, samples)
        raise TrainingError(
            f"{doing}: after {MAX_SUBMISSIONS} submissions tasks still find "
            f"themselves on other nodes than their data: {sorted({f.kind for f in faults})}."
        )

    def _resolve(self, faults: list[Fault], samples: RDD) -> None:
        """Prepare the next submission after tasks reported faults."""
        moved = {fault.partition: fault.token for fault in faults if fault.kind == MOVED}
        self.tokens = tuple(moved.get(i, token) for i, token in enumerate(self.tokens))
        if any(fault.kind == SAMPLES_FOREIGN for fault in faults):
            self._write_again(samples)

    def _write_again(self, samples: RDD) -> None:
        """Each partition will be written where it is read; in local mode now, since there tasks read
        stored blocks, see :func:`sparkdl.spark.frames.stored_frames`."""
        compute_again(samples)
        self._stored.pop(samples, None)
        if is_local(self._context):
            with faults_explained("writing the samples again"):
                store_frames(samples)

    def raise_unrecoverable(self, faults: list[Fault], doing: str) -> None:
        """Raise for what no other submission could mend."""
        for fault in faults:
            if fault.kind == STATE_FOREIGN:
                raise StateLostError(
                    f"{doing}: the state of slice {fault.partition} is out of reach (its node or "
                    "executor is gone)."
                )
            if fault.kind == RESIDUAL_FOREIGN:
                raise StateLostError(
                    f"{doing}: what replica {fault.partition} left out of its compressed gradients is "
                    "out of reach (its node or executor is gone)."
                )
            if fault.kind == SAMPLES_CHANGED:
                raise samples_changed(doing, fault.partition)
