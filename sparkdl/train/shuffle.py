"""The shuffle engine: every iteration is Spark stages that meet at a shuffle.

Two: forward-backward, then synchronization. Where the gradient is clipped by its global norm and
there is more than one slice, synchronization is two stages, since every slice must know the others'
norms before it updates.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
from sparkdl.infer.validate import Score
from sparkdl.replica.flat import Layout
from sparkdl.replica.policy import Policy
from sparkdl.replica.run import ReplicaHandle, Run
from sparkdl.step.job import (
    AtSeats,
    AtSeatsWithBytes,
    ForwardBackward,
    PadFrames,
    PrepareReplica,
    SeatTask,
    check_replica,
)
from sparkdl.sync.codec import as_tensor, decode
from sparkdl.sync.job import Reduce, Synchronize, Update
from sparkdl.sync.owners import (
    CollectWeights,
    InitialState,
    KeepWeights,
    PrepareOwner,
    PublishWeights,
    RecipeSource,
    Recount,
    WithState,
)
from sparkdl.sync.plan import SlicePlan
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
from sparkdl.sync.state import SliceState
from sparkdl.train.engine import (
    AVERAGE,
    BEST,
    CURRENT,
    Iteration,
    ReadState,
    StepResult,
    ValidationSet,
    slowest,
    summarize,
)
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
        policy: Policy,
        batch_size: int,
        resources: Resources,
    ) -> None:
        self.plan = EpochPlan(samples.counts, batch_size)
        assert samples.rdd is not None
        self._samples, self._handles = samples.rdd, samples.handles
        self._layout, self._run, self._policy = layout, run, policy
        self._context = resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._tick = self._floor = 0
        self._tokens: tuple[str, ...] = ()
        self._states: tuple[SliceHandle, ...] = ()
        self._best: tuple[SliceHandle, ...] = ()
        self._persist(recipe, resources)

    def _persist(self, recipe: bytes, resources: Resources) -> None:
        run, context = self._run, self._context
        if len(recipe) > INLINE_BYTES:
            source = RecipeSource(None, resources.broadcast(recipe))
        else:
            source = RecipeSource(recipe)
        handles = [
            pickle.dumps(ReplicaHandle(run, index, handle.checksum))
            for index, handle in enumerate(self._handles)
        ]
        replicas = map_frames(context.parallelize(handles, run.replicas), PrepareReplica(source))
        owners = map_frames(
            context.parallelize(range(run.slices), run.slices),
            PrepareOwner(run, source, run.replicas),
        )
        self._replicas, self._owners = resources.persist(replicas), resources.persist(owners)
        needs_norms = self._policy.clip_norm is not None and self._policy.local_steps == 1
        self._two_stages = not needs_norms or run.slices == 1
        self._updaters = self._owners
        if not self._two_stages and run.slices != run.replicas:
            self._updaters = resources.persist(map_frames(owners, Recount(run.slices)))

    def start(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Place replicas where their samples are and write version 0 of the state."""
        with faults_explained("setting up the replicas"):
            if not self._tokens:
                self._place_replicas()
            task = InitialState(read, reported, "best" if which == BEST else "state")
            results = self._at_owners(task, "write the initial state")
        problem = next((r for r in results if isinstance(r, Exception)), None)
        if problem is not None:
            raise problem
        reports = sorted(results, key=lambda report: report.index)
        states = tuple(report.state for report in reports)
        if which == BEST:
            self._best = states
        else:
            self._states = states

    def _place_replicas(self) -> None:
        with stage_name(self._context, "set up replicas"):
            seats = zip_frames(self._replicas, self._samples)
            replicas = map_frames(seats, _first_of_seat)
            checked = collect_frames(map_frames(replicas, check_replica))
        tokens, digests = zip(*[pickle.loads(frame) for frame in checked], strict=True)
        if len(set(digests)) > 1:
            raise ModelError(
                "model() gave different initial weights in different processes: draw them with "
                "torch, numpy or random only (all three are seeded), or pass a module instance."
            )
        self._tokens = tokens

    def step(self, iteration: Iteration) -> StepResult:
        """Submit the iteration, again where tasks found themselves on another node, and commit."""
        self._context.setJobDescription(iteration.description)
        doing = f"iteration {iteration.index + 1}, epoch {iteration.epoch + 1}"
        rows = self.plan.rows(iteration.batch)

        def submit() -> tuple[tuple[list[SliceReport], float], list[Fault]]:
            self._tick += 1
            started = time.perf_counter()
            step = Step(
                iteration.index,
                iteration.epoch,
                self._tick,
                self._floor,
                rows,
                iteration.hyperparameters,
                iteration.loss_scale,
                iteration.histograms,
            )
            reports = self._submit(step)
            faults = [fault for report in reports for fault in report.faults]
            return (reports, time.perf_counter() - started), faults

        return self._commit(self._until_placed(submit, doing, self._samples))

    def _submit(self, step: Step) -> list[SliceReport]:
        """Run the stages of one step."""
        with stage_name(self._context, "forward-backward"):
            gradients = self._at_seats(ForwardBackward(step), self._samples)
            received = shuffle_frames(gradients, self._run.slices)
        body: Callable[..., Any] = Synchronize(step)
        if not self._two_stages:
            with stage_name(self._context, "reduce"):
                reduced = map_frames(zip_frames(received, self._owners), Reduce(step))
                received = shuffle_frames(reduced, self._run.slices)
                body = Update(step)
        with stage_name(self._context, "parameter synchronization"):
            updated = map_frames(zip_frames(received, self._updaters), body)
            return [pickle.loads(frame) for frame in self._collect(updated)]

    def _commit(self, result: tuple[list[SliceReport], float]) -> StepResult:
        reports, total = result
        reports = sorted(reports, key=lambda report: report.index)
        replicas = reports[0].replicas
        self._states = tuple(report.state for report in reports if report.state)
        self._tokens = tuple(r.token for r in sorted(replicas, key=lambda r: r.replica))
        if not reports[0].skipped:
            self._floor = self._tick
        in_tasks = [slowest([r.seconds for r in some]) for some in (replicas, reports)]
        working = sum(sum(seconds.values()) for seconds in in_tasks)
        seconds = {
            "schedule": max(0.0, total - working),
            **in_tasks[0],
            **in_tasks[1],
            "iteration": total,
        }
        return summarize(replicas, reports, self._layout, seconds)

    def score(self, validation: ValidationSet) -> list[Any]:
        """One job over the replicas' places and the validation samples."""
        samples = validation.samples
        rdd = samples.rdd
        assert rdd is not None
        task = Score(validation.scorer, validation.assembly, validation.batch_size)
        checksums = tuple(handle.checksum for handle in samples.handles)

        def submit() -> tuple[dict[int, Any], list[Fault]]:
            with stage_name(self._context, "validation"):
                scored = self._at_seats(task, rdd, checksums)
                found = dict(pickle.loads(frame) for frame in self._collect(scored))
            return found, [fault for fault in found.values() if isinstance(fault, Fault)]

        states = self._until_placed(submit, "validation", rdd)
        return validation.scorer.merge([states[replica] for replica in sorted(states)])

    def keep_best(self) -> None:
        """Copy the weights beside the state, where they lie."""
        with faults_explained("keeping the best weights"):
            task = KeepWeights(self._states, self._tick)
            self._best = tuple(self._at_owners(task, "keep the best weights"))

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """One job, or one a slice where they are large."""
        self._context.setJobDescription("sparkdl: collecting the weights")
        states = self._best if which == BEST else self._states
        with (
            faults_explained("collecting the weights"),
            stage_name(self._context, "collect the weights"),
        ):
            rdd = map_frames(self._owners, CollectWeights(states, which == AVERAGE))
            few = self._layout.nbytes <= COLLECT_BYTES
            frames = collect_frames(rdd) if few else rdd.toLocalIterator()
            parts = {}
            for frame in frames:
                index, payload = decode(frame)
                parts[index] = as_tensor(payload, self._layout.dtype)
        return torch.cat([parts[n] for n in range(self._run.slices)])

    def with_states(
        self, use: Callable[[int, SlicePlan, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """One task a slice, in parallel."""
        states = self._best if which == BEST else self._states
        with faults_explained("reading the state"):
            return self._at_owners(WithState(states, use), "read the state")

    def _at_owners(self, task: Callable[..., Any], name: str) -> list[Any]:
        """The pickled results of a task over the owner RDD, in slice order."""
        with stage_name(self._context, name):
            return [pickle.loads(f) for f in collect_frames(map_frames(self._owners, task))]

    def _at_seats(
        self, task: SeatTask, samples: RDD, checksums: tuple[int, ...] | None = None
    ) -> RDD:
        """``task`` at every replica's place, with version t by reference or as bytes."""
        seats = zip_frames(self._replicas, samples)
        nodes = {*self._tokens, *[state.token for state in self._states]}
        if len(nodes) == 1:
            return map_frames(seats, AtSeats(task, self._states, checksums))
        everything = self._policy.local_steps > 1
        tokens: tuple[str | None, ...] = self._tokens
        publish = PublishWeights(self._states, tokens, everything)
        published = shuffle_frames(map_frames(self._owners, publish), self._run.replicas)
        padded = map_frames(seats, PadFrames(self._run.slices))
        body = AtSeatsWithBytes(task, self._states, checksums)
        return map_frames(zip_frames(padded, published), body)

    def _collect(self, rdd: RDD) -> list[bytes]:
        """All frames; the shuffles behind them are forgotten."""
        try:
            return collect_frames(rdd)
        finally:
            with contextlib.suppress(Py4JError):
                forget_shuffles(rdd)

    def _until_placed(
        self, submit: Callable[[], tuple[Any, list[Fault]]], doing: str, samples: RDD
    ) -> Any:
        """Submit, again where tasks found themselves on another node than expected."""
        faults: list[Fault] = []
        for _ in range(MAX_SUBMISSIONS):
            with faults_explained(doing):
                result, faults = submit()
            if not faults:
                return result
            self._resolve(faults, doing, samples)
        raise TrainingError(
            f"{doing}: after {MAX_SUBMISSIONS} submissions tasks still find "
            f"themselves on other nodes than their data: {sorted({f.kind for f in faults})}."
        )

    def _resolve(self, faults: list[Fault], doing: str, samples: RDD) -> None:
        """Prepare the next submission after tasks reported faults, or give up."""
        for fault in faults:
            if fault.kind == STATE_FOREIGN:
                raise StateLostError(
                    f"{doing}: the state of a slice is out of reach (its node or "
                    "executor is gone). Fit again, from a checkpoint with resume=, or from the "
                    "initial weights."
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
            samples.unpersist(blocking=True)  # each partition is written where it is read
            samples.persist(StorageLevel.MEMORY_AND_DISK)


def _first_of_seat(partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for replica, _ in list(seats):
        yield replica
