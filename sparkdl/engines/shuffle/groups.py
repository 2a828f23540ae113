"""The shuffle engine for groups that advance at their own pace.

A turn of a group is a Spark job of its own, over the partitions of the group's replicas. One thread
decides: it submits the jobs, sees which have ended, and submits the commits. What arrives between two
iterations waits in its slab, so that the state is one version then. A snapshot or a checkpoint holds
that version only: turns that are under way then are given up, and begin anew with it.

Messages and task bodies of groups that advance at their own pace.

A group's job runs its replicas. If all weights and slices are on one node, its gradients stay in
slabs there. Otherwise they go through a shuffle to the owners of the slices, who put them into slabs.
Either way the driver gets the headers, and a commit is a job of the owners that takes references.

The Spark job of a group's turn.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pyspark import RDD

from sparkdl.consistency.asynchronous import Asynchronous, Commit, GroupTurns, Turn
from sparkdl.consistency.base import Update
from sparkdl.engines.delivery import EngineInputs
from sparkdl.engines.resources import MAX_SUBMISSIONS
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.engines.shuffle.messages import (
    STATE_FOREIGN,
    SYNCHRONIZATION,
    GradientHeader,
    IterationMessage,
    Transfer,
    between_nodes,
    raise_unrecoverable,
    states_of,
)
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.replica_context import at_owner, recount
from sparkdl.engines.shuffle.replica_tasks import leave_gradients, send_gradients
from sparkdl.engines.shuffle.state_reads import SnapshotRdds
from sparkdl.engines.shuffle.store import next_version
from sparkdl.engines.shuffle.update_tasks import (
    Frame,
    ReadSections,
    at_slice,
    read_sections,
    to_driver,
    update_alone,
)
from sparkdl.errors import TrainingError
from sparkdl.loop.advance import IterationResult, slowest, summarize
from sparkdl.loop.engine import CURRENT, ReadState
from sparkdl.replica.iteration import Clock, Fault, Iteration, ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slab.pool import open_pool
from sparkdl.slices.optimizer import scaled_rates
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import (
    RunningJob,
    forget_shuffles,
    map_frames,
    shuffle_frames,
    some_partitions,
    stage_name,
    zip_frames,
)

Headers = tuple[tuple[GradientHeader, ...], ...]
"""For each slice, the headers of some replicas in order."""


@dataclass(frozen=True, kw_only=True)
class TurnMessage(IterationMessage):
    """A turn of a group as the driver submits it."""

    oldest_gradient: int = 0  # the submission of the oldest that is not applied yet

    @property
    def oldest_gradients(self) -> int:
        """Return the submission below which gradients are no longer needed."""
        return self.oldest_gradient


@dataclass(frozen=True)
class CommitEntry:
    """A commit: one optimizer step."""

    index: int  # seeds the update
    headers: Headers


@dataclass(frozen=True, kw_only=True)
class CommitMessage(IterationMessage):
    """Commits that are made one after another, of which the last one is kept as a version."""

    entries: tuple[CommitEntry, ...]
    share: float
    scale: str | None


def keep_gradients(
    step: TurnMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> tuple[GradientHeader, ...]:
    """Write arriving gradients into slabs of the slice's node.

    Return their headers in order of the replicas.
    """
    pool = open_pool(run.slab)
    foreign = step.states[partition].node_id != pool.node_id
    kept: list[GradientHeader] = []
    for header, payload in sorted(frames, key=lambda frame: frame[0].replica):
        if foreign:
            header = replace(header, fault=Fault(STATE_FOREIGN, partition, pool.node_id))
        elif len(payload):
            nbytes = len(payload)
            with pool.claim("arrived", nbytes, step.submission, step.oldest_gradients) as claim:
                claim.bytes[:] = np.frombuffer(payload, np.uint8)
            header = replace(header, reference=claim.reference)
        kept.append(header)
    return tuple(kept)


def apply_commits(step: CommitMessage, partition: int, run: RunSpec) -> SliceReport:
    """Make the commits of a message on a slice, and write the version after them.

    One whose gradients are not finite changes nothing, nor does one of groups without rows.
    """
    clock, done = Clock(), list[tuple[CommitEntry, ReadSections]]()
    report = SliceReport(partition, open_pool(run.slab).node_id, step.states[partition])
    for entry in step.entries:
        frames = [(header, memoryview(b"")) for header in entry.headers[partition]]
        found = read_sections(step, partition, run, frames)
        if isinstance(found, SliceReport) and found.faults:
            return found
        if isinstance(found, ReadSections) and found.sections:
            done.append((entry, found))
    if not done:
        return report
    updater, pool = done[0][1].updater, done[0][1].pool
    state = step.states[partition]
    with next_version(pool, state, updater.dtype, step.submission, step.oldest_needed) as made:
        old, new, to = made
        rates = scaled_rates(updater.optimizer, step.hyperparameters, step.share, step.scale)
        norm = None
        for entry, found in done:
            own = replace(step, index=entry.index, hyperparameters=rates, histograms=False)
            norm = update_alone(own, run, found, old, new, clock).norm
            found.check()
            old = new
        handle = to.seal(new)
    clock.lap("update")
    return replace(report, state=handle, seconds=clock.seconds, norm=norm)


@dataclass(frozen=True)
class RunningTurn:
    """A turn that is under way, or whose gradient waits."""

    turn: Turn
    asked: Iteration
    submission: int
    job: RunningJob
    shuffled: RDD | None
    tries: int = 0  # submissions before this one
    headers: Headers = ()
    reports: tuple[ReplicaReport, ...] = ()


def turn_rdd(placement: Placement, message: TurnMessage, group: range, alone: bool) -> RDD:
    """Return the RDD of a turn, whose frames hold the headers of its gradients."""
    task = partial(leave_gradients, message) if alone else partial(send_gradients, message, None)
    rdd = placement.tasks_with_weights(task, placement.samples, message.read_states, message.copies)
    some = some_partitions(rdd, group)
    if alone:
        return some
    sent = shuffle_frames(some, placement.slices, few_bytes=placement.few_bytes)
    owners = map_frames(placement.slice_rdd, partial(recount, len(group)))
    work = partial(keep_gradients, message)
    return map_frames(zip_frames(sent, owners), partial(at_slice, work, to_driver))


POLL_SECONDS = 0.001
"""The time between two looks at the running jobs."""


class GroupEngine(ShuffleEngine):
    """A shuffle engine that runs turns of groups, see :mod:`sparkdl.consistency.asynchronous`."""

    def __init__(self, inputs: EngineInputs) -> None:
        super().__init__(inputs)
        model = inputs.consistency
        assert isinstance(model, Asynchronous)
        self._turns = GroupTurns(model, inputs.run.replicas, inputs.recorded)
        self._running: dict[int, RunningTurn] = {}
        self._asked: Iteration | None = None
        self._made = 0
        self._replicas: list[ReplicaReport] = []
        self._gradients: list[Transfer] = []
        self._weights: list[Transfer] = []
        self._slices: tuple[SliceReport, ...] = ()
        inputs.spark.closing(self)

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Make the commits of an iteration."""
        started = time.perf_counter()
        self._context.setJobDescription(iteration.description)
        self._asked, self._made = iteration, 0
        for each in (self._replicas, self._gradients, self._weights):
            each.clear()
        try:
            _, decisions = self._turns.run(iteration, self)
        except BaseException:
            self._give_up_turns()
            raise
        total = time.perf_counter() - started
        seconds = {
            **slowest([report.seconds for report in self._replicas]),
            **slowest([report.seconds for report in self._slices]),
            "iteration": total,
        }
        traffic = between_nodes(self._gradients, self._weights)
        result = summarize(self._replicas, self._slices, self._layout, seconds, traffic)
        return replace(result, decisions=decisions)

    def begin(self, turn: Turn) -> None:
        """Submit a turn; see :class:`sparkdl.consistency.asynchronous.Workplace`."""
        assert self._asked is not None
        self._running[turn.group] = self._submit_turn(turn, self._asked)

    def wait(self) -> list[int]:
        while True:
            waiting = [each for each in self._running.values() if not each.headers]
            waiting.sort(key=lambda each: each.submission)  # the lowest group first starves others
            ended = [each for each in waiting if each.job.done]
            arrived: list[int] = []
            for each in ended:
                if not self._receive(each):  # all that had not been received were submitted again
                    break
                arrived.append(each.turn.group)
            if arrived:
                return arrived
            time.sleep(POLL_SECONDS)

    def apply(self, commits: Sequence[Commit]) -> None:
        assert self._asked is not None
        entries = []
        for commit in commits:
            turns = [self._running[turn.group] for turn in commit]
            by_slice = zip(*[turn.headers for turn in turns], strict=True)
            headers = tuple(sum(each, ()) for each in by_slice)
            entries.append(CommitEntry(self._turns.commit_index(self._asked, self._made), headers))
            self._made += 1
            self._replicas += [report for turn in turns for report in turn.reports]
            for running in turns:
                self._note_traffic(running)
        newest = self._versions.newest
        base = self._versions.message(
            self._asked.with_rows(()), Update(version=newest.number, base=newest.number)
        )
        message = CommitMessage(
            **base.__dict__,
            entries=tuple(entries),
            share=self._turns.share,
            scale=self._turns.scale,
        )
        doing = f"the steps of iteration {self._asked.index + 1}"
        with faults_explained(doing):
            reports = self._at_owners(message)
        raise_unrecoverable([fault for report in reports for fault in report.faults], doing)
        self._slices = tuple(reports)
        self._versions.add(states_of(reports), message.submission, len(commits))
        for commit in commits:
            for turn in commit:
                del self._running[turn.group]
        repeats = self._asked.decisions is not None
        self._versions.release(self._turns.oldest_needed(repeats))

    def _note_traffic(self, turn: RunningTurn) -> None:
        """Note what was sent for a turn: the gradients of its replicas, and the weights they read."""
        nodes = {report.replica: report.node_id for report in turn.reports}
        arrived = [(h.replica, h.reference) for row in turn.headers for h in row if h.reference]
        self._gradients += [(nodes[m], to.node_id, to.nbytes) for m, to in arrived]
        owners = [state.node_id for state in self._versions.newest.states]
        self._weights += [
            (owners[n], report.node_id, nbytes)
            for report in turn.reports
            for n, nbytes in report.received.items()
        ]

    def _at_owners(self, message: CommitMessage) -> list[SliceReport]:
        placement = self._placement
        with stage_name(self._context, SYNCHRONIZATION):
            task = partial(at_owner, partial(apply_commits, message))
            rdd = map_frames(placement.slice_rdd, task)
            return [pickle.loads(frame) for frame in RunningJob(rdd, placement.slices).frames()]

    def _submit_turn(self, turn: Turn, asked: Iteration, tries: int = 0) -> RunningTurn:
        """Submit the job of a turn."""
        step = self._turns.iteration_of(turn, asked, self.plan)
        newest = self._versions.newest.number
        base = self._versions.message(step, Update(version=turn.version, base=newest))
        unapplied = [each.submission for each in self._running.values()]
        oldest = min([*unapplied, base.submission])
        message = TurnMessage(**base.__dict__, oldest_gradient=oldest)
        name = f"group {turn.group}"
        group = self._turns.replicas_of(turn.group)
        with stage_name(self._context, name):
            alone = self._placement.single_node(message.states)
            rdd = turn_rdd(self._placement, message, group, alone)
            job = RunningJob(rdd, len(group) if alone else self._placement.slices)
        return RunningTurn(turn, asked, message.submission, job, None if alone else rdd, tries)

    def _receive(self, ended: RunningTurn) -> bool:
        """Take what a turn's job returned. Return False if the turn was submitted again."""
        turn = ended.turn
        doing = f"group {turn.group} in iteration {turn.clock + 1}"
        with faults_explained(doing):
            found = [pickle.loads(frame) for frame in ended.job.frames()]
        if ended.shuffled is not None:
            forget_shuffles(ended.shuffled)
            headers: Headers = tuple(found)
        else:
            headers = tuple(zip(*[report.headers for report in found], strict=True))
        faults = [header.fault for row in headers for header in row if header.fault]
        if faults:
            if ended.tries:
                raise_unrecoverable(faults, doing)
            if ended.tries == MAX_SUBMISSIONS:
                raise TrainingError(
                    f"{doing}: after {ended.tries} submissions tasks still find themselves on other "
                    f"nodes than their data: {sorted({fault.kind for fault in faults})}."
                )
            self._submit_again(ended, faults)
            return False
        reports = tuple(header.report for header in headers[0] if header.report)
        light = tuple(tuple(replace(h, report=None) for h in row) for row in headers)
        self._running[turn.group] = replace(ended, headers=light, reports=reports)
        return True

    def _submit_again(self, ended: RunningTurn, faults: list[Fault]) -> None:
        """Submit a turn again after its tasks had faults, and with it all others that are under way,
        because samples may have to be written again, which their jobs read."""
        others = [e for e in self._running.values() if not e.headers and e is not ended]
        for other in others:
            other.job.cancel()
        self._placement.resolve(faults, self._placement.samples)
        for each in (ended, *others):
            tries = each.tries + (each is ended)
            self._running[each.turn.group] = self._submit_turn(each.turn, each.asked, tries)

    def close(self) -> None:
        """Cancel all turns that are under way."""
        self._give_up_turns()

    def _give_up_turns(self) -> None:
        """Cancel turns whose gradients are not applied; their groups begin them anew."""
        self._turns.give_up()
        while self._running:
            _, turn = self._running.popitem()
            if not turn.headers:
                turn.job.cancel()

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`, as for what follows."""
        if which == CURRENT:
            self._give_up_turns()
            self._turns.reset()
        super().load(read, which)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        self._give_up_turns()
        return super().map_slices(use, which)

    def take_snapshot(self) -> SnapshotRdds:
        self._give_up_turns()
        return super().take_snapshot()

    def restore(self, snapshot: SnapshotRdds) -> None:
        self._give_up_turns()
        self._turns.reset()
        super().restore(snapshot)

    def forget(self) -> None:
        self._give_up_turns()
        super().forget()
