"""The shuffle engine: every iteration consists of Spark stages that meet at a shuffle.

There are two stages: forward-backward, then synchronization. Synchronization takes two stages
itself if the gradient is clipped by its global norm and there is more than one slice, because every
slice must know the others' norms before it updates. If everything is on one node, only references
travel and the driver passes them on: each stage is a job, and there is no shuffle. There, an
iteration of a small model is a single stage: its gradients are left *pending*, and the next
iteration starts by applying them.

:class:`SliceVersions` has the versions of the state and what belongs to them, and alone changes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.base import StragglerLimit, Update, next_update
from sparkdl.data.epoch import EpochPlan
from sparkdl.engines.delivery import EngineInputs, raise_first
from sparkdl.engines.shuffle.forms import FormChooser
from sparkdl.engines.shuffle.messages import (
    SYNCHRONIZATION,
    IterationMessage,
    IterationReports,
    NodeCopies,
    PendingGradients,
    Version,
    copies_by_node,
    raise_unrecoverable,
    states_of,
)
from sparkdl.engines.shuffle.placement import FEW_BYTES, Placement
from sparkdl.engines.shuffle.replica_context import copy_slice, initial_state
from sparkdl.engines.shuffle.replica_tasks import initial_residuals
from sparkdl.engines.shuffle.state_reads import (
    SnapshotRdds,
    StateReader,
    restore_residual,
    restore_slice,
)
from sparkdl.engines.shuffle.store import weights_at
from sparkdl.engines.shuffle.update_tasks import apply_pending
from sparkdl.errors import ParameterError
from sparkdl.loop.advance import IterationResult, slowest, summarize, summed
from sparkdl.loop.engine import BEST, CURRENT, ReadResiduals, ReadState
from sparkdl.replica.iteration import (
    Fault,
    Iteration,
    IterationRows,
    ReplicaReport,
    ResidualHandle,
    SliceHandle,
)
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import stage_name

MAX_RECORD_BYTES = (1 << 31) - (1 << 20)
"""The largest record that Python and Spark exchange, less room for the header."""


class SliceVersions:
    """The last versions of every slice, the best weights, residuals, and gradients not yet applied.

    Every update makes the next version of the newest one. Where an iteration left its gradients
    *pending*, the version made of them counts already: the next iteration makes it as it begins, or
    :meth:`settled` does.
    """

    def __init__(self, placement: Placement, replicas: int, keep: int) -> None:
        self._placement, self._context = placement, placement.samples.ctx
        self._replicas, self._keep = replicas, keep
        self._submission = 0
        self._ring: deque[Version] = deque(maxlen=keep)
        self._pending: PendingGradients | None = None
        self.best: tuple[SliceHandle, ...] = ()  # empty: no best weights are kept
        self.residuals: tuple[ResidualHandle | None, ...] = (None,) * self._replicas

    @property
    def newest(self) -> Version:
        """Return the newest version that exists; see :meth:`settled`."""
        return self._ring[-1]

    @property
    def readable(self) -> range:
        """Return the numbers of the versions that replicas can compute on."""
        newest = self.newest.number + (self._pending is not None)
        return range(max(self._ring[0].number, newest - self._keep + 1), newest + 1)

    @property
    def _oldest_needed(self) -> int:
        """Return the submission of the oldest version; buffers of lower submissions are free."""
        return self._ring[0].submission

    def next_submission(self) -> int:
        """Return a submission larger than all before."""
        self._submission += 1
        return self._submission

    def message(self, iteration: IterationRows, update: Update) -> IterationMessage:
        """Return what tasks are told of an iteration that makes ``update``."""
        version = next((v for v in self._ring if v.number == update.version), None)
        newest = self.newest
        return IterationMessage(
            **iteration.__dict__,
            submission=self.next_submission(),
            oldest_needed=self._oldest_needed,
            states=newest.states,
            pending=self._pending,
            reads=() if update.staleness == 0 or version is None else version.states,
            copies={} if version is None else version.copies,
            residuals=self.residuals,
        )

    def commit(self, message: IterationMessage, reports: IterationReports) -> None:
        """Keep what an iteration without faults has made.

        Its update is left out if a loss or a gradient was not finite.
        """
        if reports.copies:
            self._note_copies(message.read_states, reports.copies)
        if reports.applied:
            self._append(reports.applied, message.submission)
        self._pending = reports.pending
        if reports.skipped:
            return
        if reports.slices:
            copies = copies_by_node(reports.installed)
            self._append(states_of(reports.slices), message.submission, copies)
        self._keep_residuals(reports.replicas)

    def add(self, states: tuple[SliceHandle, ...], submission: int, updates: int) -> None:
        """Keep a version that was made by several updates of the newest one."""
        newest = self.newest
        if states == newest.states:  # no gradient was finite, so their buffers are still needed
            submission = newest.submission
        number = newest.number + updates
        self._ring.append(Version(number=number, submission=submission, states=states))

    def release(self, before: int) -> None:
        """Give up the versions before number ``before``."""
        while self._ring[0].number < before and len(self._ring) > 1:
            self._ring.popleft()

    def _append(
        self, states: tuple[SliceHandle, ...], submission: int, copies: NodeCopies | None = None
    ) -> None:
        number = self.newest.number + 1
        made = Version(number=number, submission=submission, states=states, copies=copies or {})
        self._ring.append(made)

    def _note_copies(self, states: tuple[SliceHandle, ...], copies: NodeCopies) -> None:
        for place, version in enumerate(self._ring):
            if version.states == states:
                self._ring[place] = replace(version, copies=copies)

    def _keep_residuals(self, replicas: Sequence[ReplicaReport]) -> None:
        new = {report.replica: report.residual for report in replicas}
        self.residuals = tuple(new.get(m) or old for m, old in enumerate(self.residuals))

    def settled(self) -> SliceVersions:
        """Apply pending gradients, and return the versions.

        Whatever reads the state between two iterations needs this first.
        """
        pending = self._pending
        if pending is None:
            return self
        message = IterationMessage(
            index=pending.index,
            epoch=0,
            rows=(),
            submission=self.next_submission(),
            oldest_needed=self._oldest_needed,
            states=self.newest.states,
            pending=pending,
        )
        doing = f"the update of iteration {pending.index + 1}"
        with faults_explained(doing):
            reports = self._placement.at_slices(partial(apply_pending, message), SYNCHRONIZATION)
        raise_unrecoverable([fault for report in reports for fault in report.faults], doing)
        self._append(states_of(reports), message.submission)
        self._pending = None
        return self

    def only_newest(self) -> SliceVersions:
        """Give up older versions, and return what is left.

        Whatever keeps the newest version without them needs this, so that a run goes on from there
        as from the kept state.
        """
        self._begin(self.newest)
        return self

    def _begin(self, version: Version) -> None:
        self._ring.clear()
        self._ring.append(version)

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Place replicas where their samples are, and write the first version of the state.

        Without ``read``, it has the recipe's weights.
        """
        self._pending = None
        with faults_explained("setting up the replicas"):
            if not self._placement.replica_nodes:
                self._placement.place_replicas()
            role = "best" if which == BEST else "state"
            task = partial(initial_state, read, role, self._submission)
            results = self._placement.at_slices(task, "write the initial state")
        raise_first(results)
        states = states_of(sorted(results, key=lambda report: report.index))
        if which == BEST:
            self.best = states
        else:
            self._begin(Version(number=0, submission=self._submission, states=states))
        self._check_frames()

    def _check_frames(self) -> None:
        """Raise :class:`sparkdl.ParameterError` for slices too large for one record between nodes."""
        states = self.newest.states if self._ring else ()
        largest = max((state.weights.nbytes for state in states), default=0)
        if largest <= FEW_BYTES or self._placement.single_node(states):
            return
        conf = self._context._jsc.sc().conf()  # type: ignore[union-attr]
        most = min(MAX_RECORD_BYTES, conf.getSizeAsBytes("spark.executor.memory", "1g"))
        if largest > most:
            total = sum(state.weights.nbytes for state in states)
            raise ParameterError(
                f"a slice of the model has {largest:,} bytes and goes from node to node as one record, "
                f"for which an executor has {most:,} bytes at the most (spark.executor.memory, and "
                f"2 GB). Train with more slices: slices={-(-8 * total // most)} (a tensor may have to "
                "stay in one)."
            )

    def load_residuals(self, read: ReadResiduals) -> None:
        """Write the replicas' residuals with one task per replica, in parallel."""
        with faults_explained("setting up the replicas"):
            task = partial(initial_residuals, read, self._submission)
            found = dict(self._placement.at_replicas(task, "write the replicas' residuals"))
        raise_first(found.values())
        self.residuals = tuple(found[replica] for replica in range(self._replicas))

    def keep_best(self) -> None:
        """Copy the newest weights where they lie, as the best ones."""
        with faults_explained("keeping the best weights"):
            self.best = self._copied("best", "keep the best weights")

    def evaluated(self) -> Version:
        """Return the newest version as validation reads it: a copy, if the optimizer keeps the
        weights that count apart from those at which gradients are taken."""
        newest = self.newest
        if all(weights_at(state) == [state.weights] for state in newest.states):
            return newest
        with faults_explained("validation"):
            return replace(newest, states=self._copied("evaluated", "copy the weights"), copies={})

    def _copied(self, role: str, name: str) -> tuple[SliceHandle, ...]:
        task = partial(copy_slice, self.newest.states, role, self._submission)
        return tuple(self._placement.at_slices(task, name))

    def restore(self, snapshot: SnapshotRdds) -> None:
        """Write a snapshot into slabs at the present places, as the first version."""
        with (
            faults_explained("restoring a snapshot"),
            stage_name(self._context, "restore a snapshot"),
        ):
            if not self._placement.replica_nodes:
                self._placement.place_replicas()
            found = self._placement.zipped_with_slices(
                snapshot.slices, snapshot.slice_frames, partial(restore_slice, self._submission)
            )
            kept: dict[int, ResidualHandle | None] = {}
            if snapshot.residuals is not None:
                task = partial(restore_residual, self._submission)
                frames = snapshot.residual_frames
                kept = dict(self._placement.zipped_with_replicas(snapshot.residuals, frames, task))
        states = states_of([report for report, _ in found])
        self._begin(Version(number=0, submission=self._submission, states=states))
        self.best = tuple(best for _, best in found if best is not None)
        self.residuals = tuple(kept.get(m) for m in range(self._replicas))

    def forget(self) -> None:
        """Give up the present state, which is out of reach; a load or restore at new places follows."""
        self._placement.forget()
        self._ring.clear()
        self._pending, self.best = None, ()
        self.residuals = (None,) * self._replicas
        self._submission += 1


class ShuffleEngine:
    """The engine that submits iterations as Spark jobs, again where necessary, and commits them.

    See "One iteration" in docs/architecture.md.
    """

    begins_ahead = False

    def __init__(self, inputs: EngineInputs) -> None:
        self.plan = EpochPlan(inputs.samples.counts, inputs.batch_size)
        self._layout, self._validation = inputs.layout, inputs.validation
        self._context = inputs.spark.context
        self._context.setJobDescription("sparkdl: setting up the replicas")
        model = self._consistency = inputs.consistency
        self._stragglers = StragglerLimit(model.may_drop)
        self._placement = Placement(inputs)
        self._versions = SliceVersions(self._placement, inputs.run.replicas, model.keep)
        self._reader = StateReader(self._placement, inputs.spark)
        self._chooser = FormChooser(inputs, self._placement, inputs.settings.stages)

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
        seconds = {"schedule": max(0.0, total - working), **summed(in_tasks), "iteration": total}
        traffic = done.traffic(message.read_states)
        result = summarize(done.replicas, done.slices, self._layout, seconds, traffic)
        return replace(result, decisions={**result.decisions, **update.decisions})

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`, as for what follows."""
        self._versions.load(read, which)

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

    def load_residuals(self, read: ReadResiduals) -> None:
        self._versions.load_residuals(read)

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
