"""Slices: they cover the flat vector exactly, are aligned, and their pieces make up the segments."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.model.flat import Layout, TensorRange
from sparkdl.slices.spec import slice_specs

KINDS = ("parameter", "parameter", "average", "exact")
quick = settings(deadline=None, max_examples=50)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Segments as :func:`layout_of` places them: aligned; dense parameters, tables, buffers; empty
    ones too."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    step = ALIGNMENT // dtype.itemsize
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(1, 9)), min_size=1)
    )
    segments, position = [], 0
    for kind, length, width in sorted(sizes, key=lambda size: size[0]):
        shape = (length // width, width) if kind == 1 else (length,)
        length = shape[0] * (width if kind == 1 else 1)
        name = f"s{len(segments)}"
        segments.append(
            TensorRange(name, KINDS[kind], position, length, shape, dtype, sparse=kind == 1)
        )
        position += -(-length // step) * step
    return Layout(tuple(segments), dtype, position)


both = st.booleans()


@quick
@given(layouts(), st.integers(1, 12))
def test_slices_are_aligned_outside_tables_and_of_nearly_equal_length(
    layout: Layout, slices: int
) -> None:
    step = ALIGNMENT // layout.dtype.itemsize
    plans = slice_specs(layout, slices)
    tables = [s for s in layout.segments if s.sparse]
    for plan in plans:
        inside = [s for s in tables if s.start < plan.start < s.stop]
        assert inside or plan.start % step == 0
    lengths = [plan.length for plan in plans]
    # a cut is at most a row (or a block) before its ideal place, or the padding of a table after it
    moved = max([step, *(s.shape[1] for s in tables)]) + step
    assert max(lengths) - min(lengths) <= (2 * moved if tables else step)


@quick
@given(layouts(), st.integers(1, 12), both)
def test_slices_cover_the_vector_and_their_pieces_the_segments(
    layout: Layout, slices: int, whole: bool
) -> None:
    plans = slice_specs(layout, slices, whole)
    assert [plan.index for plan in plans] == list(range(slices))
    assert (plans[0].start, plans[-1].stop) == (0, layout.size)
    assert all(one.stop == other.start for one, other in itertools.pairwise(plans))
    fragments = [(plan, fragment) for plan in plans for fragment in plan.fragments]
    for plan, fragment in fragments:
        segment = layout.segments[fragment.number]
        assert (fragment.kind, fragment.sparse) == (segment.kind, segment.sparse)
        assert 0 <= fragment.start <= fragment.stop <= plan.length
    for number, segment in enumerate(layout.segments):
        spans = [(w.start + p.start, w.start + p.stop) for w, p in fragments if p.number == number]
        covered = list(itertools.chain.from_iterable(range(*span) for span in spans))
        assert covered == list(range(segment.start, segment.stop))
        assert len(spans) <= (1 if whole or not segment.length else slices)


@quick
@given(layouts(), st.integers(1, 12), both)
def test_pieces_have_the_shape_of_what_they_are_and_tables_count_their_rows(
    layout: Layout, slices: int, whole: bool
) -> None:
    rows: dict[int, list[int]] = {n: [] for n, s in enumerate(layout.segments) if s.sparse}
    fragments = [p for plan in slice_specs(layout, slices, whole) for p in plan.fragments]
    for fragment in fragments:
        segment = layout.segments[fragment.number]
        if segment.sparse:
            assert fragment.shape[0] * fragment.shape[1] == fragment.length
            assert fragment.shape[1] == segment.shape[1]
            first = fragment.first_row
            rows[fragment.number] += range(first, first + fragment.shape[0])
        else:
            assert fragment.shape == (segment.shape if fragment.length == segment.length else ())
    assert all(rows[n] == [*range(layout.segments[n].shape[0])] for n in rows)


@quick
@given(layouts(), st.integers(1, 12), both)
def test_lengths_end_with_the_last_element_of_their_kind(
    layout: Layout, slices: int, whole: bool
) -> None:
    def elements(sparse: tuple[bool, ...]) -> set[int]:
        return {
            i
            for s in layout.segments
            if s.kind == "parameter" and s.sparse in sparse
            for i in range(s.start, s.stop)
        }

    trainable, dense = elements((False, True)), elements((False,))
    for plan in slice_specs(layout, slices, whole):
        filled = [p for p in plan.fragments if p.length]
        if len(filled) < len(plan.fragments):
            continue  # an empty tensor has a place, and no element
        for own, length in ((trainable, plan.trainable_length), (dense, plan.dense_length)):
            inside = [i - plan.start for i in own if plan.start <= i < plan.stop]
            assert length == max(inside, default=-1) + 1
        assert plan.dense_length <= plan.trainable_length <= plan.buffers_start <= plan.length
