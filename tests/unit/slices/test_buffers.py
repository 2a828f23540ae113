"""Averages of the replicas' buffers: what is equal everywhere keeps its bits."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from sparkdl.slices.reduce import merge_buffers
from sparkdl.slices.section import Section
from sparkdl.slices.spec import Fragment, SliceSpec

INF, NAN = float("inf"), float("nan")


def plan_of(*fragments: Fragment) -> SliceSpec:
    return SliceSpec(0, 0, max(fragment.stop for fragment in fragments), fragments)


AVERAGE = plan_of(Fragment(0, "parameter", 0, 2), Fragment(1, "average", 4, 3))
"""Two parameters and two elements of padding before the buffer."""


def contributions(
    buffers: list[list[float]], weights: list[float], dtype: torch.dtype = torch.float32
) -> list[Section]:
    gradient = torch.full((2,), NAN, dtype=dtype)
    return [
        Section(replica, weight, gradient, torch.tensor(row, dtype=dtype))
        for replica, (row, weight) in enumerate(zip(buffers, weights, strict=True))
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def merged(items: list[Section], plan: SliceSpec = AVERAGE) -> torch.Tensor:
    weights = torch.full((plan.length,), 9.0, dtype=items[0].buffers.dtype)
    merge_buffers(plan, items, weights)
    return weights


def test_floats_are_averaged_by_counts_and_parameters_left_alone() -> None:
    items = contributions([[1, 2, 4], [5, 6, 8]], [1, 3])
    assert merged(items).tolist() == [9.0, 9.0, 9.0, 9.0, 4.0, 5.0, 7.0]


def test_no_weight_at_all_leaves_those_of_the_first_replica() -> None:
    """A batch whose samples all have weight 0."""
    items = contributions([[1, 2, 4], [5, 6, 8]], [0, 0])
    assert merged(items)[4:].tolist() == [1.0, 2.0, 4.0]


EQUAL = [0.1, -0.0, 0.0, 1e-45, 3.4e38, INF, -INF]


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 7], [1, 2, 3, 5, 7]])
def test_what_is_equal_everywhere_keeps_its_bits(counts: list[int]) -> None:
    """A constant buffer (a mask of -inf, a position table) must not drift over the iterations."""
    plan = plan_of(Fragment(0, "average", 0, len(EQUAL)))
    items = contributions([EQUAL] * len(counts), counts)
    assert bits(merged(items, plan)) == bits(torch.tensor(EQUAL))


@pytest.mark.parametrize("rows", [[[NAN] * 3, [NAN] * 3], [[1.0] * 3, [NAN] * 3]])
def test_nan_stays_to_be_seen(rows: list[list[float]]) -> None:
    assert merged(contributions(rows, [1, 1]))[4:].isnan().all()


def test_buffers_merge_in_replica_order() -> None:
    items = contributions([[1e8, 1, 0.1], [-1e8, 2, 0.2], [1, 3, 0.3]], [1, 2, 3])
    expected = bits(merged(items))
    for arrival in itertools.permutations(items):
        assert bits(merged(list(arrival))) == expected


def test_exact_buffers_come_from_the_first_replica() -> None:
    """Their bits, whatever floats they would be: counters, masks, even the bits of a NaN."""
    patterns = [0x7FA00001, 0x00000001, 0xFFFFFFFF, 0x80000000]
    plan = plan_of(Fragment(0, "exact", 0, 4))
    first = torch.frombuffer(bytearray(struct.pack("<4I", *patterns)), dtype=torch.float32)
    nothing = torch.empty(0)
    items = [
        Section(5, 1, nothing, torch.zeros(4)),
        Section(2, 1, nothing, first),  # replicas 0 and 1 had no samples
        Section(7, 100, nothing, torch.ones(4)),
    ]
    assert struct.unpack("<4I", bits(merged(items, plan))) == tuple(patterns)
