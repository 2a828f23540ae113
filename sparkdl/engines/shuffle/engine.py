"""The shuffle engine: every iteration consists of Spark stages that meet at a shuffle.

There are two stages: forward-backward, then synchronization. Synchronization takes two stages
itself if the gradient is clipped by its global norm and there is more than one slice, because every
slice must know the others' norms before it updates. If everything is on one node, only references
travel and the driver passes them on: each stage is a job, and there is no shuffle. There, an
iteration of a small model is a single stage: its gradients are left *pending*, and the next
iteration starts by applying them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.form import Form
from sparkdl.engines.shuffle.forms import SYNCHRONIZATION, IterationJobs, IterationReports
from sparkdl.engines.shuffle.messages import IterationMessage, OneStageReport, PendingGradients
from sparkdl.engines.shuffle.node_sums import NodeReducePlan
from sparkdl.engines.shuffle.pending import ApplyPending
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.versions import SliceVersions, SnapshotRdds, states_of
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.gang.slots import task_slots
from sparkdl.loop.engine import (
    CURRENT,
    IterationResult,
    ReadResiduals,
    ReadState,
    Traffic,
    slowest,
    summarize,
    summed,
)
from sparkdl.model.flat import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.replica.compare import Description
from sparkdl.replica.iteration import Fault, Iteration, ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.spark.failures import faults_explained


class ShuffleEngine:
    """The engine that holds the persisted RDDs and the handles of version t.

    See "One iteration" in docs/architecture.md.

    Args:
        samples: The training samples, in slabs.
        layout: The layout of the model's flat vector.
        run: The constants of the run.
        recipe: The pickled recipe of the model.
        policy: The training options of the recipe.
        built: The description of the driver's model.
        batch_size: The rows of a global batch, local steps included.
        resources: The fit's Spark resources.
        stages: The setting ``spark.sparkdl.stages``.
        validation: The validation samples; None without validation.
    """

    begins_ahead = False

    def __init__(
        self,
        samples: SampleSet,
        layout: Layout,
        run: RunSpec,
        recipe: bytes,
        policy: TrainingOptions,
        built: Description,
        batch_size: int,
        resources: FitResources,
        stages: str = "auto",
        validation: ValidationSet | None = None,
    ) -> None:
        self._validation = validation
        self.plan = EpochPlan(samples.counts, batch_size)
        self._layout, self._run, self._policy = layout, run, policy
        self._context = resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._pending: PendingGradients | None = None
        self._places = Placement(samples, layout, run, recipe, policy, built, resources)
        self._state = SliceVersions(self._places, resources, run.replicas, run.slices)
        self._jobs = IterationJobs(
            self._places, run.slices, NodeReducePlan(layout, run, policy), resources
        )
        self._form = Form(stages, run.replicas, run.slices, task_slots(self._context))

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`."""
        self._pending = None
        self._state.load(read, reported, which)

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Submit the iteration, repeatedly if tasks run on other nodes than expected, and commit it."""
        self._context.setJobDescription(iteration.description)
        doing = f"iteration {iteration.index + 1}, epoch {iteration.epoch + 1}"
        asked = iteration.with_rows(self.plan.rows(iteration.batch))

        def submit() -> tuple[IterationResult | None, list[Fault]]:
            self._state.tick += 1
            step = IterationMessage.of(
                asked,
                tick=self._state.tick,
                floor=self._state.floor,
                states=self._state.states,
                pending=self._pending,
                residuals=self._state.residuals,
            )
            started = time.perf_counter()
            if self._form.at_once and self._can_be_at_once(step):
                reports = self._jobs.at_once(step)
                if reports is not None:
                    return self._commit_at_once(step, reports, started)
            if self._pending is not None:
                self._apply_pending()
                self._state.tick += 1
                now = self._state
                step = replace(
                    step, tick=now.tick, floor=now.floor, states=now.states, pending=None
                )
            done = None
            if not self._form.shuffles and self._places.one_node(self._state.states):
                done = self._jobs.on_one_node(step)
            return self._commit(step, done or self._jobs.in_stages(step), started)

        return self._places.retry(submit, doing, self._places.samples)

    def _can_be_at_once(self, step: IterationMessage) -> bool:
        """Return whether the step may be a single stage.

        If norms or histograms are wanted, it may not: they must be known when the iteration ends,
        not one iteration later.
        """
        early = self._policy.clips_norm or step.histograms
        return not early and self._places.one_node(self._state.states)

    def _commit(
        self, step: IterationMessage, done: IterationReports, started: float
    ) -> tuple[IterationResult | None, list[Fault]]:
        """Commit an iteration of two or more stages, or return its faults."""
        reports = done.reports
        faults = [fault for report in reports for fault in report.faults]
        if faults:
            return None, faults
        replicas = reports[0].replicas
        states = states_of(reports)
        self._places.tokens = tuple(r.token for r in sorted(replicas, key=lambda r: r.replica))
        if not reports[0].skipped:
            self._state.commit(states, step.tick)
            self._form.note(reports)
            self._state.keep_residuals(reports[0].replicas)
            self._places.note_copies(states, done.installed)
        updates = [r.seconds for r in reports]
        traffic = done.traffic(step.states)
        return self._result(replicas, reports, updates, started, traffic), []

    def _commit_at_once(
        self, step: IterationMessage, seats: list[OneStageReport], started: float
    ) -> tuple[IterationResult | None, list[Fault]]:
        """Commit an iteration of one stage, or return its faults.

        The gradients that were pending have been applied, and the new gradients become pending.
        """
        faults = [header.fault for seat in seats for header in seat.headers if header.fault]
        if faults:
            return None, faults
        if step.pending is not None:
            self._state.commit(states_of(seats[0].slices), step.tick)
        replicas = [seat.headers[0].report for seat in seats]
        reports = [report for report in replicas if report is not None]
        self._pending = None
        if not any(report.not_finite for report in reports):
            self._state.keep_residuals(reports)
            self._pending = PendingGradients.of(step, seats)
        updates = [summed([report.seconds for report in seat.slices]) for seat in seats]
        return self._result(reports, [], updates, started), []

    def _result(
        self,
        replicas: Sequence[ReplicaReport],
        slices: Sequence[SliceReport],
        updates: Sequence[Mapping[str, float]],
        started: float,
        traffic: Mapping[str, Traffic] | None = None,
    ) -> IterationResult:
        """Build the result; ``updates`` holds the seconds by activity of each task that updated."""
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
        """Apply pending gradients. Whatever reads the state between two iterations needs this first."""
        if self._pending is None:
            return
        self._state.tick += 1
        step = IterationMessage(
            index=self._pending.index,
            epoch=0,
            rows=(),
            tick=self._state.tick,
            floor=self._state.floor,
            states=self._state.states,
            pending=self._pending,
        )
        doing = f"the update of iteration {self._pending.index + 1}"
        with faults_explained(doing):
            reports: list[SliceReport] = self._places.at_owners(ApplyPending(step), SYNCHRONIZATION)
        self._places.raise_unrecoverable(
            [fault for report in reports for fault in report.faults], doing
        )
        self._state.commit(states_of(reports), step.tick)
        self._pending = None

    def _settled(self) -> SliceVersions:
        """Return the state after applying pending gradients."""
        self._apply_pending()
        return self._state

    def score(self) -> list[Any]:
        """Score the validation samples; see :class:`sparkdl.loop.engine.Engine`, as for what
        follows."""
        assert self._validation is not None
        return self._settled().score(self._validation)

    def keep_best(self) -> None:
        self._settled().keep_best()

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        return self._settled().weights(which, self._layout.dtype)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        return self._settled().map_slices(use, which)

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        self._state.load_residuals(read, reported)

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        return self._state.map_residuals(use)

    def take_snapshot(self) -> SnapshotRdds:
        """Take a snapshot; for this and the rest see
        :class:`sparkdl.engines.recovery.RestorableEngine`."""
        return self._settled().take_snapshot()

    def drop(self, snapshot: SnapshotRdds) -> None:
        self._state.drop(snapshot)

    def restore(self, snapshot: SnapshotRdds) -> None:
        self._state.restore(snapshot)

    @property
    def capacity_note(self) -> str:
        """Return an empty string: tasks without a free slot wait in Spark's queue."""
        return ""

    def forget(self) -> None:
        self._pending = None
        self._jobs.forget()
        self._state.forget()
