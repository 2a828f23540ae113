"""Triggers are pure predicates over (previous state, current state)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sparkdl
from sparkdl.errors import ParameterError
from sparkdl.train.state import TrainState
from sparkdl.train.triggers import Trigger, every, every_epoch, max_epoch, max_iteration

PER_EPOCH = 4


def state(iteration: int) -> TrainState:
    return TrainState(
        iteration=iteration, epoch=iteration // PER_EPOCH, iterations_per_epoch=PER_EPOCH
    )


def fires(trigger: Trigger, iterations: int = 12) -> list[int]:
    """The iterations after which it is true."""
    steps = range(1, iterations + 1)
    return [i for i in steps if trigger(state(i - 1), state(i))]


class AtLoss(Trigger):
    """A trigger of a user's own, of which nothing is known beforehand."""

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.loss < 0.5


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (max_iteration(10), [10, 11, 12]),
        (max_epoch(2), [8, 9, 10, 11, 12]),
        (every_epoch(), [4, 8, 12]),
        (every(5), [5, 10]),
        (every(1), list(range(1, 13))),
        (every_epoch() & every(8), [8]),
        (every_epoch() | every(5), [4, 5, 8, 10, 12]),
        (max_epoch(1) & max_iteration(10) | every(2), [2, 4, 6, 8, 10, 11, 12]),
        (max_epoch(1) & (max_iteration(10) | every(3)), [6, 9, 10, 11, 12]),
    ],
)
def test_when_it_is_true(trigger: Trigger, expected: list[int]) -> None:
    assert fires(trigger) == expected
    assert fires(trigger) == expected  # no memory


@pytest.mark.parametrize("trigger", [max_iteration(1), max_epoch(1), every_epoch(), every(1)])
def test_nothing_is_true_before_the_first_iteration(trigger: Trigger) -> None:
    assert trigger(state(0), state(0)) is False


@pytest.mark.parametrize(("previous", "current", "expected"), [(3, 11, True), (11, 14, False)])
def test_every_sees_a_multiple_that_was_stepped_over(
    previous: int, current: int, expected: bool
) -> None:
    """As after a resume at another iteration."""
    assert every(5)(state(previous), state(current)) is expected


@pytest.mark.parametrize(
    ("trigger", "limit"),
    [
        (max_epoch(3), 12),
        (max_iteration(7), 7),
        (every_epoch(), None),
        (every(2), None),
        (AtLoss(), None),
        (max_epoch(3) & max_iteration(7), 12),
        (max_epoch(3) | max_iteration(7), 7),
        (max_epoch(3) & AtLoss(), None),
        (max_epoch(3) | AtLoss(), 12),
        (AtLoss() | every(2), None),
    ],
)
def test_the_limit_is_where_it_is_first_true(trigger: Trigger, limit: int | None) -> None:
    assert trigger.limit(PER_EPOCH) == limit
    if limit is not None:
        assert fires(trigger, 20)[0] == limit


@pytest.mark.parametrize("make", [max_epoch, max_iteration, every])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_anything_but_a_positive_whole_number_is_refused(make: Any, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        make(value)
    assert str(caught.value) == (f"{make.__name__}({value!r}): give a whole number of at least 1.")


def test_a_trigger_must_say_when() -> None:
    class Unfinished(Trigger):
        pass

    with pytest.raises(TypeError) as caught:
        Unfinished()(state(0), state(1))
    assert str(caught.value) == "Unfinished does not define __call__(previous, current)"


def test_triggers_are_values() -> None:
    trigger = max_epoch(3) & every(2) | max_iteration(5)
    assert trigger == max_epoch(3) & every(2) | max_iteration(5)
    assert trigger != max_epoch(3) & every(2) | max_iteration(6)
    assert pickle.loads(pickle.dumps(trigger)) == trigger


@pytest.mark.parametrize("name", ["every", "every_epoch", "max_epoch", "max_iteration"])
def test_triggers_are_at_the_top(name: str) -> None:
    assert getattr(sparkdl, name) is globals()[name]
