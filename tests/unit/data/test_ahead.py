"""What is prepared ahead is what would have been computed, and never more than one range each."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from sparkdl.data.prefetch import Prefetcher
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import ParameterError
from sparkdl.process.determinism import steadily

ORDER = np.random.default_rng(0).permutation(100)
LENGTHS = ORDER % 5 + 1


class Source:
    """A slow pure function; notes each range, and in which thread it was prepared."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.asked: list[tuple[int, int, bool]] = []

    def __call__(self, start: int, stop: int) -> list[Rows]:
        here = threading.current_thread() is threading.main_thread()
        self.asked.append((start, stop, here))
        time.sleep(self.seconds)
        values = [
            np.full(n, row) for n, row in zip(LENGTHS[start:stop], ORDER[start:stop], strict=True)
        ]
        return [ORDER[start:stop].copy(), Ragged.of(values)]


def right(rows: list[Rows], start: int, stop: int) -> bool:
    expected = Source(0)(start, stop)
    return all(
        [np.asarray(r).tolist() for r in found] == [np.asarray(r).tolist() for r in wanted]
        for found, wanted in zip(rows, expected, strict=True)
    )


def begun(source: Source, count: int) -> None:
    """Wait until the thread has taken up its work."""
    deadline = time.monotonic() + 5
    while len(source.asked) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def test_the_next_range_is_prepared_though_it_be_one_shorter_or_longer() -> None:
    ahead, source = Prefetcher(), Source()
    start = 0
    for number, stop in enumerate((10, 20, 29, 39)):
        assert right(ahead.take("me", 0, start, stop, 100, source), start, stop)
        start = stop
        begun(source, number + 2)
    assert (ahead.used, ahead.wasted) == (3, 0)
    assert source.asked[:2] == [(0, 10, True), (10, 21, False)]


def test_nothing_is_prepared_beyond_the_end_nor_where_it_takes_no_time() -> None:
    ahead, source = Prefetcher(), Source()
    ahead.take("me", 0, 90, 100, 100, source)
    patient, quick = Prefetcher(worth_seconds=10), Source(0)
    for start in (0, 10, 20):
        patient.take("me", 0, start, start + 10, 100, quick)
    time.sleep(0.02)
    assert [here for *_, here in source.asked + quick.asked] == [True] * 4


@pytest.mark.parametrize("change", ["position", "start", "longer"])
def test_what_was_not_foreseen_is_computed(change: str) -> None:
    ahead, source = Prefetcher(), Source()
    ahead.take("me", 0, 0, 10, 100, source)
    begun(source, 2)
    position, start, stop = {"position": (1, 10, 20), "start": (0, 11, 20), "longer": (0, 10, 40)}[
        change
    ]
    assert right(ahead.take("me", position, start, stop, 100, source), start, stop)
    assert (ahead.used, ahead.wasted) == (0, 1)


def test_a_mistake_surfaces_where_the_rows_are_asked_for() -> None:
    ahead, source = Prefetcher(), Source()

    def fails(start: int, stop: int) -> list[Rows]:
        if stop > 10:
            raise ParameterError(f"rows {start} to {stop}")
        return source(start, stop)

    ahead.take("me", 0, 0, 10, 100, fails)
    time.sleep(0.02)
    with pytest.raises(ParameterError, match="rows 10 to 20"):
        ahead.take("me", 0, 10, 20, 100, fails)


def test_what_draws_from_a_global_generator_stays_in_the_task() -> None:
    """Beside a forward pass it would change what dropout draws there."""
    ahead, source = Prefetcher(), Source()

    def draws(start: int, stop: int) -> list[Rows]:
        return steadily("a test", lambda seed: (torch.rand(1), source(start, stop))[1])

    for who in ("me", "another"):
        for start in (0, 10):
            ahead.take(who, 0, start, start + 10, 100, draws)
    time.sleep(0.03)
    assert source.asked == [(0, 10, True)] + 2 * [(0, 10, True), (10, 20, True)]


def test_what_was_quick_becomes_slow() -> None:
    ahead, source = Prefetcher(worth_seconds=0.2), Source(0)
    ahead.take("me", 0, 0, 10, 100, source)
    source.seconds = 0.25
    ahead.take("me", 0, 10, 20, 100, source)
    begun(source, 3)
    assert source.asked == [(0, 10, True), (10, 20, True), (20, 31, False)]


def test_little_is_kept() -> None:
    ahead, source = Prefetcher(max_kept=2), Source(0.003)
    for who in range(6):
        ahead.take(who, 0, 0, 10, 100, source)
    assert len(ahead._ranges) == 2


def test_who_is_never_asked_again_is_not_prepared_for() -> None:
    """As where two processes share the replicas, and each meets the other's."""
    ahead, source = Prefetcher(patience=2), Source(0.003)
    for number in range(0, 100, 2):
        ahead.take("me", 0, number, number + 1, 100, source)
    assert ahead.used == 0
    assert ahead.wasted == 3
