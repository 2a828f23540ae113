"""Which rows make a mini-batch: exact arithmetic, checked against slow and obvious references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mistakes import message_of

from sparkdl.data.epoch import EpochPlan, apportion, derive_seed, permutation, remembered

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=7)
LARGE_COUNTS = st.lists(st.integers(0, 10**9), min_size=1, max_size=6)
quick = settings(deadline=None, max_examples=50)


def sainte_lague(counts: list[int], position: int) -> list[int]:
    """One seat after another to the largest quotient, the first one in a tie."""
    taken = [0] * len(counts)
    for _ in range(min(position, sum(counts))):
        open_ = [m for m, size in enumerate(counts) if taken[m] < size]
        taken[min(open_, key=lambda m: (taken[m] + 0.5) / counts[m])] += 1
    return taken


@quick
@given(COUNTS, st.integers(0, 300))
@example([1, 1, 1, 1], 2)  # all quotients tie
@example([0, 0], 1)
@example([40, 1, 1, 1, 1, 1, 1], 3)
def test_seats_are_those_of_the_divisor_method(counts: list[int], position: int) -> None:
    assert apportion(counts, position).tolist() == sainte_lague(counts, position)


@quick
@given(LARGE_COUNTS, st.data())
def test_seats_sum_to_the_position_and_grow_with_it(counts: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, sum(counts)))
    further = data.draw(st.integers(position, position + 1000))
    taken = apportion(counts, position)
    assert taken.dtype == np.int64
    assert taken.sum() == position
    assert (taken >= 0).all()
    assert (taken <= apportion(counts, further)).all()
    assert (apportion(counts, further) <= np.array(counts)).all()


@quick
@given(COUNTS, st.integers(1, 100))
@example([0, 0, 5], 2)
@example([3], 100)
def test_an_epoch_takes_every_row_of_every_replica_once(counts: list[int], batch_size: int) -> None:
    plan = EpochPlan(tuple(counts), batch_size)
    seen: list[list[int]] = [[] for _ in counts]
    sizes = []
    for index in range(plan.num_iterations):
        rows = plan.rows(index)
        sizes.append(sum(stop - start for start, stop in rows))
        for replica, (start, stop) in enumerate(rows):
            order = permutation(3, 0, replica, counts[replica])
            seen[replica] += order[start:stop].tolist()
    assert [sorted(rows) for rows in seen] == [list(range(count)) for count in counts]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) == plan.num_samples == sum(counts)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_batch_outside_the_epoch_is_an_error(index: int) -> None:
    assert (
        message_of(IndexError, EpochPlan((4, 5), 4).rows, index)
        == f"batch {index} of an epoch of 3"
    )


def test_permutations_differ_between_seeds_epochs_and_replicas() -> None:
    places = [(seed, epoch, m) for seed in range(3) for epoch in range(3) for m in range(3)]
    orders = {tuple(permutation(*place, 50).tolist()) for place in places}
    assert len(orders) == len(places)


def test_a_permutation_stays_what_it_is() -> None:
    """Pinned: another order would change the bits of every training run."""
    assert permutation(7, 0, 1, 10).tolist() == [7, 9, 4, 2, 5, 6, 1, 8, 3, 0]
    assert permutation(7, 0, 1, 10).dtype == np.int64


def test_an_order_is_shared_and_therefore_read_only() -> None:
    order = remembered("a test", lambda: permutation(1, 2, 3, 4))
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 0


def test_derived_seeds_stay_what_they_are() -> None:
    assert derive_seed(0, "forward", 3, 1) == 1917071875798140806
    assert derive_seed(0, "shuffle") == 2077702453695817234


def test_derived_seeds_are_distinct_and_of_63_bits() -> None:
    places = [
        (seed, purpose, *position)
        for seed in (0, 1, 11, 2**63)
        for purpose in ("forward", "shuffle")
        for position in [(), (0,), (1,), (1, 1), (11,), (1, 11), (11, 1), (111,)]
    ]
    derived = [derive_seed(*place) for place in places]
    assert len(set(derived)) == len(places)
    assert all(0 <= seed < 2**63 for seed in derived)
