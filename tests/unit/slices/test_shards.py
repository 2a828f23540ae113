"""Shards to slices and back: nothing is lost, whatever the shapes and the number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl import DamagedCheckpoint
from sparkdl.engines.gang.shards import (
    for_shards,
    for_slice,
    layout_of_rows,
    nested_shards,
    parts_of,
    rows_of,
    spans_of,
    state_from,
    unpacked,
)
from sparkdl.model.flat import Layout, layout_of
from sparkdl.slices.slice_file import StoredSlice, reslice
from sparkdl.slices.spec import SliceState, slice_specs

shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5)


def layout_with(shapes: list[tuple[int, ...]], buffers: int) -> Layout:
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
    for number in range(buffers):
        module.register_buffer(f"b{number}", torch.zeros(3 + number, dtype=torch.float32))
    return layout_of(module)


def own_layout(shapes: list[tuple[int, ...]], buffers: int, ranks: int, rank: int) -> Layout:
    """Of what ``fully_shard`` leaves on a rank."""
    local: list[tuple[int, ...]] = []
    for shape in shapes:
        low, high = rows_of(*shape[:1], ranks, rank) if shape else (0, 1)
        local.append((high - low, *shape[1:]) if shape else ())
    return layout_with(local, buffers)


def state_of(layout: Layout, seed: int, average: bool) -> SliceState:
    """The whole state, numbers of its own everywhere; padding is zero."""
    generator = torch.Generator().manual_seed(seed)
    (whole,) = slice_specs(layout, 1)
    weights, moments = torch.zeros(layout.size), torch.zeros(whole.trainable_length)
    for segment in layout.segments:
        weights[segment.start : segment.stop].normal_(generator=generator)
        if segment.kind == "parameter":
            moments[segment.start : segment.stop].normal_(generator=generator)
    numbers = range(len(whole.parameters))
    arrays = {"exp_avg": moments}
    if average:
        arrays["sparkdl.ema"] = moments * 2
    return SliceState(
        weights,
        arrays,
        dict.fromkeys(numbers, ("exp_avg",)),
        {n: {"step": torch.tensor(float(n + 3))} for n in numbers},
    )


def same(one: SliceState, other: SliceState) -> None:
    assert torch.equal(one.weights, other.weights)
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert torch.equal(array, other.arrays[name]), name
    assert one.held == other.held
    assert one.others == other.others


@settings(max_examples=60)
@given(shapes, st.integers(0, 2), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_there_and_back(shapes, buffers, ranks, seed, average):
    layout = layout_with(shapes, buffers)
    (whole,) = slice_specs(layout, 1)
    expected = state_of(layout, seed, average)
    everything = StoredSlice(0, layout.size, whole.trainable_length, expected)
    slices = slice_specs(layout, ranks)
    spans = [spans_of(layout, nested_shards([(ranks, rank)]), range(99)) for rank in range(ranks)]
    cut = [reslice([everything], plan, layout.dtype) for plan in slices]
    sliced = [
        StoredSlice(plan.start, plan.stop, plan.trainable_length, state)
        for plan, state in zip(slices, cut, strict=True)
    ]
    back = []
    for rank in range(ranks):
        own = own_layout(shapes, buffers, ranks, rank)
        sent = [memoryview(for_shards(part, spans[rank])) for part in sliced]
        arrived = [part for data in sent for part in unpacked(data)]
        state = state_from(own, spans[rank], arrived, layout.dtype)
        rows = [rows_of(*shape[:1], ranks, rank) if shape else (0, 1) for shape in shapes]
        for number, (low, high) in enumerate(rows):
            segment, here = layout.segments[number], own.segments[number]
            for whole_of, part_of in (
                (expected.weights, state.weights),
                (expected.arrays["exp_avg"], state.arrays.get("exp_avg", torch.empty(0))),
            ):
                shape = segment.shape or (1,)
                wanted = whole_of[segment.start : segment.stop].view(shape)[low:high]
                assert torch.equal(part_of[here.start : here.stop].view(wanted.shape), wanted)
        told = [span for span in spans[rank] if not span.repeated]
        parts = list(parts_of(own, told, state))
        back.append([for_slice(told, parts, plan) for plan in slices])
    for n, (plan, wanted) in enumerate(zip(slices, cut, strict=True)):
        arrived = [part for source in back for part in unpacked(memoryview(source[n]))]
        found = reslice(arrived, plan, layout.dtype)
        if plan.length:
            same(found, wanted)


def test_a_part_that_is_missing_is_an_error():
    layout = layout_with([(4, 2)], 0)
    spans = spans_of(layout, nested_shards([(2, 0)]), range(99))
    with pytest.raises(DamagedCheckpoint, match="exactly once"):
        state_from(own_layout([(4, 2)], 0, 2, 0), spans, [], layout.dtype)


@given(st.integers(1, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_does(rows, ranks):
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    found = [high - low for low, high in (rows_of(rows, ranks, rank) for rank in range(ranks))]
    assert found == chunks + [0] * (ranks - len(chunks))


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_nested_rows_are_every_row_once_in_the_order_of_the_ranks(rows, sizes):
    places = itertools.product(*map(range, sizes))
    found = [nested_shards(list(zip(sizes, place, strict=True)))(rows) for place in places]
    assert [row for low, high in found for row in range(low, high)] == list(range(rows))


def test_the_layout_of_rows_has_no_others():
    layout = layout_with([(4, 2), (5,), (3, 3)], 6)
    found = layout_of_rows(layout, nested_shards([(2, 1)]), {0, 2})
    assert [s.shape for s in found.segments[:3]] == [(2, 2), (0,), (1, 3)]
    assert [s.length for s in found.segments[3:]] == [s.length for s in layout.segments[3:]]
    assert found.size - found.buffers_start == layout.size - layout.buffers_start


def test_every_rank_has_a_single_number_and_one_tells_it():
    layout = layout_with([(), (2, 3)], 0)
    for rank in range(3):
        found = spans_of(layout, nested_shards([(3, rank)]), {0})
        assert [(span.number, span.length, span.repeated) for span in found] == [(0, 1, rank > 0)]


def test_a_single_number_is_a_row():
    layout = layout_with([(), (2, 3), ()], 0)
    found = layout_of_rows(layout, nested_shards([]), {1, 2})
    assert [s.shape for s in found.segments] == [(0,), (2, 3), ()]
    assert [s.length for s in found.segments] == [0, 6, 1]
    spans = spans_of(layout, nested_shards([]), {1, 2})
    assert [span.number for span in spans] == [1, 2]
    assert [span.length for span in spans] == [6, 1]
