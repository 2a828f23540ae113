"""Sums in replica order, averages of buffers: the mathematics of one slice."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.sync.plan import Piece, SlicePlan
from sparkdl.sync.update import Contribution, merge_buffers, reduce_gradients

INF, NAN = float("inf"), float("nan")


def plan_of(*pieces: Piece) -> SlicePlan:
    return SlicePlan(0, 0, max(piece.stop for piece in pieces), pieces)


GRADIENT = plan_of(Piece(0, "parameter", 0, 4))
AVERAGE = plan_of(Piece(0, "parameter", 0, 2), Piece(1, "average", 4, 3))


def contributions(
    values: list[list[float]], counts: list[int], dtype: torch.dtype = torch.float32
) -> list[Contribution]:
    return [
        Contribution(replica, count, torch.tensor(row, dtype=dtype))
        for replica, (row, count) in enumerate(zip(values, counts, strict=True))
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def reduced(items: list[Contribution], length: int = 4, plan: SlicePlan = GRADIENT) -> torch.Tensor:
    out = torch.full((length,), NAN, dtype=items[0].values.dtype)
    reduce_gradients(plan, items, out)
    return out


# Gradients


def test_the_mean_is_weighted_by_counts() -> None:
    items = contributions([[1, 2, 3, 4], [5, 6, 7, 8]], [1, 3])
    assert reduced(items).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_one_replica_keeps_its_bits() -> None:
    values = [0.1, -3e-42, 1e38, -0.0]
    (item,) = contributions([values], [17])
    assert bits(reduced([item])) == bits(item.values)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30),
                min_size=4,
                max_size=4,
            ),
            st.integers(1, 100),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_changes_no_bit(
    rows: list[tuple[list[float], int]], random: object
) -> None:
    items = contributions([values for values, _ in rows], [count for _, count in rows])
    arrived = list(items)
    random.shuffle(arrived)  # type: ignore[attr-defined]
    assert bits(reduced(arrived)) == bits(reduced(items))
    total = sum(item.count for item in items)
    exact = torch.stack([i.values.double() * i.count for i in items]).sum(0) / total
    scale = max(float(item.values.abs().max()) for item in items)
    assert (reduced(items).double() - exact).abs().max() <= scale * 1e-6


def test_the_sum_runs_in_replica_order() -> None:
    """Where rounding makes a difference: (1 + tiny) - 1, not 1 - 1 + tiny."""
    values = [[1.0] * 4, [2.0**-24] * 4, [-1.0] * 4]
    expected = (torch.tensor(1 / 3) + torch.tensor(2.0**-24) / 3) - torch.tensor(1 / 3)
    for arrival in itertools.permutations(contributions(values, [1, 1, 1])):
        assert reduced(list(arrival))[0] == expected
    swapped = contributions([values[0], values[2], values[1]], [1, 1, 1])
    assert reduced(swapped)[0] != expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_trainable_part_is_read(dtype: torch.dtype) -> None:
    items = contributions([[1, 2, NAN, NAN], [3, 4, NAN, NAN]], [1, 1], dtype)
    out = reduced(items, length=2)
    assert out.dtype == dtype
    assert out.tolist() == [2.0, 3.0]


def test_contributions_are_left_as_they_are() -> None:
    items = contributions([[1, 2, 3, 4], [5, 6, 7, 8]], [1, 3])
    reduced(items)
    assert [item.values.tolist() for item in items] == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ([{1, 2}, {2, 3}, {2}], {2}),
        ([{1}, set(), {1}], set()),
        ([{0, 1}], {0, 1}),
        ([set(), set()], set()),
    ],
)
def test_a_parameter_is_absent_where_no_replica_has_it(
    absent: list[set[int]], expected: set[int]
) -> None:
    items = [
        Contribution(replica, 1, torch.zeros(4), frozenset(numbers))
        for replica, numbers in enumerate(absent)
    ]
    assert reduce_gradients(GRADIENT, items, torch.empty(4)) == frozenset(expected)


# Buffers


def merged(items: list[Contribution], plan: SlicePlan = AVERAGE) -> torch.Tensor:
    weights = torch.full((plan.length,), 9.0, dtype=items[0].values.dtype)
    merge_buffers(plan, items, weights)
    return weights


def buffers(*rows: list[float]) -> list[list[float]]:
    """Rows with two parameters and two elements of padding before the buffer."""
    return [[NAN, NAN, NAN, NAN, *row] for row in rows]


def test_floats_are_averaged_by_counts_and_parameters_left_alone() -> None:
    items = contributions(buffers([1, 2, 4], [5, 6, 8]), [1, 3])
    assert merged(items).tolist() == [9.0, 9.0, 9.0, 9.0, 4.0, 5.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_is_that_of_numpy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    counts = [3, 1, 4, 1, 5]
    expected = (values * torch.tensor(counts)[:, None]).sum(0) / sum(counts)
    found = merged(contributions(values.tolist(), counts, dtype))[4:]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(found.double(), expected[4:], rtol=tolerance, atol=tolerance)


EQUAL = [0.1, -0.0, 0.0, 1e-45, 3.4e38, INF, -INF]


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 7], [1, 2, 3, 5, 7]])
def test_what_is_equal_everywhere_keeps_its_bits(counts: list[int]) -> None:
    """A constant buffer (a mask of -inf, a position table) must not drift over the iterations."""
    plan = plan_of(Piece(0, "average", 0, len(EQUAL)))
    items = contributions([EQUAL] * len(counts), counts)
    assert bits(merged(items, plan)) == bits(torch.tensor(EQUAL))


@pytest.mark.parametrize("rows", [[[NAN] * 3, [NAN] * 3], [[1.0] * 3, [NAN] * 3]])
def test_nan_stays_to_be_seen(rows: list[list[float]]) -> None:
    assert merged(contributions(buffers(*rows), [1, 1]))[4:].isnan().all()


def test_buffers_merge_in_replica_order() -> None:
    items = contributions(buffers([1e8, 1, 0.1], [-1e8, 2, 0.2], [1, 3, 0.3]), [1, 2, 3])
    expected = bits(merged(items))
    for arrival in itertools.permutations(items):
        assert bits(merged(list(arrival))) == expected


def test_exact_buffers_come_from_the_first_replica() -> None:
    """Their bits, whatever floats they would be: counters, masks, even the bits of a NaN."""
    patterns = [0x7FA00001, 0x00000001, 0xFFFFFFFF, 0x80000000]
    plan = plan_of(Piece(0, "exact", 0, 4))
    first = torch.frombuffer(bytearray(struct.pack("<4I", *patterns)), dtype=torch.float32)
    items = [
        Contribution(5, 1, torch.zeros(4)),
        Contribution(2, 1, first),  # replicas 0 and 1 had no samples
        Contribution(7, 100, torch.ones(4)),
    ]
    assert struct.unpack("<4I", bits(merged(items, plan))) == tuple(patterns)
