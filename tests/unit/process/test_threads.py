"""Torch's threads: as many as asked for, and afterwards as many as before."""

from __future__ import annotations

import threading

import pytest
import torch

from sparkdl.process.determinism import torch_threads


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
