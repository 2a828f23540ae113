"""The shuffle engine: every iteration is Spark stages that meet at a shuffle.

Two: forward-backward, then synchronization. Where the gradient is clipped by its global norm and
there is more than one slice, synchronization is two stages, since every slice must know the others'
norms before it updates. Of a small model on one node an iteration is a single stage: its gradients
are left *pending*, and the next iteration begins with their update.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparkdl.data.batches import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.frames import collect_and_forget, collect_frames, map_frames, stage_name
from sparkdl.infer.validate import Score
from sparkdl.replica.flat import Layout
from sparkdl.replica.policy import Policy
from sparkdl.replica.run import Run
from sparkdl.step.compressing import InitialResiduals, ReadResiduals, WithResiduals
from sparkdl.sync.codec import as_tensor, decode
from sparkdl.sync.job import ApplyPending
from sparkdl.sync.nodes import NodeBytes
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
    Pending,
    ReplicaReport,
    ResidualHandle,
    SeatReport,
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
    summed,
)
from sparkdl.train.failure import faults_explained
from sparkdl.train.form import Form
from sparkdl.train.jobs import SYNCHRONIZATION, IterationJobs, Synchronized
from sparkdl.train.node_sums import NodeSums
from sparkdl.train.places import Places
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
        stages: str = "auto",
    ) -> None:
        self.plan = EpochPlan(samples.counts, batch_size)
        self._layout, self._run, self._policy = layout, run, policy
        self._context = resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._tick = self._floor = 0
        self._states: tuple[SliceHandle, ...] = ()
        self._best: tuple[SliceHandle, ...] = ()
        self._pending: Pending | None = None
        self._residuals: tuple[ResidualHandle | None, ...] = (None,) * run.replicas
        self._places = Places(samples, run, recipe, policy, resources)
        self._jobs = IterationJobs(
            self._places, run.slices, NodeSums(layout, run, policy), resources
        )
        slots = self._context.defaultParallelism
        self._form = Form(stages, run.replicas, run.slices, slots)

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

        def submit() -> tuple[StepResult | None, list[Fault]]:
            self._tick += 1
            step = Step(
                iteration.index,
                iteration.epoch,
                self._tick,
                self._floor,
                rows,
                iteration.hyperparameters,
                iteration.loss_scale,
                iteration.histograms,
                self._states,
                self._pending,
                residuals=self._residuals,
            )
            started = time.perf_counter()
            if self._form.at_once and self._can_be_at_once(step):
                reports = self._jobs.at_once(step)
                if reports is not None:
                    return self._commit_at_once(step, reports, started)
            if self._pending is not None:
                self._apply_pending()
                self._tick += 1
                step = replace(
                    step, tick=self._tick, floor=self._floor, states=self._states, pending=None
                )
            return self._commit(step, self._jobs.in_stages(step), started)

        return self._places.until_placed(submit, doing, self._places.samples)

    def _can_be_at_once(self, step: Step) -> bool:
        """Norms and histograms are to be known when the iteration ends, not one later."""
        early = self._policy.clips_norm or step.histograms
        return not early and self._places.one_node(self._states)

    def _commit(
        self, step: Step, done: Synchronized, started: float
    ) -> tuple[StepResult | None, list[Fault]]:
        """After the two stages (or more)."""
        reports = done.reports
        faults = [fault for report in reports for fault in report.faults]
        if faults:
            return None, faults
        replicas = reports[0].replicas
        self._states = _states_of(reports)
        self._places.tokens = tuple(r.token for r in sorted(replicas, key=lambda r: r.replica))
        if not reports[0].skipped:
            self._floor = step.tick
            self._form.note(reports)
            self._keep_residuals(list(reports[0].replicas))
            self._places.note_copies(self._states, done.installed)
        updates = [r.seconds for r in reports]
        traffic = done.traffic(step.states)
        return self._result(replicas, reports, updates, started, traffic), []

    def _commit_at_once(
        self, step: Step, seats: list[SeatReport], started: float
    ) -> tuple[StepResult | None, list[Fault]]:
        """After the one stage: what was pending is applied, the new gradients are pending."""
        faults = [header.fault for seat in seats for header in seat.headers if header.fault]
        if faults:
            return None, faults
        if step.pending is not None:
            self._states, self._floor = _states_of(seats[0].slices), step.tick
        replicas = [seat.headers[0].report for seat in seats]
        reports = [report for report in replicas if report is not None]
        self._pending = None
        if not any(report.not_finite for report in reports):
            self._keep_residuals(reports)
            self._pending = Pending.of(step, seats)
        updates = [summed([report.seconds for report in seat.slices]) for seat in seats]
        return self._result(reports, [], updates, started), []

    def _keep_residuals(self, replicas: Sequence[ReplicaReport]) -> None:
        new = {report.replica: report.residual for report in replicas}
        self._residuals = tuple(new.get(m) or old for m, old in enumerate(self._residuals))

    def _result(
        self,
        replicas: Sequence[ReplicaReport],
        slices: Sequence[SliceReport],
        updates: Sequence[Mapping[str, float]],
        started: float,
        traffic: Mapping[str, NodeBytes] | None = None,
    ) -> StepResult:
        """``updates``: seconds by activity of the tasks that updated."""
        total = time.perf_counter() - started
        in_tasks = [slowest([r.seconds for r in replicas]), slowest(updates)]
        working = sum(sum(seconds.values()) for seconds in in_tasks)
        seconds = {
            "schedule": max(0.0, total - working),
            **summed(in_tasks),
            "iteration": total,
        }
        return summarize(replicas, slices, self._layout, seconds, traffic)

    def _apply_pending(self) -> None:
        """Bring the state up to date: what reads it comes between two iterations."""
        if self._pending is None:
            return
        self._tick += 1
        step = Step(
            self._pending.index,
            0,
            self._tick,
            self._floor,
            (),
            states=self._states,
            pending=self._pending,
        )
        doing = f"the update of iteration {self._pending.index + 1}"
        with faults_explained(doing):
            reports: list[SliceReport] = self._places.at_owners(ApplyPending(step), SYNCHRONIZATION)
        self._places.give_up_on([fault for report in reports for fault in report.faults], doing)
        self._states, self._floor, self._pending = _states_of(reports), self._tick, None

    def score(self, validation: ValidationSet) -> list[Any]:
        """One job over the replicas' places and the validation samples."""
        self._apply_pending()
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
        self._apply_pending()
        with faults_explained("keeping the best weights"):
            task = KeepWeights(self._states, self._tick)
            self._best = tuple(self._places.at_owners(task, "keep the best weights"))

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """One job, or one a slice where they are large."""
        self._apply_pending()
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
        self._apply_pending()
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


def _states_of(reports: Sequence[SliceReport]) -> tuple[SliceHandle, ...]:
    return tuple(report.state for report in reports if report.state)
