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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.base import Consistency, StragglerLimit, Update, next_update
from sparkdl.consistency.synchronous import Synchronous
from sparkdl.data.epoch import EpochPlan
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.shuffle.forms import FormChooser
from sparkdl.engines.shuffle.messages import IterationMessage, ShuffleSpec
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.reports import IterationReports
from sparkdl.engines.shuffle.state_reads import SnapshotRdds, StateReader
from sparkdl.engines.shuffle.versions import SliceVersions
from sparkdl.loop.engine import BEST, CURRENT, ReadResiduals, ReadState
from sparkdl.loop.iteration_result import IterationResult, slowest, summarize, summed
from sparkdl.replica.iteration import Fault, Iteration, IterationRows, ReplicaReport
from sparkdl.slices.spec import SliceSpec, SliceState


class ShuffleEngine:
    """The engine that submits iterations as Spark jobs, again where necessary, and commits them.

    See "One iteration" in docs/architecture.md.
    """

    begins_ahead = False

    def __init__(
        self,
        spec: ShuffleSpec,
        batch_size: int,
        stages: str = "auto",
        validation: ValidationSet | None = None,
        consistency: Consistency | None = None,
    ) -> None:
        self.plan = EpochPlan(spec.samples.counts, batch_size)
        self._layout, self._validation = spec.layout, validation
        self._context = spec.resources.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        self._consistency = consistency or Synchronous()
        self._stragglers = StragglerLimit(self._consistency.may_drop)
        self._placement = Placement(spec)
        self._versions = SliceVersions(spec, self._placement, self._consistency.keep)
        self._reader = StateReader(self._placement, spec.resources)
        self._chooser = FormChooser(spec, self._placement, stages)

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Submit the iteration, repeatedly if tasks run on other nodes than expected, and commit it."""
        self._context.setJobDescription(iteration.description)
        doing = f"iteration {iteration.index + 1}, epoch {iteration.epoch + 1}"
        asked = iteration.with_rows(self.plan.rows(iteration.batch))
        update = next_update(self._consistency, self._versions.readable, iteration.decisions)
        return self._stragglers.run(asked, lambda asked: self._commit(asked, update, doing))

    def _commit(
        self, asked: IterationRows, update: Update, doing: str
    ) -> tuple[IterationResult, Sequence[ReplicaReport]]:
        """Submit the iteration until its tasks have no faults, and commit it."""

        def submit() -> tuple[Any, list[Fault]]:
            started = time.perf_counter()
            message, reports = self._submit(asked, update)
            if reports.faults:
                return None, list(reports.faults)
            self._placement.note_nodes(reports.replicas)
            self._versions.commit(message, reports)
            self._chooser.note(reports)
            return (self._result(message, reports, started, update), reports.replicas), []

        done: tuple[IterationResult, Sequence[ReplicaReport]] = self._placement.retry(
            submit, doing, self._placement.samples
        )
        return done

    def _submit(
        self, asked: IterationRows, update: Update
    ) -> tuple[IterationMessage, IterationReports]:
        """Run the iteration in the best form whose messages are not too large."""
        message = self._versions.message(asked, update)
        for form in self._chooser.choose(message):
            if message.pending is not None and not form.applies_pending:
                message = self._versions.settled().message(asked, update)
            reports = form.submit(message)
            if reports is not None:
                return message, reports
            self._chooser.rule_out(form)
        raise AssertionError("the last form takes any message")

    def _result(
        self, message: IterationMessage, done: IterationReports, started: float, update: Update
    ) -> IterationResult:
        total = time.perf_counter() - started
        in_tasks = [slowest([r.seconds for r in done.replicas]), slowest(done.update_seconds)]
        working = sum(sum(seconds.values()) for seconds in in_tasks)
        seconds = {
            "schedule": max(0.0, total - working),
            **summed(in_tasks),
            "iteration": total,
        }
        traffic = done.traffic(message.read_states)
        result = summarize(done.replicas, done.slices, self._layout, seconds, traffic)
        return replace(result, decisions={**result.decisions, **update.decisions})

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`, as for what follows."""
        self._versions.load(read, reported, which)

    def score(self) -> list[Any]:
        assert self._validation is not None
        return self._reader.score(self._versions.settled().evaluated(), self._validation)

    def keep_best(self) -> None:
        self._versions.settled().keep_best()

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        versions = self._versions.settled()
        states = versions.best if which == BEST else versions.newest.states
        return self._reader.weights(states, self._layout.dtype, which)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        versions = self._versions.settled().only_newest()
        states = versions.best if which == BEST else versions.newest.states
        return self._reader.map_slices(states, use, versions.next_submission())

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        self._versions.load_residuals(read, reported)

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        return self._reader.map_residuals(self._versions.residuals, use)

    def take_snapshot(self) -> SnapshotRdds:
        """Take a snapshot; for this and the rest see
        :class:`sparkdl.loop.engine.RestorableEngine`."""
        versions = self._versions.settled().only_newest()
        return self._reader.take_snapshot(versions.newest.states, versions.best, versions.residuals)

    def drop(self, snapshot: SnapshotRdds) -> None:
        self._reader.drop(snapshot)

    def restore(self, snapshot: SnapshotRdds) -> None:
        self._versions.restore(snapshot)

    @property
    def capacity_note(self) -> str:
        """Return an empty string: tasks without a free slot wait in Spark's queue."""
        return ""

    def forget(self) -> None:
        self._versions.forget()
