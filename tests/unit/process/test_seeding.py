"""Random draws: the same for a seed, and what others draw is left as it was."""

from __future__ import annotations

import random

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


def test_the_same_seed_draws_the_same() -> None:
    drawn = []
    for _ in range(2):
        with seeded(5):
            drawn.append(draw())
    with seeded(6):
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_states_are_restored(fails: bool) -> None:
    with seeded(1):
        expected = [draw(), draw()]
    with seeded(1):
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


# Lent generators


def test_what_is_drawn_in_a_block_is_the_same_where_the_generators_are_lent() -> None:
    with seeded(1):
        expected = draw()
    with generators_lent():
        for _ in range(2):
            with seeded(1):
                assert draw() == expected


def test_a_block_within_another_leaves_the_outer_one_as_it_was_though_they_are_lent() -> None:
    with seeded(1):
        expected = [draw(), draw()]
    with generators_lent(), seeded(1):
        found = [draw()]
        with seeded(2):
            draw()
        found.append(draw())
    assert found == expected


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
