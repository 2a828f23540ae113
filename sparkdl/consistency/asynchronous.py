"""The asynchronous model: groups of replicas advance at their own pace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.consistency.base import MOST, Consistency, largest_staleness, problems_of_delay
from sparkdl.consistency.turns import (
    MOST_GROUPS,
    Commit,
    LiveTurns,
    RecordedTurns,
    Turn,
    TurnRule,
    Workplace,
    commits_of,
    make_commits,
    quorum_of,
    recorded_commits,
    repeated_commits,
)
from sparkdl.data.epoch import EpochPlan
from sparkdl.errors import ParameterError
from sparkdl.plain import make_plain
from sparkdl.replica.iteration import STALENESS, Decisions, Iteration, IterationRows

SCALES = ("auto", "root", "share", None)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Consistency):
    """Groups of replicas compute gradients at their own pace; each is applied as it arrives.

    Inside a group replicas are synchronous. A group computes its gradient on the newest weights that
    there are when it begins. When the gradient arrives, it is applied to the weights that are the
    newest then, which may have made any number of steps in between. An iteration ends when as many
    gradients have been applied as there are groups, of whichever groups. The history has the order
    of the steps and the staleness of each gradient (:attr:`sparkdl.History.commits`), and
    ``fit(replay=history)`` repeats them with the same bits.

    Attributes:
        quorum: The number of gradients that are averaged to make a step, which divides ``groups``.
            With all of them the result has the bits of :class:`sparkdl.Synchronous`.
        staleness: The number of gradients by which a group may be ahead of the slowest when it begins
            another. None: any number, so that nobody waits.
        groups: The number of groups, which divides the number of replicas. None: each replica is one.
        scale: What multiplies the learning rate in a step with the share k of all groups: "share": k;
            "root": the root of k; None: nothing; "auto": the root for an optimizer whose first step
            is the same for twice the gradient, such as Adam, otherwise the share.
    """

    quorum: int = 1
    staleness: int | None = None
    groups: int | None = None
    scale: str | None = "auto"

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def keep(self) -> int:  # type: ignore[override]
        """Return the number of versions that may be read: versions stay as long as they are needed."""
        return MOST

    def groups_of(self, replicas: int) -> int:
        """Return the number of groups.

        Raises:
            ParameterError: ``replicas`` cannot be divided so.
        """
        problem = self._problem_of_groups(replicas)
        if problem:
            raise ParameterError(problem)
        return self.groups or replicas

    def _problem_of_groups(self, replicas: int) -> str:
        groups = self.groups or replicas
        if replicas % groups:
            return (
                f"consistency={self!r} with {replicas} replicas: groups have equally many replicas. "
                "Give groups= a divisor of the number of replicas, or set replicas=."
            )
        if groups % self.quorum:
            return (
                f"consistency={self!r} with {groups} groups: an iteration has whole steps. Give "
                "quorum= a divisor of the number of groups."
            )
        if self.staleness is not None and 1 < self.quorum < groups:
            return (
                f"consistency={self!r} with {groups} groups: the slowest group would wait for others "
                "that wait for it. Use quorum=1, or leave staleness out."
            )
        if groups >= MOST_GROUPS:
            return f"consistency={self!r} with {groups} groups: give groups= below {MOST_GROUPS}."
        return ""

    def check_recorded(self, number: int, decisions: Decisions, groups: int) -> None:
        """Check that what is recorded of an iteration can be repeated.

        Args:
            number: The number of the iteration, from 1.
            decisions: What is recorded of it.
            groups: The number of groups of the run that repeats it.

        Raises:
            ParameterError: The recorded run had other groups or another quorum.
        """
        found, quorum = len(commits_of(decisions)), quorum_of(decisions)
        there, here = f"{found} gradients", f"{groups} groups"
        if found == groups:
            there, here = f"steps of {quorum} gradients", f"quorum={self.quorum}"
        if found != groups or quorum != self.quorum:
            raise ParameterError(
                f"replay: iteration {number} of the history has {there}, and this run has {here}: "
                "train with the replicas= and consistency= of the recorded run."
            )

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        for name, least in (("quorum", 1), ("groups", 1), ("staleness", 0)):
            value = getattr(self, name)
            if value is None and name != "quorum":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield f"{name}={value!r}: give a whole number of at least {least}."
        if self.scale not in SCALES:
            yield f'scale={self.scale!r}: give "auto", "root", "share" or None.'

    def problems_with(self, trainer: Any) -> Iterator[str]:
        what = "consistency=Asynchronous"
        if trainer.engine == "gang":
            yield (
                f'{what} with engine="gang": its ranks sum gradients at every step, and wait for one '
                'another. Use engine="shuffle".'
            )
        yield from problems_of_delay(what, trainer)
        if trainer.precision == "fp16":
            yield (
                f'{what} with precision="fp16": the loss scale is one for all gradients of an '
                'iteration. Use precision="bf16".'
            )
        if trainer.ema is not None:
            yield (
                f"{what} with ema={trainer.ema}: its decay is one for steps with all gradients. Leave "
                "one of the two out."
            )
        if trainer.histograms is not None:
            yield (
                f"{what} with histograms: there is no gradient of an iteration. Leave one of the two "
                "out."
            )
        if trainer.clip_norm is not None and trainer.slices != 1:
            yield (
                f"{what} with clip_norm={trainer.clip_norm}: slices would wait for one another in each "
                "step. Use slices=1, or clip_value."
            )
        if isinstance(trainer.replicas, int):
            problem = self._problem_of_groups(trainer.replicas)
            if problem:
                yield problem


class GroupTurns:
    """The turns of a run on an engine, which repeats what is recorded and decides the rest.

    Args:
        model: The consistency model.
        replicas: The number of replicas.
        recorded: The decisions of a history that the run repeats, by the number of the iteration.

    Attributes:
        groups: The number of groups.
        live: The turns that nobody has recorded.
        most: The largest staleness so far. Versions that are so old are kept while iterations are
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
        """Return a turn as an iteration of its replicas.

        Args:
            turn: The turn.
            asked: The iteration that the loop asked for.
            plan: The batches of an epoch.
        """
        position = asked.epoch * plan.num_iterations + asked.batch + turn.clock - asked.index
        epoch, batch = divmod(position, plan.num_iterations)
        own = replace(asked, index=turn.clock, epoch=epoch, batch=batch, decisions=None)
        return own.with_rows(plan.rows(batch))

    def commit_index(self, asked: Iteration, number: int) -> int:
        """Return the index of a commit, from which the seed of its update is derived.

        Args:
            asked: The iteration that the loop asked for.
            number: The number of the commit in the iteration.
        """
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
        """Return the oldest version that must stay readable.

        Args:
            repeats: Whether iterations are being repeated.
        """
        oldest = self.live.oldest_read
        return min(oldest, self.live.version - self.most) if repeats else oldest

    def run(self, iteration: Iteration, place: Workplace) -> tuple[list[Commit], Decisions]:
        """Make the commits of an iteration, and return them with what is recorded of them.

        Args:
            iteration: The iteration.
            place: The place where turns are computed and gradients applied.

        Raises:
            ParameterError: The history that is replayed has no such commits, or has read a version
                that this run no longer has.
        """
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
