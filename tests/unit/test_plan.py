"""Slices: they cover the flat vector exactly, are aligned, and their pieces make up the segments."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.replica.flat import ALIGNMENT, Layout, Segment
from sparkdl.sync.plan import Piece, boundaries, slice_plans

KINDS = ("parameter", "average", "exact")
quick = settings(deadline=None, max_examples=100)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Segments as :func:`layout_of` places them: aligned, parameters first, empty ones too."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    step = ALIGNMENT // dtype.itemsize
    sizes = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), min_size=1))
    segments, position = [], 0
    for kind, length in sorted(sizes, key=lambda pair: pair[0]):
        segments.append(
            Segment(f"s{len(segments)}", KINDS[kind], position, length, (length,), dtype)
        )
        position += -(-length // step) * step
    return Layout(tuple(segments), dtype, position)


@quick
@given(layouts(), st.integers(1, 12))
def test_slices_cover_the_vector_exactly(layout: Layout, slices: int) -> None:
    plans = slice_plans(layout, slices)
    assert [plan.index for plan in plans] == list(range(slices))
    assert plans[0].start == 0
    assert plans[-1].stop == layout.size
    assert all(one.stop == other.start for one, other in itertools.pairwise(plans))
    assert all(plan.length >= 0 for plan in plans)


@quick
@given(layouts(), st.integers(1, 12))
def test_slices_are_aligned_and_of_nearly_equal_length(layout: Layout, slices: int) -> None:
    step = ALIGNMENT // layout.dtype.itemsize
    plans = slice_plans(layout, slices)
    assert all(plan.start % step == 0 for plan in plans)
    lengths = [plan.length for plan in plans]
    assert max(lengths) - min(lengths) <= step


@quick
@given(layouts(), st.integers(1, 12))
def test_pieces_partition_the_segments(layout: Layout, slices: int) -> None:
    pieces = [(plan, piece) for plan in slice_plans(layout, slices) for piece in plan.pieces]
    for plan, piece in pieces:
        assert piece.kind == layout.segments[piece.number].kind
        assert 0 <= piece.start < piece.stop <= plan.length
    for number, segment in enumerate(layout.segments):
        spans = [(w.start + p.start, w.start + p.stop) for w, p in pieces if p.number == number]
        covered = list(itertools.chain.from_iterable(range(*span) for span in spans))
        assert covered == list(range(segment.start, segment.stop))


@quick
@given(layouts(), st.integers(1, 12))
def test_trainable_length_ends_with_the_last_trainable_element(layout: Layout, slices: int) -> None:
    trainable = {
        i for s in layout.segments if s.kind == "parameter" for i in range(s.start, s.stop)
    }
    for plan in slice_plans(layout, slices):
        own = [i - plan.start for i in trainable if plan.start <= i < plan.stop]
        assert plan.trainable_length == max(own, default=-1) + 1


@quick
@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 64))
def test_boundaries_ascend_in_whole_blocks(size: int, slices: int, step: int) -> None:
    cuts = boundaries(size, slices, step)
    assert len(cuts) == slices + 1
    assert (cuts[0], cuts[-1]) == (0, size)
    assert cuts == sorted(cuts)
    assert all(cut % step == 0 for cut in cuts[:-1] if cut != size)


def test_a_segment_across_a_cut() -> None:
    layout = Layout(
        (
            Segment("weight", "parameter", 0, 40, (5, 8), torch.float32),
            Segment("mean", "average", 48, 5, (5,), torch.float32),
        ),
        torch.float32,
        64,
    )
    first, second = slice_plans(layout, 2)
    assert (first.start, first.stop, second.start, second.stop) == (0, 32, 32, 64)
    assert first.pieces == (Piece(0, "parameter", 0, 32),)
    assert second.pieces == (Piece(0, "parameter", 0, 8), Piece(1, "average", 16, 5))
    assert (first.trainable_length, second.trainable_length) == (32, 8)


@pytest.mark.parametrize("slices", [2, 5])
def test_more_slices_than_blocks_leave_some_empty(slices: int) -> None:
    layout = Layout((Segment("w", "parameter", 0, 3, (3,), torch.float32),), torch.float32, 16)
    plans = slice_plans(layout, slices)
    assert sorted(plan.length for plan in plans) == [0] * (slices - 1) + [16]
    assert sum(len(plan.pieces) for plan in plans) == 1
