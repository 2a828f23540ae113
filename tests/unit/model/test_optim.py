"""LARS, LAMB and Ftrl against their formulas, number by number, and that they train."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of

from sparkdl.optim import LAMB, LARS, Ftrl

Vector = list[float]
STEPS = 4


def norm(values: Vector) -> float:
    return math.sqrt(sum(value * value for value in values))


def by_lars(
    w: Vector, steps: list[Vector], lr: float, m: float, decay: float, eta: float
) -> Vector:
    v = [0.0] * len(w)
    for g in steps:
        above, below = norm(w), norm(g)
        ratio = eta * above / (below + decay * above) if above and below else 1.0
        v = [m * vi + lr * ratio * (gi + decay * wi) for vi, gi, wi in zip(v, g, w, strict=True)]
        w = [wi - vi for wi, vi in zip(w, v, strict=True)]
    return w


def by_lamb(w: Vector, steps: list[Vector], lr: float, decay: float, adapt: bool) -> Vector:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(steps, 1):
        m = [0.9 * mi + 0.1 * gi for mi, gi in zip(m, g, strict=True)]
        v = [0.99 * vi + 0.01 * gi * gi for vi, gi in zip(v, g, strict=True)]
        u = [
            mi / (1 - 0.9**t) / (math.sqrt(vi / (1 - 0.99**t)) + 1e-6) + decay * wi
            for mi, vi, wi in zip(m, v, w, strict=True)
        ]
        ratio = norm(w) / norm(u) if adapt and norm(w) and norm(u) else 1.0
        w = [wi - lr * ratio * ui for wi, ui in zip(w, u, strict=True)]
    return w


def by_ftrl(
    w: Vector, steps: list[Vector], lr: float, l1: float, l2: float, power: float
) -> Vector:
    found = []
    for i, weight in enumerate(w):
        z, n = 0.0, 0.1
        for step in steps:
            g = step[i]
            after = n + g * g
            z += g + 2 * 0.01 * weight - (after**-power - n**-power) / lr * weight
            n = after
            if abs(z) <= l1:
                weight = 0.0
            else:
                weight = (math.copysign(l1, z) - z) / (n**-power / lr + 2 * l2)
        found.append(weight)
    return found


def run(make: Callable[..., torch.optim.Optimizer], w: Vector, steps: list[Vector]) -> Vector:
    parameter = torch.tensor(w, dtype=torch.float64)
    optimizer = make([parameter])
    for step in steps:
        parameter.grad = torch.tensor(step, dtype=torch.float64)
        optimizer.step()
    return parameter.tolist()


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))
vectors = st.lists(numbers, min_size=3, max_size=3)
quick = settings(deadline=None, max_examples=50)
close = partial(pytest.approx, rel=1e-9, abs=1e-12)


@quick
@given(vectors, st.lists(vectors, min_size=1, max_size=STEPS), st.sampled_from([0.0, 0.1]))
def test_lars(w: Vector, steps: list[Vector], decay: float) -> None:
    make = partial(LARS, lr=0.5, momentum=0.8, weight_decay=decay, trust=0.02)
    assert run(make, w, steps) == close(by_lars(w, steps, 0.5, 0.8, decay, 0.02))


@quick
@given(
    vectors,
    st.lists(vectors, min_size=1, max_size=STEPS),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_lamb(w: Vector, steps: list[Vector], decay: float, adapt: bool) -> None:
    make = partial(LAMB, lr=0.05, betas=(0.9, 0.99), weight_decay=decay, adapt=adapt)
    assert run(make, w, steps) == close(by_lamb(w, steps, 0.05, decay, adapt), rel=1e-7)


@quick
@given(
    vectors,
    st.lists(vectors, min_size=1, max_size=STEPS),
    st.sampled_from([0.0, 0.5, 5.0]),
    st.sampled_from([-0.5, -0.7, 0.0]),
)
def test_ftrl(w: Vector, steps: list[Vector], l1: float, power: float) -> None:
    make = partial(Ftrl, lr=0.3, lr_power=power, l1=l1, l2=0.2, l2_shrinkage=0.01)
    assert run(make, w, steps) == close(by_ftrl(w, steps, 0.3, l1, 0.2, power), rel=1e-7)


def test_without_adapting_lars_is_sgd_with_momentum_and_lamb_is_adamw() -> None:
    steps = [[1.0, -2.0, 0.5], [0.1, 0.2, -0.3], [3.0, 1.0, 2.0]]
    w = [0.3, -0.2, 0.9]
    lars = partial(LARS, lr=0.1, momentum=0.9, weight_decay=0.1, adapt=False)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    assert run(lars, w, steps) == close(run(sgd, w, steps))
    lamb = partial(LAMB, lr=0.1, eps=1e-6, adapt=False)
    adam = partial(torch.optim.AdamW, lr=0.1, eps=1e-6, weight_decay=0.0)
    assert run(lamb, w, steps) == close(run(adam, w, steps))


def test_l1_makes_weights_exactly_zero() -> None:
    found = run(partial(Ftrl, lr=0.5, l1=1.0), [0.1, 0.1], [[0.2, 5.0]] * 4)
    assert found[0] == 0.0
    assert found[1] != 0.0


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    for make in (LARS, LAMB, Ftrl):
        parameter = torch.ones(2)
        optimizer: Any = make([parameter])
        assert optimizer.step(lambda: 5) == 5
        assert parameter.tolist() == [1, 1]
        assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(LARS, lr=-1.0), "lr=-1.0: give a number of at least 0."),
        (partial(LARS, trust=float("nan")), "trust=nan: give a number of at least 0."),
        (partial(LAMB, eps=-1e-3), "eps=-0.001: give a number of at least 0."),
        (
            partial(LAMB, betas=(0.9, 1.0)),
            "betas=(0.9, 1.0): give two numbers of at least 0 and less than 1.",
        ),
        (partial(Ftrl, l1=-1.0), "l1=-1.0: give a number of at least 0."),
        (partial(Ftrl, lr=0.0), "lr=0.0, lr_power=-0.5: give lr > 0 and lr_power <= 0."),
        (partial(Ftrl, lr_power=1), "lr=0.001, lr_power=1: give lr > 0 and lr_power <= 0."),
    ],
)
def test_values_out_of_range(make: Callable[..., Any], message: str) -> None:
    assert message_of(ValueError, make, [torch.zeros(1)]) == message
