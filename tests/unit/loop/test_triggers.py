"""Triggers are pure predicates over (previous state, current state)."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistakes import message_of

import sparkdl
from sparkdl.errors import ParameterError
from sparkdl.loop import state as loop_state
from sparkdl.loop import triggers
from sparkdl.loop.state import TrainState, Validated, recent_validations
from sparkdl.loop.triggers import (
    Trigger,
    every,
    every_epoch,
    every_seconds,
    max_epoch,
    max_iteration,
    max_score,
    max_time,
    min_loss,
    plateau,
    several_iterations,
)

PER_EPOCH = 4


def state(iteration: int, **values: Any) -> TrainState:
    return TrainState(
        iteration=iteration, epoch=iteration // PER_EPOCH, iterations_per_epoch=PER_EPOCH, **values
    )


def validated(*scores: float, metric: str = "accuracy", higher: bool = True) -> TrainState:
    """After validations that found ``scores``."""
    validations = tuple(
        Validated(iteration=PER_EPOCH * i, epoch=i, metrics={metric: score, "other": 0.0})
        for i, score in enumerate(scores, start=1)
    )
    directions = {metric: higher, "other": True}
    return state(9, validations=validations, higher_is_better=directions)


def at(trigger: Trigger, current: TrainState) -> bool:
    return trigger(state(8), current)


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
        (every_epoch(2), [8]),
        (every(5), [5, 10]),
        (every(1), list(range(1, 13))),
        (max_epoch(1) & max_iteration(10) | every(2), [2, 4, 6, 8, 10, 11, 12]),
        (every(2) & ~every_epoch(), [2, 6, 10]),
        (several_iterations(5), [5, 10]),
    ],
)
def test_when_it_is_true(trigger: Trigger, expected: list[int]) -> None:
    assert fires(trigger) == expected
    assert fires(trigger) == expected  # no memory


@pytest.mark.parametrize("trigger", [max_iteration(1), max_epoch(1), every_epoch(), every(1)])
def test_nothing_is_true_before_the_first_iteration(trigger: Trigger) -> None:
    assert trigger(state(0), state(0)) is False


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
        (~~max_epoch(3), 12),
        (~(~max_epoch(3) & ~max_iteration(7)), 7),
        (~(~max_epoch(3) | ~max_iteration(7)), 12),
        (max_iteration(7) | ~max_epoch(5) & every(30), 7),
        (~max_iteration(3), None),
        (~max_iteration(3) & max_iteration(5), None),
        (plateau("loss", 2) | max_iteration(9), 9),
        (max_time(5), None),
    ],
)
def test_the_limit_is_where_it_is_first_true(trigger: Trigger, limit: int | None) -> None:
    assert trigger.limit(PER_EPOCH) == limit
    if limit is not None:
        assert fires(trigger, 20)[0] == limit


def test_a_trigger_must_say_when() -> None:
    class Unfinished(Trigger):
        pass

    assert (
        message_of(TypeError, Unfinished(), state(0), state(1))
        == "Unfinished does not define __call__(previous, current)"
    )


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (lambda: max_epoch(3) or min_loss(0.1), r"combine triggers with \|, & and ~"),
        (lambda: not max_epoch(3), r"combine triggers with \|, & and ~"),
        (lambda: max_epoch(3) | 5, r"behind \| stands 5: give a trigger"),
        (lambda: max_epoch(3) & every_epoch, "behind & stands every_epoch, not called"),
    ],
)
def test_slips_with_operators(slip: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        slip()


def test_triggers_are_values() -> None:
    trigger = max_epoch(3) & every(2) | max_iteration(5)
    assert trigger == max_epoch(3) & every(2) | max_iteration(5)
    assert trigger != max_epoch(3) & every(2) | max_iteration(6)
    assert pickle.loads(pickle.dumps(trigger)) == trigger


def test_triggers_are_at_the_top() -> None:
    for name in filter(str.islower, triggers.__all__):
        assert getattr(sparkdl, name) is getattr(triggers, name)


LEAVES = st.one_of(
    st.builds(max_iteration, st.integers(1, 20)),
    st.builds(max_epoch, st.integers(1, 4)),
    st.builds(every, st.integers(1, 6)),
    st.just(every_epoch()),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=8,
)
STEPS = st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1]))


@given(EXPRESSIONS, EXPRESSIONS, STEPS)
def test_they_combine_as_truth_values_do(a: Trigger, b: Trigger, step: tuple[int, int]) -> None:
    before, after = state(step[0]), state(step[1])
    assert (a & b)(before, after) is (a(before, after) and b(before, after))
    assert (a | b)(before, after) is (a(before, after) or b(before, after))
    assert (~a)(before, after) is (not a(before, after))
    assert (~~a)(before, after) is a(before, after)


@given(EXPRESSIONS)
def test_from_its_limit_on_it_is_always_true(trigger: Trigger) -> None:
    limit = trigger.limit(PER_EPOCH)
    if limit is not None:
        assert set(range(limit, 40)) <= set(fires(trigger, 39))


@pytest.mark.parametrize(("make", "counter"), [(every, "iteration"), (every_seconds, "seconds")])
@given(n=st.integers(1, 7), jumps=st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_it_is_true_once_for_the_multiples_of_a_jump(
    make: Any, counter: str, n: int, jumps: list[int]
) -> None:
    now, trigger = TrainState(), make(n)
    for jump in jumps:
        before, now = now, replace(now, **{counter: getattr(now, counter) + jump})
        crossed = range(int(getattr(before, counter)) + 1, int(getattr(now, counter)) + 1)
        assert trigger(before, now) is any(i % n == 0 for i in crossed)


@pytest.mark.parametrize(
    ("trigger", "current", "expected"),
    [
        *((max_time(60), state(9, seconds=s), s >= 60) for s in (0.0, 59.9, 60.0)),
        *((every_seconds(0.3), state(9, seconds=s), s >= 0.3) for s in (0.29, 0.31)),
        *((min_loss(0.5), state(9, loss=x), x <= 0.5) for x in (0.51, 0.5, 0.1, math.nan)),
        (max_score("accuracy", 0.9), validated(), False),
        (max_score("accuracy", 0.9), validated(0.8), False),
        (max_score("accuracy", 0.9), validated(0.9), True),
        (max_score("accuracy", 0.9), validated(0.95), True),
        (max_score("accuracy", 0.9), validated(0.95, 0.8), False),
        (max_score("accuracy", 0.9), validated(math.nan), False),
        (max_score("f1", 0.1), validated(0.9), False),  # the last one of a resumed run had others
        (max_score("loss", 0.9), validated(metric="loss", higher=False), False),
        (max_score("loss", 0.9), validated(0.8, metric="loss", higher=False), True),
        (max_score("loss", 0.9), validated(0.9, metric="loss", higher=False), True),
        (max_score("loss", 0.9), validated(0.8, 0.95, metric="loss", higher=False), False),
        (max_score("loss", 0.9), validated(math.nan, metric="loss", higher=False), False),
    ],
)
def test_a_limit_that_is_reached(trigger: Trigger, current: TrainState, expected: bool) -> None:
    assert at(trigger, current) is expected


@pytest.mark.parametrize(
    ("scores", "higher", "min_delta", "expected"),
    [
        ((), True, 0.0, False),
        ((0.5, 0.4), True, 0.0, False),  # nothing before the last two
        ((0.5, 0.4, 0.5), True, 0.0, True),  # as good is no improvement
        ((0.5, 0.51, 0.52), True, 0.1, True),
        ((0.5, 0.4, 0.61), True, 0.1, False),
        ((0.9, 0.5, 0.6, 0.7), True, 0.0, True),  # better than the one before, not than the best
        ((0.5, 0.49, 0.48), False, 0.1, True),
        ((0.5, math.nan, math.nan), True, 0.0, True),
        ((math.nan, math.nan, 0.1), True, 0.0, False),
        ((math.nan, math.nan, math.nan), False, 0.0, True),
    ],
)
def test_plateau(scores: tuple[float, ...], higher: bool, min_delta: float, expected: bool) -> None:
    current = validated(*scores, higher=higher)
    assert at(plateau("accuracy", 2, min_delta), current) is expected


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4), st.integers(0, 2))
def test_plateau_is_the_same_in_either_direction(
    scores: list[int], patience: int, min_delta: int
) -> None:
    """And as a loop with a memory would find it: ``patience`` without a new best, in the end."""
    trigger = plateau("accuracy", patience, min_delta)
    found = at(trigger, validated(*scores))
    assert found is at(trigger, validated(*(-s for s in scores), higher=False))
    if min_delta == 0:
        best, waited = -math.inf, 0
        for score in scores:
            best, waited = (score, 0) if score > best else (best, waited + 1)
        assert found is (waited >= patience)


VALUES = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.nan])


@given(st.lists(st.tuples(VALUES, st.booleans()), max_size=16), st.integers(1, 3), st.booleans())
def test_what_a_stream_takes_along_decides_the_same(
    scores: list[tuple[float, bool]], patience: int, higher: bool
) -> None:
    """A batch of data may end after any validation; of those before the last 4 two stay at most."""
    trigger, kept = plateau("accuracy", patience), ()
    with mock.patch.object(loop_state, "MOST_VALIDATIONS", 4):
        for count, (_, ends) in enumerate(scores, start=1):
            all_of_them = validated(*(score for score, _ in scores[:count]), higher=higher)
            kept = (*kept, all_of_them.validations[-1])
            assert at(trigger, replace(all_of_them, validations=kept)) is at(trigger, all_of_them)
            if ends:
                kept = recent_validations(kept)
                assert len(kept) <= 4 + 2 * 2  # of two metrics


def test_the_names_of_the_metrics() -> None:
    assert every(2).metrics() == frozenset()
    assert (max_score("a", 1) | min_loss(1) & ~plateau("b", 2)).metrics() == {"a", "b"}
    assert (~(max_score("a", 1) & max_score("a", 2))).metrics() == {"a"}


NUMBER, METRIC = "is not a finite number.", 'name a metric of the validation, such as "accuracy".'
PATIENCE = "give a patience of at least 1 validation."


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        (max_time, (0,), "give more than 0 seconds."),
        (max_time, ("1h",), f"'1h' {NUMBER}"),
        (every_seconds, (-1.5,), "give more than 0 seconds."),
        (every_seconds, (True,), f"True {NUMBER}"),
        (min_loss, (math.nan,), f"nan {NUMBER}"),
        (max_score, ("accuracy", None), f"None {NUMBER}"),
        (max_score, (0.9, 0.9), METRIC),
        (plateau, ("", 2, 0.0), METRIC),
        (plateau, ("loss", 0, 0.0), PATIENCE),
        (plateau, ("loss", 1.5, 0.0), PATIENCE),
        (plateau, ("loss", 3, -1), "give a min_delta of at least 0."),
        (plateau, ("loss", 3, "x"), f"'x' {NUMBER}"),
        *(
            (make, (value,), "give a whole number of at least 1.")
            for make in (max_epoch, max_iteration, every, several_iterations)
            for value in (0, -1, 1.5, True, "3", None)
        ),
    ],
)
def test_what_is_refused(make: Any, arguments: tuple[Any, ...], told: str) -> None:
    given = ", ".join(map(repr, arguments))
    assert message_of(ParameterError, make, *arguments) == f"{make.__name__}({given}): {told}"
