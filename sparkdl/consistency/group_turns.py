"""The turns of the groups of an asynchronous run on an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.consistency.base import largest_staleness
from sparkdl.consistency.turns import (
    Commit,
    LiveTurns,
    RecordedTurns,
    Turn,
    TurnRule,
    Workplace,
    commits_of,
    make_commits,
    recorded_commits,
    repeated_commits,
)
from sparkdl.data.epoch import EpochPlan
from sparkdl.errors import ParameterError
from sparkdl.replica.iteration import STALENESS, Decisions, Iteration, IterationRows


class GroupTurns:
    """The turns of a run on an engine, which repeats what is recorded and decides the rest.

    ``most`` is the largest staleness so far: versions that old are kept while iterations are
    repeated.
    """

    def __init__(
        self, model: Asynchronous, replicas: int, recorded: Mapping[int, Decisions] | None = None
    ) -> None:
        self.groups = model.groups_of(replicas)
        self.live = LiveTurns(self.groups, model.quorum, model.staleness)
        self._recorded = recorded or {}
        self.most = largest_staleness(self._recorded)
        self._rule: RecordedTurns | None = None
        self._expected = 0
        self._model, self._size = model, replicas // self.groups
        self._started, self._oldest = False, 0

    @property
    def share(self) -> float:
        """Return the share of all groups whose gradients make a step."""
        return self._model.quorum / self.groups

    @property
    def scale(self) -> str | None:
        """Return what multiplies the learning rate, see :class:`Asynchronous`."""
        return self._model.scale

    def replicas_of(self, group: int) -> range:
        """Return the replicas of a group."""
        return range(group * self._size, (group + 1) * self._size)

    def iteration_of(self, turn: Turn, asked: Iteration, plan: EpochPlan) -> IterationRows:
        """Return a turn as an iteration of its replicas."""
        position = asked.epoch * plan.num_iterations + asked.batch + turn.clock - asked.index
        epoch, batch = divmod(position, plan.num_iterations)
        own = replace(asked, index=turn.clock, epoch=epoch, batch=batch, decisions=None)
        return own.with_rows(plan.rows(batch))

    def commit_index(self, asked: Iteration, number: int) -> int:
        """Return the index of a commit, from which the seed of its update is derived."""
        return asked.index * (self.groups // self._model.quorum) + number

    def reset(self) -> None:
        """Begin with version 0 of another state."""
        self.live.version = 0
        self.give_up()

    def give_up(self) -> None:
        """Give up turns whose gradients are not applied, and all versions but the newest."""
        self.live.drop()
        self._rule = None
        self._oldest = self.live.version

    def oldest_needed(self, repeats: bool) -> int:
        """Return the oldest version that must stay readable."""
        oldest = self.live.oldest_read
        return min(oldest, self.live.version - self.most) if repeats else oldest

    def run(self, iteration: Iteration, place: Workplace) -> tuple[list[Commit], Decisions]:
        """Make the commits of an iteration, and return them with what is recorded of them."""
        live, quorum = self.live, self._model.quorum
        version, index = live.version, iteration.index
        if not self._started:
            live.start(index)
        self._started = True
        rule: TurnRule = live
        if iteration.decisions is not None:
            rule = self._repeat(iteration)
        clocks = list(live.clocks)
        try:
            made = make_commits(rule, place, self.groups // quorum)
        except BaseException:
            live.clocks[:] = clocks
            live.drop()
            self._rule = None
            raise
        if rule is not live:
            for commit in made:
                live.repeated(commit)
        decisions = dict(recorded_commits(made, version, index))
        behind = max(staleness for _, staleness, _ in commits_of(decisions))
        self.most = max(self.most, behind)
        return made, {**decisions, **({STALENESS: behind} if behind else {})}

    def _repeat(self, iteration: Iteration) -> RecordedTurns:
        """Return the rule that repeats an iteration, and begins turns of later ones as early."""
        version, index = self.live.version, iteration.index
        steps = self.groups // self._model.quorum
        if self._rule is None:
            self._rule = RecordedTurns(version, together=bool(self._recorded))
            self._expected = index
        if self._expected <= index:
            self._rule.expect(self._repeated(index, version, iteration.decisions or {}))
            self._expected = index + 1
        while self._expected + 1 in self._recorded:
            first = version + steps * (self._expected - index)
            if first - self.most > version + steps:  # it reads no version of this iteration
                break
            try:
                coming = self._repeated(self._expected, first, self._recorded[self._expected + 1])
            except ParameterError:  # it is told when it is its turn
                break
            self._rule.expect(coming)
            self._expected += 1
        return self._rule

    def _repeated(self, index: int, version: int, decisions: Decisions) -> list[Commit]:
        """Return the commits of an iteration, before which ``version`` is the newest version."""
        self._model.check_recorded(index + 1, decisions, self.groups)
        recorded = commits_of(decisions)
        made = repeated_commits(recorded, self._model.quorum, version, index)
        if min(turn.version for commit in made for turn in commit) < self._oldest:
            raise ParameterError(
                f"replay: iteration {index + 1} of the history has a gradient of weights "
                "from before a checkpoint of this run, which ends them. Replay with the same "
                "checkpoint= as the recorded run, or without any."
            )
        return made
