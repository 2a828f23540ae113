"""Turns of groups: whoever may begin does, nobody gets too far ahead, and the record repeats it all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.consistency.asynchronous import (
    Asynchronous,
    Commit,
    GroupTurns,
    LiveTurns,
    RecordedTurns,
    Turn,
    commits_of,
    make_commits,
    recorded_commits,
    repeated_commits,
)
from sparkdl.errors import ParameterError
from sparkdl.model.recipe import Recipe
from sparkdl.replica.iteration import Iteration
from sparkdl.slices.optimizer import OptimizerSpec, scaled_rates


class Cluster:
    """Groups whose gradients arrive in an arbitrary order: ``delays`` says which of those that run."""

    def __init__(self, delays: Sequence[int]) -> None:
        self.delays, self.position = delays, 0
        self.running: list[Turn] = []
        self.begun: list[Turn] = []
        self.arrived: list[int] = []
        self.applied: list[Commit] = []
        self.versions = [0]

    def begin(self, turn: Turn) -> None:
        assert turn.version in self.versions
        self.running.append(turn)
        self.begun.append(turn)

    def wait(self) -> list[int]:
        assert self.running, "all wait for one another"
        self.position += 1
        place = self.delays[self.position % len(self.delays)] % len(self.running)
        self.arrived.append(self.running.pop(place).group)
        return self.arrived[-1:]

    def apply(self, commits: Sequence[Commit]) -> None:
        self.applied += commits
        self.versions.append(len(self.applied))


RULES = st.sampled_from(
    [(4, 1, None), (4, 2, None), (4, 4, 0), (4, 1, 0), (4, 1, 2), (3, 3, None), (1, 1, None)]
)
DELAYS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(RULES, DELAYS, DELAYS)
def test_live_and_recorded(
    rule: tuple[int, int, int | None], delays: list[int], others: list[int]
) -> None:
    groups, quorum, staleness = rule
    turns, cluster = LiveTurns(groups, quorum, staleness), Cluster(delays)
    again, versions = Cluster(others), 0
    for index in range(8):
        made = make_commits(turns, cluster, groups // quorum)
        named = recorded_commits(made, versions, index)
        recorded = commits_of(named)
        assert all(0 < number < 1 << 53 for number in named.values())  # as a history keeps them
        commits = repeated_commits(recorded, quorum, versions, index)
        assert commits == made
        replay = RecordedTurns(versions, commits)
        assert make_commits(replay, again, groups // quorum) == made
        versions += groups // quorum
        assert turns.version == replay.version == versions
    assert cluster.applied == again.applied
    ahead, sure = RecordedTurns(0, cluster.applied, together=True), Cluster(others)
    while ahead.version < versions:  # of all iterations at once, as much as iterations have
        make_commits(ahead, sure, groups // quorum)
    assert sure.applied == cluster.applied
    in_order = [turn.group for commit in cluster.applied for turn in commit]
    for n, commit in enumerate(cluster.applied):  # first come, first served
        assert sorted(in_order[n * quorum :][:quorum]) == sorted(
            cluster.arrived[n * quorum : (n + 1) * quorum]
        )
        assert all(turn.version <= n for turn in commit)
    clocks = [0] * groups
    for turn in (turn for commit in cluster.applied for turn in commit):
        assert turn.clock == clocks[turn.group]  # no mini-batch is left out
        clocks[turn.group] += 1
    if staleness is not None:
        done = [0] * groups
        for number, commit in enumerate(cluster.applied):
            for turn in cluster.begun:
                if turn.version == number:
                    assert turn.clock - min(done) <= staleness
            for turn in commit:
                done[turn.group] += 1
            assert max(done) - min(done) <= staleness + 1
    if quorum == groups:
        assert all(turn.version == n for n, commit in enumerate(cluster.applied) for turn in commit)


class Timed:
    """Groups of which each needs a time of its own for a turn."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.ends: dict[int, float] = {}

    def begin(self, turn: Turn) -> None:
        self.ends[turn.group] = self.now + self.seconds[turn.group]

    def wait(self) -> list[int]:
        self.now = max(self.now, min(self.ends.values()))
        arrived = [group for group, ends in self.ends.items() if ends <= self.now]
        for group in arrived:
            del self.ends[group]
        return arrived

    def apply(self, commits: Sequence[Commit]) -> None:
        self.now += 0.1  # a job, whatever it does


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_a_replay_takes_no_longer(slow: float) -> None:
    """It begins what later iterations need, and makes commits together as the recorded run did."""
    model, recorded, ended = Asynchronous(), {}, []
    for decisions in (None, recorded):
        place = Timed([1.0, 1.0, 1.0, slow])
        turns = GroupTurns(model, 4, decisions)
        for index in range(20):
            again = None if decisions is None else dict(decisions[index + 1])
            asked = Iteration(index=index, epoch=0, batch=index, decisions=again)
            made = turns.run(asked, place)[1]
            assert recorded.setdefault(index + 1, made) == made
        ended.append(place.now)
    assert ended[1] <= ended[0] + 1e-9


def test_nobody_starves() -> None:
    """Equally fast groups take turns, though one is always asked first."""
    cluster = Cluster([0])
    make_commits(LiveTurns(4, 1), cluster, 40)
    assert [cluster.arrived.count(group) for group in range(4)] == [10] * 4


def test_turns_that_are_given_up_begin_anew() -> None:
    turns = LiveTurns(2, 1)
    first = turns.begin()
    turns.arrive([1])
    assert turns.oldest_read == 0
    turns.drop()
    assert turns.begin() == first
    turns.start(5)
    assert [turn.clock for turn in turns.begin()] == [5, 5]


@pytest.mark.parametrize(
    ("changes", "replicas", "said"),
    [
        ({"groups": 2}, 3, "with 3 replicas: groups have equally many replicas"),
        ({"groups": 2}, 1, "with 1 replica: groups have equally many replicas"),
        ({"quorum": 2}, 3, "the 3 gradients of an iteration make no whole number of steps"),
        ({"quorum": 2, "staleness": 1}, 4, "the slowest group would wait for others"),
    ],
)
def test_groups_that_cannot_be(changes: dict[str, int], replicas: int, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Asynchronous(**changes).groups_of(replicas)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (partial(torch.optim.SGD, lr=0.4, momentum=0.9, weight_decay=0.1), 0.25),
        (partial(torch.optim.AdamW, lr=0.4), 0.5),
        (partial(torch.optim.Adagrad, lr=0.4), 0.5),
    ],
)
def test_the_rate_of_a_share(optimizer: partial[torch.optim.Optimizer], factor: float) -> None:
    module = torch.nn.Linear(2, 1)
    recipe = Recipe(model=lambda: module, loss=torch.nn.MSELoss(), optimizer=optimizer, seed=0)
    spec = OptimizerSpec.of(recipe, list(module.parameters()), module)
    assert scaled_rates(spec, None, 0.25, "auto") == ({"lr": 0.4 * factor},)
    assert scaled_rates(spec, ({"lr": 0.8},), 0.25, "share") == ({"lr": 0.2},)
    assert scaled_rates(spec, None, 0.25, "root") == ({"lr": 0.2},)
    assert scaled_rates(spec, None, 0.25, None) is None
    assert scaled_rates(spec, None, 1.0, "auto") is None
