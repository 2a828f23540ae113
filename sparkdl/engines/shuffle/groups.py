"""The shuffle engine for groups that advance at their own pace.

A turn of a group is a Spark job of its own, over the partitions of the group's replicas. One thread
decides: it submits the jobs, sees which have ended, and submits the commits. What arrives between two
iterations waits in its slab, so that the state is one version then. A snapshot or a checkpoint holds
that version only: turns that are under way then are given up, and begin anew with it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.consistency.base import Update
from sparkdl.consistency.group_turns import GroupTurns
from sparkdl.consistency.turns import Commit, Turn
from sparkdl.engines.resources import MAX_SUBMISSIONS
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.engines.shuffle.faults import raise_unrecoverable
from sparkdl.engines.shuffle.group_tasks import (
    ApplyCommits,
    CommitEntry,
    CommitMessage,
    Headers,
    TurnMessage,
)
from sparkdl.engines.shuffle.messages import SYNCHRONIZATION
from sparkdl.engines.shuffle.reports import states_of
from sparkdl.engines.shuffle.spec import ShuffleSpec
from sparkdl.engines.shuffle.state_reads import SnapshotRdds
from sparkdl.engines.shuffle.traffic import Transfer, between_nodes
from sparkdl.engines.shuffle.turn_jobs import RunningTurn, turn_rdd
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.errors import TrainingError
from sparkdl.loop.engine import CURRENT, ReadState
from sparkdl.loop.iteration_result import IterationResult, slowest, summarize
from sparkdl.replica.iteration import Decisions, Fault, Iteration, ReplicaReport, SliceReport
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import RunningJob, forget_shuffles, map_frames, stage_name

POLL_SECONDS = 0.001
"""The time between two looks at the running jobs."""


class GroupEngine(ShuffleEngine):
    """A shuffle engine that runs turns of groups, see :mod:`sparkdl.consistency.turns`."""

    def __init__(
        self,
        spec: ShuffleSpec,
        batch_size: int,
        model: Asynchronous,
        validation: ValidationSet | None = None,
        recorded: Mapping[int, Decisions] | None = None,
    ) -> None:
        super().__init__(spec, batch_size, validation=validation, consistency=model)
        self._turns = GroupTurns(model, spec.run.replicas, recorded)
        self._spec = spec
        self._running: dict[int, RunningTurn] = {}
        self._asked: Iteration | None = None
        self._made = 0
        self._replicas: list[ReplicaReport] = []
        self._gradients: list[Transfer] = []
        self._weights: list[Transfer] = []
        self._slices: tuple[SliceReport, ...] = ()
        spec.resources.closing(self)

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
        """Submit a turn; see :class:`sparkdl.consistency.turns.Workplace`, also for the two below."""
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
            rdd = map_frames(placement.slice_rdd, ApplyCommits(message))
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

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`, as for what follows."""
        if which == CURRENT:
            self._give_up_turns()
            self._turns.reset()
        super().load(read, reported, which)

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
