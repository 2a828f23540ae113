"""The placement of a run's replicas and owners: the persisted RDDs, and tasks that run over them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark import RDD

from sparkdl.data.samples import deleted_without_end
from sparkdl.engines.delivery import EngineInputs
from sparkdl.engines.resources import MAX_SUBMISSIONS, write_again
from sparkdl.engines.shuffle.messages import MOVED, SAMPLES_FOREIGN, NodeCopies, raise_unrecoverable
from sparkdl.engines.shuffle.replica_context import (
    RecipeSource,
    ReplicaTask,
    at_owner,
    at_replicas,
    at_replicas_with_weights,
    check_replica,
    pad_frames,
    prepare_replica,
    prepare_slice,
    publish_weights,
    recount,
)
from sparkdl.errors import TrainingError
from sparkdl.replica.compare import check_same
from sparkdl.replica.iteration import Fault, ReplicaReport, SliceHandle
from sparkdl.replica.run import ReplicaHandle, RunSpec
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import (
    collect_and_forget,
    compute_again,
    is_local,
    map_frames,
    shuffle_frames,
    stage_name,
    stored_frames,
    zip_frames,
)

INLINE_BYTES = 1 << 20
"""The largest recipe that travels inside the task; a larger one travels in a broadcast."""
FEW_BYTES = 64 << 20
"""The most bytes of weights or gradients that a task may send from the memory of its JVM."""


class Placement:
    """The persisted RDDs of a run, and the node of each replica.

    ``slice_rdd`` lies where the slices' state lies, with a record per replica in each partition;
    ``slices_counted`` has a record per slice, if a job needs it so.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Create the RDDs of the run and persist them."""
        samples, run, recipe, resources = inputs.samples, inputs.run, inputs.payload, inputs.spark
        assert samples.rdd is not None
        self.samples, self._run, self._built = samples.rdd, run, inputs.built
        self._options = inputs.recipe.options
        self.few_bytes = inputs.layout.nbytes <= FEW_BYTES
        self.replica_nodes: tuple[str, ...] = ()
        self._zipped: dict[RDD, RDD] = {}
        context = self._context = resources.context
        if len(recipe) > INLINE_BYTES:
            source = RecipeSource(None, resources.broadcast([recipe]))
        else:
            source = RecipeSource(recipe)
        handles = [
            pickle.dumps(ReplicaHandle(run, index, handle.checksum))
            for index, handle in enumerate(samples.handles)
        ]
        replicas = map_frames(
            context.parallelize(handles, run.replicas), partial(prepare_replica, source)
        )
        owners = map_frames(
            context.parallelize(range(run.slices), run.slices),
            partial(prepare_slice, run, source, run.replicas),
        )
        self._replicas, self.slice_rdd = resources.persist(replicas), resources.persist(owners)
        self._recounted: dict[int, RDD] = {}
        self._resources = resources
        self.two_stages = not self._options.clips_norm or run.slices == 1
        self.slices_counted = self.slice_rdd
        if not self.two_stages and run.slices != run.replicas:
            self.slices_counted = resources.persist(
                map_frames(owners, partial(recount, run.slices))
            )

    def place_replicas(self) -> None:
        """Build every replica where its samples are, and note its node."""
        for _ in range(MAX_SUBMISSIONS):
            with stage_name(self._context, "set up replicas"):
                pairs = self._with_samples(self.samples)
                checked = self.pickled(map_frames(pairs, partial(check_replica, self._built)))
            node_ids, found, here = zip(*checked, strict=True)
            if all(here):
                break
            self._write_again(self.samples)
        else:
            raise deleted_without_end("setting up the replicas", self._run.slab)
        check_same(found)
        self.replica_nodes = node_ids

    def note_nodes(self, replicas: Sequence[ReplicaReport]) -> None:
        """Note on which nodes the replicas ran, as they report."""
        nodes = dict(enumerate(self.replica_nodes))
        nodes |= {report.replica: report.node_id for report in replicas}
        self.replica_nodes = tuple(nodes.values())

    def replicas_counted(self, count: int) -> RDD:
        """Return the replica RDD with ``count`` records per partition; the first is the replica's."""
        if count not in self._recounted:
            recounted = map_frames(self._replicas, partial(recount, count))
            self._recounted[count] = self._resources.persist(recounted)
        return self._recounted[count]

    def forget(self) -> None:
        """Have replicas and owners placed anew, because it is unknown which nodes are left.

        Samples that are still where they were written stay there.
        """
        self.replica_nodes = ()
        self._zipped.clear()
        for rdd in {self._replicas, self.slice_rdd, self.slices_counted, *self._recounted.values()}:
            compute_again(rdd)

    def at_slices(self, work: Callable[[int, RunSpec], Any], name: str) -> list[Any]:
        """Return ``work(n, run)`` of every slice, done where its state lies."""
        with stage_name(self._context, name):
            return self.pickled(map_frames(self.slice_rdd, partial(at_owner, work)))

    def at_replicas(self, task: ReplicaTask, name: str) -> list[Any]:
        """Run a task that needs no weights at every replica, and return its results."""
        with stage_name(self._context, name):
            return self.pickled(self.tasks_without_weights(task))

    def tasks_without_weights(self, task: ReplicaTask) -> RDD:
        """Return the RDD of a task that needs no weights at every replica."""
        return map_frames(
            zip_frames(self._replicas, self.samples), partial(at_replicas, task, (), None, {})
        )

    def zipped_with_slices(self, frames: RDD, count: int, task: Callable[..., Any]) -> list[Any]:
        """Run a task over (frame, owner) pairs where the frames are; return its unpickled results."""
        owners = map_frames(self.slice_rdd, partial(recount, count))
        return self.pickled(map_frames(zip_frames(frames, owners), task))

    def zipped_with_replicas(self, frames: RDD, count: int, task: Callable[..., Any]) -> list[Any]:
        """Run a task over (padded replica, frame) pairs, and return its unpickled results.

        It runs where the replicas are, not the frames: Spark goes by the first RDD with a place.
        """
        padded = self._padded(self.samples, count)
        return self.pickled(map_frames(zip_frames(padded, frames), task))

    def pickled(self, rdd: RDD) -> list[Any]:
        """Run a job and return its results, unpickled; delete the shuffles behind it."""
        return [pickle.loads(frame) for frame in collect_and_forget(rdd)]

    def tasks_with_weights(
        self,
        task: ReplicaTask,
        samples: RDD,
        states: tuple[SliceHandle, ...],
        copies: NodeCopies,
        checksums: tuple[int, ...] | None = None,
    ) -> RDD:
        """Return the RDD of a task at every replica, with a version as references or bytes."""
        if self.has_all_weights(states, copies):
            body = partial(at_replicas, task, states, checksums, copies)
            return map_frames(self._with_samples(samples), body)
        publish = partial(publish_weights, states, self.replica_nodes, self._options.averages)
        published = shuffle_frames(
            map_frames(self.slice_rdd, publish), self._run.replicas, self.few_bytes
        )
        padded = self._padded(samples, self._run.slices)
        arrived = partial(at_replicas_with_weights, task, states, checksums)
        return map_frames(zip_frames(padded, published), arrived)

    @property
    def slices(self) -> int:
        """Return N."""
        return self._run.slices

    def _padded(self, samples: RDD, count: int) -> RDD:
        """Return the replicas with their samples, in ``count`` records each."""
        return map_frames(self._with_samples(samples), partial(pad_frames, count))

    def has_all_weights(self, states: tuple[SliceHandle, ...], copies: NodeCopies) -> bool:
        """Return whether every replica has all slices, or copies of them, on its node."""
        return all(
            state.node_id == node_id or n in copies.get(node_id, {})
            for node_id in set(self.replica_nodes)
            for n, state in enumerate(states)
        )

    def _with_samples(self, samples: RDD) -> RDD:
        """Return the replicas with their samples, which are persisted.

        In local mode the samples come without their lineage, to keep tasks small, and once for all
        iterations. Elsewhere an RDD knows only the executors that there were when it was made.
        """
        if not is_local(self._context):
            return zip_frames(self._replicas, samples)
        if samples not in self._zipped:
            self._zipped[samples] = zip_frames(self._replicas, stored_frames(samples))
        return self._zipped[samples]

    def single_node(self, states: tuple[SliceHandle, ...]) -> bool:
        """Return whether all replicas and all slices are on one node."""
        return len({*self.replica_nodes, *[state.node_id for state in states]}) == 1

    def retry(self, submit: Callable[[], tuple[Any, list[Fault]]], doing: str, samples: RDD) -> Any:
        """Submit a job, again if its tasks run on other nodes than expected; return its result."""
        faults: list[Fault] = []
        for submission in range(MAX_SUBMISSIONS):
            with faults_explained(doing):
                result, faults = submit()
            if not faults:
                return result
            if submission:  # the first time, the task may just have been sent to a less busy node
                raise_unrecoverable(faults, doing)
            self.resolve(faults, samples)
        if is_local(self._context):  # there is no other node
            raise deleted_without_end(doing, self._run.slab)
        raise TrainingError(
            f"{doing}: after {MAX_SUBMISSIONS} submissions tasks still find "
            f"themselves on other nodes than their data: {sorted({f.kind for f in faults})}."
        )

    def resolve(self, faults: list[Fault], samples: RDD) -> None:
        """Prepare the next submission after tasks have reported faults."""
        self._zipped.clear()
        moved = {fault.partition: fault.node_id for fault in faults if fault.kind == MOVED}
        self.replica_nodes = tuple(
            moved.get(i, node_id) for i, node_id in enumerate(self.replica_nodes)
        )
        if any(fault.kind == SAMPLES_FOREIGN for fault in faults):
            self._write_again(samples)

    def _write_again(self, samples: RDD) -> None:
        """Have each partition of the samples written again; see :func:`write_again`."""
        self._zipped.pop(samples, None)
        write_again(samples, self._run.slab)
