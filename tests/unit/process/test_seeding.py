"""Random draws: the same for a seed, and what others draw is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from sparkdl.process.determinism import generators_lent, seeded


def begin(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


LENT = pytest.mark.parametrize("lent", [nullcontext, generators_lent], ids=["kept", "lent"])


@LENT
def test_the_same_seed_draws_the_same(lent: Callable[[], AbstractContextManager[None]]) -> None:
    with seeded(5):
        first = draw()
    with lent():
        for _ in range(2):
            with seeded(5):
                assert draw() == first
        with seeded(6):
            assert all(one != other for one, other in zip(first, draw(), strict=True))


@LENT
@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_states_are_restored(
    fails: bool, lent: Callable[[], AbstractContextManager[None]]
) -> None:
    with seeded(1):
        expected = [draw(), draw()]
    with lent(), seeded(1):
        found = [draw()]
        try:
            with seeded(2):
                draw()
                if fails:
                    raise RuntimeError
        except RuntimeError:
            assert fails
        found.append(draw())
    assert found == expected


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1, -1])
def test_any_seed_of_64_bits_will_do(seed: int) -> None:
    with seeded(seed):
        first = draw()
    with seeded(seed):
        assert draw() == first


@pytest.mark.parametrize("fails", [False, True])
def test_lent_generators_are_given_back(fails: bool) -> None:
    begin(1)
    expected = [draw(), draw(), draw()]
    begin(1)
    found = [draw()]
    try:
        with generators_lent():
            with seeded(2):
                draw()
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    found.append(draw())
    with seeded(3):  # from here on they are kept again
        draw()
    found.append(draw())
    assert found == expected
