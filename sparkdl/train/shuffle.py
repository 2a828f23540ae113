"""The shuffle engine: every iteration is Spark stages that meet at a shuffle.

Two: forward-backward, then synchronization. Where the gradient is clipped by its global norm and
there is more than one slice, synchronization is two stages, since every slice must know the others'
norms before it updates.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from sparkdl.data.batches import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.frames import (
    collect_frames,
    map_frames,
    shuffle_frames,
    stage_name,
    zip_frames,
)
from sparkdl.infer.validate import Score
from sparkdl.replica.flat import Layout
from sparkdl.replica.policy import Policy
from sparkdl.replica.run import Run
from sparkdl.step.compressing import InitialResiduals, ReadResiduals, WithResiduals
from sparkdl.step.job import (
    ForwardBackward,
)
from sparkdl.sync.codec import as_tensor, decode
from sparkdl.sync.job import Reduce, Synchronize, Update
from sparkdl.sync.owners import (
    CollectWeights,
    InitialState,
    KeepWeights,
    WithState,
)
from sparkdl.sync.packing import ByParameter
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.records import (
    Fault,
    ResidualHandle,
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
from sparkdl.train.places import Places, collect_and_forget
from sparkdl.train.resources import Resources

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
        self._layout, self._run = layout, run
        self._context = resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._tick = self._floor = 0
        self._states: tuple[SliceHandle, ...] = ()
        self._best: tuple[SliceHandle, ...] = ()
        self._residuals: tuple[ResidualHandle | None, ...] = (None,) * run.replicas
        self._places = Places(samples, run, recipe, policy, resources)

    def start(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Place replicas where their samples are and write version 0 of the state."""
        with faults_explained("setting up the replicas"):
            if not self._places.tokens:
                self._places.place_replicas()
            task = InitialState(read, reported, "best" if which == BEST else "state")
            results = self._places.at_owners(task, "write the initial state")
        problem = next((r for r in results if isinstance(r, Exception)), None)
        if problem is not None:
            raise problem
        reports = sorted(results, key=lambda report: report.index)
        states = tuple(report.state for report in reports)
        if which == BEST:
            self._best = states
        else:
            self._states = states

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
                self._residuals,
            )
            reports = self._submit(step)
            faults = [fault for report in reports for fault in report.faults]
            return (reports, time.perf_counter() - started), faults

        return self._commit(self._places.until_placed(submit, doing, self._places.samples))

    def _submit(self, step: Step) -> list[SliceReport]:
        """Run the stages of one step."""
        places = self._places
        with stage_name(self._context, "forward-backward"):
            gradients = places.at_seats(ForwardBackward(step), places.samples, self._states)
            received = shuffle_frames(gradients, self._run.slices)
        body: Callable[..., Any] = Synchronize(step)
        if not places.two_stages:
            with stage_name(self._context, "reduce"):
                reduced = map_frames(zip_frames(received, places.owners), Reduce(step))
                received = shuffle_frames(reduced, self._run.slices)
                body = Update(step)
        with stage_name(self._context, "parameter synchronization"):
            updated = map_frames(zip_frames(received, places.updaters), body)
            return [pickle.loads(frame) for frame in collect_and_forget(updated)]

    def _commit(self, result: tuple[list[SliceReport], float]) -> StepResult:
        reports, total = result
        reports = sorted(reports, key=lambda report: report.index)
        replicas = reports[0].replicas
        self._states = tuple(report.state for report in reports if report.state)
        self._places.tokens = tuple(r.token for r in sorted(replicas, key=lambda r: r.replica))
        if not reports[0].skipped:
            self._floor = self._tick
            new = {report.replica: report.residual for report in replicas}
            self._residuals = tuple(new.get(m) or old for m, old in enumerate(self._residuals))
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
                scored = self._places.at_seats(task, rdd, self._states, checksums)
                found = dict(pickle.loads(frame) for frame in collect_and_forget(scored))
            return found, [fault for fault in found.values() if isinstance(fault, Fault)]

        states = self._places.until_placed(submit, "validation", rdd)
        return validation.scorer.merge([states[replica] for replica in sorted(states)])

    def keep_best(self) -> None:
        """Copy the weights beside the state, where they lie."""
        with faults_explained("keeping the best weights"):
            task = KeepWeights(self._states, self._tick)
            self._best = tuple(self._places.at_owners(task, "keep the best weights"))

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """One job, or one a slice where they are large."""
        self._context.setJobDescription("sparkdl: collecting the weights")
        states = self._best if which == BEST else self._states
        with (
            faults_explained("collecting the weights"),
            stage_name(self._context, "collect the weights"),
        ):
            rdd = map_frames(self._places.owners, CollectWeights(states, which == AVERAGE))
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
            return self._places.at_owners(WithState(states, use), "read the state")

    def start_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """One task a replica, in parallel."""
        with faults_explained("setting up the replicas"):
            task = InitialResiduals(read, reported)
            found = dict(self._places.at_replicas(task, "write the replicas' residuals"))
        problem = next((r for r in found.values() if isinstance(r, Exception)), None)
        if problem is not None:
            raise problem
        self._residuals = tuple(found[replica] for replica in range(self._run.replicas))

    def with_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """One task a replica, in parallel; no job where none keeps any."""
        if not any(self._residuals):
            return []
        with faults_explained("reading the replicas' residuals"):
            task = WithResiduals(self._residuals, use)
            found = dict(self._places.at_replicas(task, "read the replicas' residuals"))
        return [found[m] for m, handle in enumerate(self._residuals) if handle is not None]
