"""The shuffle engine: every iteration is two Spark stages that meet at one shuffle."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable, Iterator

import torch
from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.core.rdd import RDD

from sparkdl.data.batches import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.errors import ModelError, StateLostError, TrainingError
from sparkdl.frames import (
    collect_frames,
    forget_shuffles,
    map_frames,
    shuffle_frames,
    stage_name,
    zip_frames,
)
from sparkdl.replica.flat import Layout
from sparkdl.replica.run import ReplicaHandle, Run
from sparkdl.step.job import (
    ForwardBackward,
    ForwardBackwardWithBytes,
    PadFrames,
    PrepareReplica,
    check_replica,
)
from sparkdl.sync.codec import as_tensor, decode
from sparkdl.sync.job import (
    CollectWeights,
    PrepareOwner,
    PublishWeights,
    RecipeSource,
    Synchronize,
    initial_state,
)
from sparkdl.sync.records import (
    MOVED,
    SAMPLES_CHANGED,
    SAMPLES_FOREIGN,
    STATE_FOREIGN,
    Fault,
    SliceHandle,
    SliceReport,
    Step,
)
from sparkdl.train.engine import Iteration, StepResult, slowest, summarize
from sparkdl.train.failure import faults_explained
from sparkdl.train.resources import Resources

INLINE_BYTES = 1 << 20
"""A recipe up to this size travels inside the task, a larger one in a broadcast."""
MAX_SUBMISSIONS = 4
"""How often an iteration is submitted when tasks find themselves on another node than expected."""
COLLECT_BYTES = 256 << 20
"""Weights up to this size come to the driver in one job, larger ones slice by slice."""


class ShuffleEngine:
    """See DESIGN, "One iteration". Holds the persisted RDDs and the handles of version t."""

    def __init__(
        self,
        samples: SampleSet,
        layout: Layout,
        run: Run,
        recipe: bytes,
        batch_size: int,
        resources: Resources,
    ) -> None:
        self.plan = EpochPlan(samples.counts, batch_size)
        assert samples.rdd is not None
        self._samples, self._handles = samples.rdd, samples.handles
        self._layout, self._run = layout, run
        self._context = resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._tick = self._floor = 0
        self._replicas, self._owners = self._persist(recipe, resources)
        self._tokens, self._states = self._prepare()

    def _persist(self, recipe: bytes, resources: Resources) -> tuple[RDD, RDD]:
        run = self._run
        if len(recipe) > INLINE_BYTES:
            source = RecipeSource(None, resources.broadcast(recipe))
        else:
            source = RecipeSource(recipe)
        handles = [
            pickle.dumps(ReplicaHandle(run, index, handle.checksum))
            for index, handle in enumerate(self._handles)
        ]
        context = self._context
        replicas = map_frames(context.parallelize(handles, run.replicas), PrepareReplica(source))
        owners = map_frames(
            context.parallelize(range(run.slices), run.slices), PrepareOwner(run, source)
        )
        return resources.persist(replicas), resources.persist(owners)

    def _prepare(self) -> tuple[tuple[str, ...], tuple[SliceHandle, ...]]:
        """Place replicas where their samples are and write version 0 of the state."""
        with faults_explained("setting up the replicas"):
            with stage_name(self._context, "set up replicas"):
                seats = zip_frames(self._replicas, self._samples)
                replicas = map_frames(seats, _first_of_seat)
                checked = collect_frames(map_frames(replicas, check_replica))
            with stage_name(self._context, "write the initial state"):
                frames = collect_frames(map_frames(self._owners, initial_state))
        tokens, digests = zip(*[pickle.loads(frame) for frame in checked], strict=True)
        if len(set(digests)) > 1:
            raise ModelError(
                "model() gave different initial weights in different processes: draw them with "
                "torch, numpy or random only (all three are seeded), or pass a module instance."
            )
        reports = sorted((pickle.loads(f) for f in frames), key=lambda r: r.index)
        return tokens, tuple(report.state for report in reports if report.state)

    def step(self, iteration: Iteration) -> StepResult:
        """Submit the iteration, again where tasks found themselves on another node, and commit."""
        self._context.setJobDescription(iteration.description)
        doing = f"iteration {iteration.index + 1}, epoch {iteration.epoch + 1}"
        rows = self.plan.rows(iteration.batch)
        for _ in range(MAX_SUBMISSIONS):
            self._tick += 1
            started = time.perf_counter()
            step = Step(
                iteration.index,
                iteration.epoch,
                self._tick,
                self._floor,
                rows,
                iteration.hyperparameters,
            )
            with faults_explained(doing):
                reports, build_seconds = self._submit(step)
            faults = [fault for report in reports for fault in report.faults]
            if not faults:
                return self._commit(reports, build_seconds, time.perf_counter() - started)
            self._resolve(faults, doing)
        raise TrainingError(
            f"{doing}: after {MAX_SUBMISSIONS} submissions tasks still find "
            f"themselves on other nodes than their data: {sorted({f.kind for f in faults})}."
        )

    def _submit(self, step: Step) -> tuple[list[SliceReport], float]:
        """Build and run the two stages (three where weights must travel as bytes)."""
        started = time.perf_counter()
        with stage_name(self._context, "forward-backward"):
            seats = zip_frames(self._replicas, self._samples)
            owners = {state.token for state in self._states}
            published = None
            if all(token in owners for token in self._tokens) and len(owners) == 1:
                gradients = map_frames(seats, ForwardBackward(step, self._states))
            else:
                publish = PublishWeights(self._states, self._tokens)
                published = shuffle_frames(map_frames(self._owners, publish), self._run.replicas)
                padded = map_frames(seats, PadFrames(self._run.slices))
                body = ForwardBackwardWithBytes(step, self._states)
                gradients = map_frames(zip_frames(padded, published), body)
            received = shuffle_frames(gradients, self._run.slices)
        with stage_name(self._context, "parameter synchronization"):
            updated = map_frames(zip_frames(received, self._owners), Synchronize(step))
            updated._jrdd  # noqa: B018 - building ends here
            built = time.perf_counter() - started
            try:
                reports = [pickle.loads(frame) for frame in collect_frames(updated)]
            finally:
                with contextlib.suppress(Py4JError):
                    forget_shuffles(updated)
        return reports, built

    def _commit(
        self, reports: list[SliceReport], build_seconds: float, total_seconds: float
    ) -> StepResult:
        reports = sorted(reports, key=lambda report: report.index)
        replicas = sorted(reports[0].replicas, key=lambda report: report.replica)
        self._states = tuple(report.state for report in reports if report.state)
        self._tokens = tuple(report.token for report in replicas)
        self._floor = self._tick
        seconds = {
            "build": build_seconds,
            **slowest([report.seconds for report in replicas]),
            **slowest([report.seconds for report in reports]),
            "iteration": total_seconds,
        }
        return summarize(replicas, seconds)

    def _resolve(self, faults: list[Fault], doing: str) -> None:
        """Prepare the next submission after tasks reported faults, or give up."""
        for fault in faults:
            if fault.kind == STATE_FOREIGN:
                raise StateLostError(
                    f"{doing}: the state of a slice is out of reach (its node or "
                    "executor is gone). Fit again; training restarts from the initial weights."
                )
            if fault.kind == SAMPLES_CHANGED:
                raise TrainingError(
                    f"{doing}: partition {fault.partition} was computed again and "
                    "holds other rows: the source of the data is not deterministic. Write it out "
                    "(df.write.parquet) or checkpoint it, and fit on that."
                )
        moved = {fault.partition: fault.token for fault in faults if fault.kind == MOVED}
        self._tokens = tuple(moved.get(i, token) for i, token in enumerate(self._tokens))
        if any(fault.kind == SAMPLES_FOREIGN for fault in faults):
            self._samples.unpersist(blocking=True)  # each partition is written where it is read
            self._samples.persist(StorageLevel.MEMORY_AND_DISK)

    def weights(self) -> torch.Tensor:
        self._context.setJobDescription("sparkdl: collecting the weights")
        with (
            faults_explained("collecting the weights"),
            stage_name(self._context, "collect the weights"),
        ):
            rdd = map_frames(self._owners, CollectWeights(self._states))
            few = self._layout.nbytes <= COLLECT_BYTES
            frames = collect_frames(rdd) if few else rdd.toLocalIterator()
            parts = {}
            for frame in frames:
                (index, _), payload = decode(frame)
                parts[index] = as_tensor(payload, self._layout.dtype)
        return torch.cat([parts[n] for n in range(self._run.slices)])


def _first_of_seat(partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for replica, _ in list(seats):
        yield replica
