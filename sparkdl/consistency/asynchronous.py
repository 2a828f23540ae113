"""The asynchronous model: groups of replicas advance at their own pace.

The turns of groups of replicas: who may begin, and what is applied together. Pure, no Spark.

A *group* is a block of neighbouring replicas that compute one gradient together. A *turn* is one
gradient of one group: it reads a version of the weights, and has the mini-batch of the group's
*clock*, which counts the group's turns. A *commit* is one optimizer step with the gradients of some
turns; it makes the next version. Whoever repeats the commits in their order, each turn with the
version that it read, makes the same bits.

The turns of the groups of an asynchronous run on an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sparkdl.consistency.base import DELAY, MOST, Consistency, conflicts, largest_staleness
from sparkdl.data.epoch import EpochPlan
from sparkdl.errors import ParameterError, counted, known_arguments, shown
from sparkdl.plain import is_whole, make_plain
from sparkdl.replica.iteration import COMMITS, STALENESS, Decisions, Iteration, IterationRows

MOST_GROUPS = 1 << 12
"""The first number of groups that cannot be recorded."""
_OFFSET, _VERSIONS = 1 << 15, 1 << 16
"""The range of a recorded clock on each side of the iteration, and that of a recorded staleness."""
_ENDS = MOST_GROUPS * _VERSIONS * 2 * _OFFSET
"""The number that is added to the record of the last turn of a commit."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a group."""

    group: int
    clock: int  # the number of its mini-batch in the run, from 0
    version: int  # of the weights that it reads


Commit = tuple[Turn, ...]
"""The turns whose gradients make one optimizer step, in the order of the groups."""


class LiveTurns:
    """The turns of a run that is not repeated.

    A group may begin another turn if it is at most ``staleness`` ahead of the slowest; None:
    always.
    """

    def __init__(self, groups: int, quorum: int, staleness: int | None = None) -> None:
        self.version = 0
        self.clocks = [0] * groups
        self._quorum, self._staleness = quorum, staleness
        self._begun: dict[int, Turn] = {}
        self._arrived: list[Turn] = []

    @property
    def oldest_read(self) -> int:
        """Return the oldest version that a turn has read whose gradient is not applied."""
        return min((turn.version for turn in self._begun.values()), default=self.version)

    def start(self, clock: int) -> None:
        """Forget all turns, and let every group go on with the mini-batch ``clock``."""
        self.clocks = [clock] * len(self.clocks)
        self.drop()

    def drop(self) -> None:
        """Forget the turns whose gradients are not applied, so that their groups begin them anew."""
        self._begun.clear()
        self._arrived.clear()

    def repeated(self, commit: Commit) -> None:
        """Note a commit that another rule has made."""
        self.version += 1
        for turn in commit:
            self.clocks[turn.group] = turn.clock + 1

    def begin(self) -> list[Turn]:
        """Begin all turns that may begin now, and return them."""
        idle = [group for group in range(len(self.clocks)) if group not in self._begun]
        if self._staleness is not None:
            most = min(self.clocks) + self._staleness
            idle = [group for group in idle if self.clocks[group] <= most]
        made = [Turn(group=g, clock=self.clocks[g], version=self.version) for g in idle]
        self._begun |= {turn.group: turn for turn in made}
        return made

    def arrive(self, groups: Iterable[int]) -> None:
        """Note that the gradients of groups are there, in the order in which they came."""
        self._arrived += [self._begun[group] for group in groups]

    def due(self, most: int) -> list[Commit]:
        """Return commits that are to be made now, at most ``most``, and count them as made."""
        due: list[Commit] = []
        while len(self._arrived) >= self._quorum and len(due) < most:
            first, self._arrived = self._arrived[: self._quorum], self._arrived[self._quorum :]
            due.append(tuple(sorted(first, key=lambda turn: turn.group)))
        for commit in due:
            for turn in commit:
                del self._begun[turn.group]
            self.repeated(commit)
        return due


class RecordedTurns:
    """The turns of iterations that are repeated.

    With ``together``, versions that no expected turn reads are left out: commits whose gradients
    are there are made together.
    """

    def __init__(
        self, version: int, commits: Sequence[Commit] = (), together: bool = False
    ) -> None:
        self.version = version
        self._together = together
        self._commits: deque[Commit] = deque()
        self._waiting: list[Turn] = []
        self._busy: set[int] = set()
        self._arrived: set[int] = set()
        self.expect(commits)

    def expect(self, commits: Sequence[Commit]) -> None:
        """Add commits to make after the others. Their turns may begin when what they read is there."""
        self._commits += commits
        self._waiting += [turn for commit in commits for turn in commit]

    def begin(self) -> list[Turn]:
        """See :class:`LiveTurns`, also for the methods below."""
        made: list[Turn] = []
        earlier: set[int] = set()
        for turn in self._waiting:
            free = turn.group not in self._busy and turn.group not in earlier
            earlier.add(turn.group)
            if free and turn.version <= self.version:
                made.append(turn)
        self._waiting = [turn for turn in self._waiting if turn not in made]
        self._busy |= {turn.group for turn in made}
        return made

    def arrive(self, groups: Iterable[int]) -> None:
        self._arrived |= set(groups)

    def due(self, most: int) -> list[Commit]:
        due: list[Commit] = []
        while self._commits and len(due) < most:
            groups = {turn.group for turn in self._commits[0]}
            if not groups <= self._arrived or (due and self._must_exist()):
                break
            self.version += 1
            self._arrived -= groups
            self._busy -= groups
            due.append(self._commits.popleft())
        return due

    def _must_exist(self) -> bool:
        """Return whether the newest version cannot be left out."""
        return not self._together or any(turn.version == self.version for turn in self._waiting)


class Workplace(Protocol):
    """A place where turns are computed and gradients applied."""

    def begin(self, turn: Turn) -> None:
        """Begin to compute the gradient of a turn."""

    def wait(self) -> list[int]:
        """Wait until at least one gradient is there that was not returned yet, and return the
        groups in the order in which theirs came."""

    def apply(self, commits: Sequence[Commit]) -> None:
        """Make one version after another."""


def make_commits(turns: LiveTurns | RecordedTurns, place: Workplace, count: int) -> list[Commit]:
    """Compute and apply until there are ``count`` commits, and return them in order."""
    made: list[Commit] = []
    while len(made) < count:
        for turn in turns.begin():
            place.begin(turn)
        due = turns.due(count - len(made))
        if due:
            place.apply(due)
            made += due
        else:
            turns.arrive(place.wait())
    return made


def recorded_commits(made: Sequence[Commit], version: int, index: int) -> Decisions:
    """Return the record of commits after ``version``, one number for each turn."""
    turns = [
        (turn, version + n - turn.version, turn is commit[-1])
        for n, commit in enumerate(made)
        for turn in commit
    ]
    return {
        f"{COMMITS}{place}": 1
        + turn.group
        + MOST_GROUPS * (behind + _VERSIONS * (turn.clock - index + _OFFSET))
        + _ENDS * last
        for place, (turn, behind, last) in enumerate(turns)
    }


def commits_of(decisions: Decisions) -> list[tuple[int, int, int]]:
    """Return for each recorded turn its group, its staleness, and its clock less the iteration's
    index, in the order of the commits."""
    return [turn for turn, _ in _turns_of(decisions)]


def quorum_of(decisions: Decisions) -> int:
    """Return the number of recorded turns in the first commit; 0 without any."""
    return next((n for n, (_, last) in enumerate(_turns_of(decisions), 1) if last), 0)


def _turns_of(decisions: Decisions) -> list[tuple[tuple[int, int, int], int]]:
    """Return the recorded turns in the order of the commits, each with 1 if it is the last of one."""
    names = [name for name in decisions if name.startswith(COMMITS)]
    found = []
    for name in sorted(names, key=lambda name: int(name.removeprefix(COMMITS))):
        last, rest = divmod(decisions[name] - 1, _ENDS)
        rest, group = divmod(rest, MOST_GROUPS)
        offset, behind = divmod(rest, _VERSIONS)
        found.append(((group, behind, offset - _OFFSET), last))
    return found


def repeated_commits(
    recorded: Sequence[tuple[int, int, int]], quorum: int, version: int, index: int
) -> list[Commit]:
    """Return the commits of a repeated iteration; ``version`` is the newest before them."""
    turns = [
        Turn(group=group, clock=index + offset, version=version + place // quorum - behind)
        for place, (group, behind, offset) in enumerate(recorded)
    ]
    return [tuple(turns[n : n + quorum]) for n in range(0, len(turns), quorum)]


SCALES = ("auto", "root", "share", None)


@known_arguments
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
                f"consistency={shown(self)} with {counted(replicas, 'replica')}: groups have "
                "equally many replicas. Give groups= a divisor of the number of replicas, or set "
                "replicas=."
            )
        if groups % self.quorum:
            return (
                f"consistency={shown(self)}: the {groups} gradients of an iteration make no "
                "whole number of "
                f"steps with {self.quorum} each. Give quorum= a divisor of {groups}."
            )
        if self.staleness is not None and 1 < self.quorum < groups:
            return (
                f"consistency={shown(self)} with {groups} groups: the slowest group would wait "
                "for others "
                "that wait for it. Use quorum=1, or leave staleness out."
            )
        if groups >= MOST_GROUPS:
            return (
                f"consistency={shown(self)} with {groups} groups: give groups= below {MOST_GROUPS}."
            )
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
            if not is_whole(value, least):
                yield f"{name}={shown(value)}: give a whole number of at least {least}."
        if self.scale not in SCALES:
            yield f'scale={shown(self.scale)}: give "auto", "root", "share" or None.'

    def problems_with(self, trainer: Any) -> Iterator[str]:
        what = "consistency=Asynchronous"
        yield from conflicts(what, trainer, _REASONS)
        if trainer.slices != 1:
            yield from conflicts(what, trainer, _SEVERAL_SLICES)
        if isinstance(trainer.replicas, int):
            problem = self._problem_of_groups(trainer.replicas)
            if problem:
                yield problem


_REASONS = {
    "engine=gang": "its ranks sum gradients at every step, and wait for one another. Use "
    'engine="shuffle".',
    **DELAY,
    "precision=fp16": "the loss scale is one for all gradients of an iteration. Use "
    'precision="bf16".',
    "ema": "its decay is one for steps with all gradients. Leave one of the two out.",
    "histograms": "there is no gradient of an iteration. Leave one of the two out.",
}
_SEVERAL_SLICES = {
    "clip_norm": "slices would wait for one another in each step. Use slices=1, or clip_value."
}


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
        rule = live if iteration.decisions is None else self._repeat(iteration)
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
