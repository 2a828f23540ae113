"""The turns of groups of replicas: who may begin, and what is applied together. Pure, no Spark.

A *group* is a block of neighbouring replicas that compute one gradient together. A *turn* is one
gradient of one group: it reads a version of the weights, and has the mini-batch of the group's
*clock*, which counts the group's turns. A *commit* is one optimizer step with the gradients of some
turns; it makes the next version. Whoever repeats the commits in their order, each turn with the
version that it read, makes the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sparkdl.replica.iteration import COMMITS, Decisions

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


class TurnRule(Protocol):
    """A rule for the turns of an iteration."""

    version: int
    """The newest version."""

    def begin(self) -> list[Turn]:
        """Begin all turns that may begin now, and return them."""

    def arrive(self, groups: Iterable[int]) -> None:
        """Note that the gradients of groups are there, in the order in which they came."""

    def due(self, most: int) -> list[Commit]:
        """Return commits that are to be made now, at most ``most``, and count them as made."""


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
        """See :class:`TurnRule`, also for the methods below."""
        idle = [group for group in range(len(self.clocks)) if group not in self._begun]
        if self._staleness is not None:
            most = min(self.clocks) + self._staleness
            idle = [group for group in idle if self.clocks[group] <= most]
        made = [Turn(group=g, clock=self.clocks[g], version=self.version) for g in idle]
        self._begun |= {turn.group: turn for turn in made}
        return made

    def arrive(self, groups: Iterable[int]) -> None:
        self._arrived += [self._begun[group] for group in groups]

    def due(self, most: int) -> list[Commit]:
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
        """See :class:`TurnRule`, also for the methods below."""
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


def make_commits(turns: TurnRule, place: Workplace, count: int) -> list[Commit]:
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
    found = []
    for number in _in_order(decisions):
        rest, group = divmod(number % _ENDS, MOST_GROUPS)
        offset, behind = divmod(rest, _VERSIONS)
        found.append((group, behind, offset - _OFFSET))
    return found


def quorum_of(decisions: Decisions) -> int:
    """Return the number of recorded turns in the first commit; 0 without any."""
    last = [number >= _ENDS for number in _in_order(decisions)]
    return last.index(True) + 1 if any(last) else 0


def _in_order(decisions: Decisions) -> list[int]:
    """Return the records of turns, in the order of the commits."""
    named = {
        int(name.removeprefix(COMMITS)): number - 1
        for name, number in decisions.items()
        if name.startswith(COMMITS)
    }
    return [number for _, number in sorted(named.items())]


def repeated_commits(
    recorded: Sequence[tuple[int, int, int]], quorum: int, version: int, index: int
) -> list[Commit]:
    """Return the commits of a repeated iteration; ``version`` is the newest before them."""
    turns = [
        Turn(group=group, clock=index + offset, version=version + place // quorum - behind)
        for place, (group, behind, offset) in enumerate(recorded)
    ]
    return [tuple(turns[n : n + quorum]) for n in range(0, len(turns), quorum)]
