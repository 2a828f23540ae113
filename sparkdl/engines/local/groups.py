"""The local engine for groups that advance at their own pace: in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.consistency.asynchronous import Asynchronous, Commit, GroupTurns, Turn
from sparkdl.consistency.base import Consistency
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.loop.engine import CURRENT, ReadState
from sparkdl.loop.iteration_result import IterationResult, slowest, summarize
from sparkdl.process.determinism import torch_threads
from sparkdl.replica.iteration import Clock, Decisions, Iteration, ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slices.optimizer import scaled_rates
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec, SliceState


@dataclass(frozen=True)
class ComputedTurn:
    """A gradient of a group."""

    ends: float  # the virtual time when it arrives
    reports: list[ReplicaReport]
    sections: list[list[Section]]


class LocalGroupEngine(LocalEngine):
    """An engine that computes each turn as it begins, and lets it arrive after a virtual time.

    It has one thread, so a turn takes no time of others. It is the reference for the shuffle engine:
    with the same order of turns it has the same bits.
    """

    def __init__(
        self,
        samples: SampleSet,
        run: RunSpec,
        recipe: bytes,
        batch_size: int,
        validation: ValidationSet | None,
        model: Asynchronous,
        recorded: Mapping[int, Decisions] | None = None,
        seconds: Callable[[Turn], float] = lambda turn: 1.0,
    ) -> None:
        super().__init__(samples, run, recipe, batch_size, validation)
        self._turns = GroupTurns(model, run.replicas, recorded)
        self._seconds, self._time = seconds, 0.0
        self._computed: dict[int, ComputedTurn] = {}
        self._arrived: list[int] = []
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._asked: Iteration | None = None

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Make the commits of an iteration in this process."""
        with torch_threads(self._run.threads):
            clock = Clock()
            self._asked, self._made = iteration, 0
            self._done, self._slices = list[ReplicaReport](), list[SliceReport]()
            _, decisions = self._turns.run(iteration, self)
            clock.lap("iteration")
            seconds = {**slowest([report.seconds for report in self._done]), **clock.seconds}
            result = summarize(self._done, self._slices, self._plans.layout, seconds)
            return replace(result, decisions=decisions)

    def begin(self, turn: Turn) -> None:
        """Compute the gradient of a turn; see :class:`sparkdl.consistency.asynchronous.Workplace`."""
        assert self._asked is not None
        step = self._turns.iteration_of(turn, self._asked, self.plan)
        weights = self._kept.get(turn.version) or [state.weights for state in self._states]
        found = ComputedTurn(self._time + self._seconds(turn), [], [])
        for replica in self._turns.replicas_of(turn.group):
            start, stop = step.rows[replica]
            if stop > start:
                report, sections, _ = self._replicas.run(step, replica, weights, self._states)
                found.reports.append(report)
                found.sections.append(sections)
        self._computed[turn.group] = found

    def wait(self) -> list[int]:
        """Return the groups whose turns end next."""
        waiting = {g: t.ends for g, t in self._computed.items() if g not in self._arrived}
        self._time = min(waiting.values())
        arrived = sorted(group for group, ends in waiting.items() if ends == self._time)
        self._arrived += arrived
        return arrived

    def apply(self, commits: Sequence[Commit]) -> None:
        """Make one version after another."""
        assert self._asked is not None
        optimizer, asked = self._plans.owners[0].optimizer, self._asked
        rates = scaled_rates(optimizer, asked.hyperparameters, self._turns.share, self._turns.scale)
        for commit in commits:
            turns = [self._computed.pop(turn.group) for turn in commit]
            self._arrived = [group for group in self._arrived if group in self._computed]
            reports = [report for turn in turns for report in turn.reports]
            sections = [each for turn in turns for each in turn.sections]
            if self._turns.most:
                self._kept[self._version] = [state.weights.clone() for state in self._states]
                self._kept.pop(self._version - self._turns.most, None)
            self._version += 1
            self._done += reports
            index = self._turns.commit_index(asked, self._made)
            self._made += 1
            if reports and not any(report.not_finite for report in reports):
                own = replace(asked, index=index, hyperparameters=rates)
                self._slices = self._synchronize(own.with_rows(()), reports, sections)

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`."""
        super().load(read, which)
        if which == CURRENT:
            self._drop()
            self._turns.reset()

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Apply ``use`` to one slice after another, and give up turns as other engines do."""
        self._drop()
        return super().map_slices(use, which)

    def _drop(self) -> None:
        """Give up older versions, and gradients that are not applied."""
        self._turns.give_up()
        self._computed.clear()
        self._arrived.clear()
        self._kept.clear()


def local_engine(
    samples: SampleSet,
    run: RunSpec,
    recipe: bytes,
    batch_size: int,
    validation: ValidationSet | None,
    model: Consistency,
    recorded: Mapping[int, Decisions] | None = None,
) -> LocalEngine:
    """Build the local engine for a consistency model."""
    if isinstance(model, Asynchronous):
        return LocalGroupEngine(samples, run, recipe, batch_size, validation, model, recorded)
    return LocalEngine(samples, run, recipe, batch_size, validation, model)
