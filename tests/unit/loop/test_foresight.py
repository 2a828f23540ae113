"""Which iterations are known before they come: never one that does not, and each as it would be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import lr_scheduler

import sparkdl
from sparkdl.loop.loop import MOST, SECONDS, Lookahead, LoopConfig
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, Validated, next_counters
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec

MODEL = nn.Linear(2, 2)
ADAM = partial(torch.optim.Adam, lr=0.5)
STEPS = partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)
COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=7)


def trainer(**changes: Any) -> sparkdl.Trainer:
    values = {"model": MODEL, "loss": nn.MSELoss(), "optimizer": ADAM, **changes}
    return sparkdl.Trainer(**values)


def config_of(own: sparkdl.Trainer) -> LoopConfig:
    return LoopConfig(stop=own.stop, options=own.options, histograms=own.histograms)


def schedule_of(make: Any, per: str = "iteration") -> Schedule:
    recipe = Recipe(MODEL, nn.MSELoss(), ADAM, 0)
    return Schedule(OptimizerSpec.of(recipe, list(MODEL.parameters()), MODEL), make, per)


def run(
    own: sparkdl.Trainer, make: Any, per: str, every: Any, seconds: float, an_epoch: int
) -> tuple[list[Any], list[int], list[int]]:
    """What is asked for, by iteration; after which iterations something else is done; and the last
    iteration that was known at each."""
    state = TrainState(iterations_per_epoch=an_epoch)
    foresight = Lookahead(
        config_of(own), [every], schedule_of(make, per if make else "iteration"), state
    )
    asked, between, furthest, previous = [], [], [], state
    said: tuple[Any, ...] = ()
    while not own.stop(previous, state):
        planned, then = foresight.plan(previous, state)
        if said:  # what was said would come does come
            assert (planned.iteration, *then)[: len(said)] == said
        said = then
        asked.append((replace(planned.iteration, description=""), planned.learning_rates))
        furthest.append(then[-1].index if then else planned.iteration.index)
        assert [each.index for each in then] == list(
            range(state.iteration + 1, state.iteration + 1 + len(then))
        )
        previous, state = state, replace(next_counters(state), timings={"iteration": seconds})
        if every(previous, state):
            between.append(state.iteration)
            record = Validated(iteration=state.iteration, epoch=state.epoch, metrics={"a": 1.0})
            state = replace(state, validations=(*state.validations, record))
    return asked, between, furthest


@given(
    st.integers(1, 40),
    st.sampled_from([sparkdl.every(1), sparkdl.every(7), sparkdl.every_epoch()]),
    st.sampled_from([None, STEPS, COSINE]),
    st.sampled_from(["iteration", "epoch"]),
    st.integers(1, 9),
    st.sampled_from([0.001, 0.1, 5.0]),
)
def test_what_is_foreseen_comes_and_as_if_nobody_had(
    limit: int, every: Any, make: Any, per: str, an_epoch: int, seconds: float
) -> None:
    """With a stop that nobody can foresee beside it, which never comes, nothing is."""
    stop = sparkdl.max_iteration(limit)
    seen = trainer(stop=stop, histograms=sparkdl.every(4))
    asked, between, furthest = run(seen, make, per, every, seconds, an_epoch)
    blind = replace(seen, stop=stop | sparkdl.min_loss(-1.0))
    assert (asked, between) == run(blind, make, per, every, seconds, an_epoch)[:2]
    assert len(asked) == limit
    for index, last in enumerate(furthest):
        due = next((done for done in between if done > index), limit)
        assert index <= last < min(due, limit)


def test_as_many_are_foreseen_as_take_little_time() -> None:
    def known(seconds: float) -> int:
        far = trainer(stop=sparkdl.max_iteration(60))
        furthest = run(far, None, "iteration", sparkdl.every(1000), seconds, 100)[2]
        return max(last - index for index, last in enumerate(furthest))

    assert known(0.001) == MOST
    assert known(SECONDS / 3) == 3
    assert known(10.0) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"stop": sparkdl.min_loss(0.1)},
        {"stop": sparkdl.max_epoch(9) | sparkdl.max_time(60)},
        {"histograms": sparkdl.every_seconds(1)},
    ],
    ids=["loss scale", "loss", "time", "histograms"],
)
def test_nothing_is_foreseen_that_depends_on_how_it_goes(changes: dict[str, Any]) -> None:
    own = trainer(**{"stop": sparkdl.max_epoch(9), **changes})
    state = TrainState(iterations_per_epoch=100, loss=1.0, timings={"iteration": 0.001})
    foresight = Lookahead(config_of(own), [], schedule_of(None), state)
    assert foresight.plan(state, state)[1] == ()


def test_which_triggers_are_predictable() -> None:
    class Own(MaxEpoch):
        def __call__(self, previous: TrainState, current: TrainState) -> bool:
            return current.loss < 1

    early = sparkdl.max_epoch(9) | sparkdl.plateau("a", 2) | sparkdl.max_score("a", 0.9)
    assert early.predictable
    assert (~(early & sparkdl.every(3))).predictable
    assert not (early | Own(3)).predictable
    assert not (~sparkdl.min_loss(0.1)).predictable


def test_nothing_is_foreseen_for_who_begins_nothing_ahead_nor_after_the_cut() -> None:
    """What was foreseen before is still planned: the ranks have begun it."""
    own = trainer(stop=sparkdl.max_epoch(9))
    state = TrainState(iterations_per_epoch=100, loss=1.0, timings={"iteration": SECONDS / 3})
    none = Lookahead(config_of(own), [], schedule_of(None), state, ahead=False)
    assert none.plan(state, state)[1] == ()
    foresight = Lookahead(config_of(own), [], schedule_of(None), state)
    begun = list(foresight.plan(state, state)[1])
    assert len(begun) == 3
    while begun:
        assert not foresight.cut()
        previous, state = state, replace(next_counters(state), timings=state.timings)
        planned, then = foresight.plan(previous, state)
        assert planned.iteration.index == begun.pop(0).index
        assert list(then) == begun
    assert foresight.cut()
