"""Going back and repeating ends where an undisturbed run ends, whatever is lost and when. No JVM."""

from __future__ import annotations

import itertools
import logging
import tracemalloc
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.engines.recovery import MAX_LOSSES, RecoveringEngine, ReplayLog
from sparkdl.errors import CheckpointError, ModelError, StalledError, StateLostError, TrainingError
from sparkdl.loop.advance import IterationResult
from sparkdl.loop.engine import BEST
from sparkdl.replica.iteration import Iteration


@dataclass
class State:
    """Of a run whose iteration is a function of the state and of what is asked for."""

    value: int | None = None
    best: int | None = None


class Engine:
    """Loses its state in those calls (counted from 0) that ``losses`` name."""

    plan = None
    capacity_note = ""

    def __init__(self, losses: frozenset[int] = frozenset(), first: int = 7) -> None:
        self.state, self.losses, self.calls, self.first = State(), losses, 0, first
        self.snapshots: list[State] = []
        self.readable, self.full, self.placed = True, False, True

    def _call(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.losses:
            self.state, self.placed = State(), False
        if not self.placed:
            raise StateLostError(f"call {self.calls}: lost")

    def load(self, read=None, which="current") -> None:
        self._call()
        value = self.first if read is None else read()
        if which == BEST:
            self.state.best = value
        else:
            self.state = State(value)

    def run(self, iteration: Iteration, then=()) -> IterationResult:
        self._call()
        assert self.state.value is not None
        self.state.value = (self.state.value * 31 + iteration.index) % 1_000_003
        return IterationResult(float(self.state.value), 1)

    def keep_best(self) -> None:
        self._call()
        self.state.best = self.state.value

    def weights(self, which="current"):
        self._call()
        return self.state.best if which == BEST else self.state.value

    def forget(self) -> None:
        self.state, self.placed = State(), True

    def take_snapshot(self) -> State:
        self._call()
        if self.full:
            raise TrainingError("no space\nmore")
        self.snapshots.append(State(self.state.value, self.state.best))
        return self.snapshots[-1]

    def restore(self, snapshot: State) -> None:
        self._call()
        if not self.readable:
            raise StateLostError("the snapshot is lost too")
        assert snapshot in self.snapshots
        self.state = State(snapshot.value, snapshot.best)

    def drop(self, snapshot: State) -> None:
        self.snapshots.remove(snapshot)


def test_the_log_gives_back_what_was_asked_for():
    asked = [
        Iteration(
            index=i,
            epoch=i // 4,
            batch=i % 4,
            hyperparameters=None if i < 3 else ({"lr": 1 / (1 + i // 2)},),
            loss_scale=2.0**i,
            histograms=i == 5,
            decisions={"staleness": i % 3} if i % 3 else {},
        )
        for i in range(8)
    ]
    log = ReplayLog()
    for one in asked:
        log.append(replace(one, decisions=None), one.decisions)
        if one.index % 3 == 0:
            log.append(None)
    told = [
        one
        for index in range(8)
        for one in ([asked[index], None] if index % 3 == 0 else [asked[index]])
    ]
    for start in range(len(log) + 1):
        found = [one and replace(one, description="") for one in log.since(start)]
        assert found == told[start:]
    assert log.iterations == 8
    assert ReplayLog().iterations == 0


@pytest.mark.parametrize(
    "values",
    [
        lambda i: ({"lr": 0.1 / (i + 1), "betas": (0.9 - i / 100, 0.99)}, {"lr": 0.5}),
        lambda i: ({}, {"lr": float("inf")}) if i % 2 else ({"lr": 0.1}, {}),
        lambda i: ({"lr": torch.tensor(0.1 * i)},),
        lambda i: ({"lr": 1, "nesterov": bool(i % 2), "weight_decay": ()},),
        lambda i: None if i % 2 else ({"lr": i / 2},),
    ],
)
def test_the_log_keeps_hyperparameters_of_any_kind(values):
    log = ReplayLog()
    for i in range(6):
        log.append(Iteration(index=i, epoch=0, batch=i, hyperparameters=values(i)))
    told = [one.hyperparameters for one in log.since(0)]
    assert told == [values(i) for i in range(6)]
    kinds = [[type(v) for group in one or () for v in group.values()] for one in told]
    assert kinds == [[type(v) for g in values(i) or () for v in g.values()] for i in range(6)]


def test_a_schedule_costs_the_log_little():
    log = ReplayLog()
    tracemalloc.start()
    for i in range(10_000):
        log.append(Iteration(index=i, epoch=0, batch=i, hyperparameters=({"lr": 1 / (i + 1)},)))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 100 * 10_000


def iteration(index: int) -> Iteration:
    return Iteration(index=index, epoch=0, batch=index, hyperparameters=None)


def run(engine: Engine, iterations: int, seconds: float | None, checkpoints: int = 0):
    """Losses of all iterations, the weights, the best ones, which are kept every third iteration."""
    recovering = RecoveringEngine(engine, seconds)
    recovering.load()
    losses = []
    for index in range(iterations):
        losses.append(recovering.run(iteration(index)).loss)
        if index % 3 == 2:
            recovering.keep_best()
        if checkpoints and index % checkpoints == checkpoints - 1:
            value, best = recovering.weights(), recovering.weights(BEST)

            def load(to, value=value, best=best) -> None:
                to.load(lambda: value)
                to.load(lambda: best, which=BEST)

            recovering.checkpointed(recovering.done, index + 1, load)
    return losses, recovering.weights(), recovering.weights(BEST)


@given(
    losses=st.frozensets(st.integers(0, 60), max_size=12),
    seconds=st.sampled_from([None, 0.0, 1000.0]),
    checkpoints=st.integers(0, 4),
    readable=st.booleans(),
)
def test_any_losses_leave_no_trace(losses, seconds, checkpoints, readable):
    engine = Engine(losses)
    engine.readable = readable
    assert run(engine, 12, seconds, checkpoints) == run(Engine(), 12, None, checkpoints)
    assert len(engine.snapshots) <= 1


@pytest.mark.parametrize(
    ("seconds", "checkpoints", "point", "repeated"),
    [
        (0.0, 0, "the snapshot after iteration 5", "0 iterations"),
        (None, 4, "the checkpoint after iteration 4", "1 iteration"),
        (None, 0, "the beginning", "5 iterations"),
    ],
)
def test_it_goes_back_no_further_than_it_must(caplog, seconds, checkpoints, point, repeated):
    engine = Engine()
    step = engine.run

    def lose_the_sixth(asked, then=()):
        if asked.index == 5 and engine.losses == frozenset():
            engine.losses = frozenset([engine.calls])
        return step(asked)

    engine.run = lose_the_sixth
    with caplog.at_level(logging.WARNING, "sparkdl"):
        assert run(engine, 8, seconds, checkpoints) == run(Engine(), 8, None, checkpoints)
    (line,) = caplog.messages
    assert line.startswith(f"call {min(engine.losses) + 1}: lost. Continued from {point} and ")
    assert f"repeated {repeated}:" in line


def test_a_snapshot_that_cannot_be_taken_stops_nothing(caplog):
    engine = Engine()
    engine.full = True
    assert run(engine, 4, 0.0) == run(Engine(), 4, None)
    assert set(caplog.messages) == {"no snapshot could be taken: no space"}


def test_a_snapshot_is_taken_after_a_recovery():
    """Of the one that it came from, a copy may be gone."""
    engine = Engine()
    recovering = RecoveringEngine(engine, 1000.0)
    recovering.load()
    assert "snapshot" not in recovering.run(iteration(0)).seconds
    engine.losses = frozenset([engine.calls])
    assert "snapshot" in recovering.run(iteration(1)).seconds
    assert len(recovering.recoveries) == 1
    assert "snapshot" not in recovering.run(iteration(2)).seconds


def test_a_wait_that_was_too_long_is_waited_once():
    """Every other point, and the next iteration, would have to wait as long."""
    engine = Engine()
    recovering = RecoveringEngine(engine, 0.0)
    recovering.load()
    recovering.run(iteration(0))
    waits = []

    def wait(*_):
        waits.append(1)
        raise StalledError("sparkdl waited")

    engine.restore, engine.placed = wait, False
    with pytest.raises(StalledError):
        recovering.run(iteration(1))
    engine.take_snapshot, engine.placed = wait, True
    engine.load()
    with pytest.raises(StalledError):
        recovering.run(iteration(1))
    assert len(waits) == 2


def test_what_is_lost_again_and_again_is_an_error():
    engine = Engine(frozenset(range(1, 10_000)))
    recovering = RecoveringEngine(engine, 0.0)
    recovering.load()
    with pytest.raises(StateLostError, match=r"lost\nFit again, with resume="):
        recovering.run(iteration(0))
    assert engine.calls < 10 * MAX_LOSSES


@pytest.mark.parametrize("kind", [CheckpointError, ModelError])
def test_where_nothing_can_be_read_the_error_says_both(kind):
    engine = Engine()

    def gone():
        raise kind("it was deleted")

    recovering = RecoveringEngine(engine, None)
    recovering.load(lambda: 3)
    recovering._starts[:] = [gone]
    engine.losses = frozenset([engine.calls])
    with pytest.raises(StateLostError, match=r"lost It could not be restored: it was deleted\nFit"):
        recovering.run(iteration(0))


def test_snapshots_are_rare_where_they_are_slow(monkeypatch):
    """No more than a twentieth of the time, however short the interval."""
    now = [0.0]
    monkeypatch.setattr("sparkdl.engines.recovery.time.monotonic", lambda: now[0])
    engine = Engine()
    take, step = engine.take_snapshot, engine.run

    def slow():
        now[0] += 3.0
        return take()

    def stepping(asked, then=()):
        now[0] += 1.0
        return step(asked)

    engine.take_snapshot, engine.run = slow, stepping
    recovering = RecoveringEngine(engine, 5.0)
    recovering.load()
    costs = [recovering.run(iteration(i)).seconds.get("snapshot", 0.0) for i in range(200)]
    assert {cost for cost in costs if cost} == {3.0}
    assert costs[4] == 3.0
    assert sum(costs) / now[0] <= 0.05 + 3.0 / now[0]


class Eager(Engine):
    """Goes as far as it is asked to at once. A snapshot before all of that is done would be of a state
    that the run has not come to."""

    def __init__(self, losses=frozenset()):
        super().__init__(losses)
        self.done, self.last = -1, -1

    def run(self, iteration, then=()):
        result = super().run(iteration)
        self.done = iteration.index
        self.last = max([self.last, self.done, *(each.index for each in then)])
        return result

    def take_snapshot(self):
        assert self.last == self.done
        return super().take_snapshot()

    def forget(self):
        super().forget()
        self.done = self.last = -1


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("lost", [None, 6, 11])
def test_a_snapshot_waits_for_the_iterations_that_have_begun(monkeypatch, ahead, lost):
    """And the next of them wait for the snapshot."""
    now = [0.0]
    monkeypatch.setattr("sparkdl.engines.recovery.time.monotonic", lambda: now[0])
    engine, plain = Eager(frozenset() if lost is None else frozenset([lost])), Engine()
    recovering = RecoveringEngine(engine, 5.0)
    recovering.load()
    plain.load()
    snapshots, count = [], 40
    for i in range(count):
        now[0] += 1.0
        then = [iteration(n) for n in range(i + 1, min(i + 1 + ahead, count))]
        result = recovering.run(iteration(i), then)
        assert result.loss == plain.run(iteration(i)).loss
        if "snapshot" in result.seconds:
            snapshots.append(i)
    assert len(recovering.recoveries) == (lost is not None)
    gaps = [b - a for a, b in itertools.pairwise(snapshots)]
    assert max(gaps) <= 5 + ahead + 1
    assert len(snapshots) >= 2
