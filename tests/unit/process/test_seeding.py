"""After a seeded block, a process's generators and the threads of torch are as they were before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from sparkdl.process.determinism import generators_lent, seeded, torch_threads


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


@pytest.fixture(autouse=True)
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_as_many_as_before_also_after_an_error() -> None:
    @torch_threads(2)
    def fails() -> None:
        inside.append(torch.get_num_threads())
        raise ZeroDivisionError

    inside: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert inside == [2]
    assert torch.get_num_threads() == 3


def in_thread(body) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_a_block_that_begins_in_another_thread_leaves_what_there_was() -> None:
    """It ends last, and began while torch told it what the first block had set."""
    began, first_ended = threading.Event(), threading.Event()
    found = {}

    def second() -> None:
        with torch_threads(2):
            found["inside"] = torch.get_num_threads()
            began.set()
            assert first_ended.wait(30)
            found["still"] = torch.get_num_threads()
        found["after"] = torch.get_num_threads()

    with torch_threads(1):
        other = in_thread(second)
        assert began.wait(30)
        assert torch.get_num_threads() == 1
    first_ended.set()
    other.join()
    assert found == {"inside": 2, "still": 2, "after": 3}
    assert torch.get_num_threads() == 3
    new = []
    in_thread(lambda: new.append(torch.get_num_threads())).join()
    assert new == [3]
