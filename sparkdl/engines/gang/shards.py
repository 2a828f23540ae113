"""Conversion between shards and slices.

Under ``fully_shard``, rank r holds the r-th part of the rows of *each* parameter, but for those that
are a single number, which every rank has. Checkpoints,
snapshots and results consist of *slices*: contiguous ranges of the flat vector, which any other
number of ranks, strategy or engine can read. Both are sets of intervals of the flat vector, so
converting between them means cutting intervals and sending the pieces. This module is pure torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from sparkdl.codec.packed import ALIGNMENT, join_files, split_files
from sparkdl.errors import DamagedCheckpoint
from sparkdl.model.layout import Layout, TensorRange
from sparkdl.slices.slice_file import StoredSlice, to_bytes, unpack
from sparkdl.slices.spec import Fragment, SliceSpec
from sparkdl.slices.state import SliceState


@dataclass(frozen=True)
class ShardRange:
    """A range [start, stop) of the flat vector: part of a parameter and padding, or all buffers."""

    number: int | None  # of the parameter; None: the buffers
    start: int
    stop: int
    length: int  # without the padding; 0 for the buffers
    repeated: bool = False

    @property
    def known(self) -> int:
        """Return the number of elements that are not padding."""
        return self.stop - self.start if self.number is None else self.length


def _plan(start: int, stop: int, trainable: int) -> SliceSpec:
    """Return an interval as a slice of its own."""
    fragments = (Fragment(0, "parameter", 0, trainable),) if trainable else ()
    return SliceSpec(0, start, stop, fragments)


def rows_of(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the rows [first, last) that a rank has, as ``torch.chunk`` splits a parameter."""
    each = math.ceil(rows / ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


RowsOf: TypeAlias = Callable[[int], tuple[int, int]]
"""A function from the number of rows of a parameter to the rows [first, last) that a rank has."""


def nested_shards(cuts: Sequence[tuple[int, int]]) -> RowsOf:
    """Return the rows of the r-th of n ranks, for a pair (n, r) of each split, outermost first."""

    def rows(count: int) -> tuple[int, int]:
        first, last = 0, count
        for ranks, rank in cuts:
            low, high = rows_of(last - first, ranks, rank)
            first, last = first + low, first + high
        return first, last

    return rows


def layout_of_rows(layout: Layout, rows: RowsOf, numbers: Collection[int]) -> Layout:
    """Return the layout of a rank's rows of the parameters ``numbers``, and of all buffers."""
    segments, position, step = [], 0, ALIGNMENT // layout.dtype.itemsize
    for number, segment in enumerate(layout.segments):
        if segment.kind == "parameter":
            low, high = _rows_of(segment, rows) if number in numbers else (0, 0)
            shape = (high - low, *segment.shape[1:]) if segment.shape or low == high else ()
            segment = replace(segment, start=position, length=math.prod(shape), shape=shape)
        else:
            segment = replace(segment, start=position)
        segments.append(segment)
        position += math.ceil(segment.length / step) * step
    return Layout(tuple(segments), layout.dtype, position)


def spans_of(layout: Layout, rows: RowsOf, numbers: Collection[int]) -> list[ShardRange]:
    """Return the ranges of the flat vector that a rank has, in ascending order."""
    found = []
    for number, (segment, end) in enumerate(zip(layout.segments, layout.ends, strict=True)):
        if segment.kind != "parameter" or not segment.length or number not in numbers:
            continue
        width = math.prod(segment.shape[1:])
        low, high = (segment.start + row * width for row in _rows_of(segment, rows))
        repeated = not segment.shape and rows(1) == (1, 1)
        if low < high:
            stop = end if high == segment.stop else high
            found.append(ShardRange(number, low, stop, high - low, repeated))
    return [*found, *_buffers_of(layout)]


def _rows_of(segment: TensorRange, rows: RowsOf) -> tuple[int, int]:
    """Return the rows of a parameter that a rank has. A single number is one row, which all have."""
    return rows(segment.shape[0]) if segment.shape else (0, 1)


def _buffers_of(layout: Layout) -> list[ShardRange]:
    if layout.buffers_start == layout.size:
        return []
    return [ShardRange(None, layout.buffers_start, layout.size, 0)]


def parts_of(own: Layout, spans: Sequence[ShardRange], state: SliceState) -> Iterator[StoredSlice]:
    """Yield a rank's state, one span after another."""
    for span in spans:
        start = _place(own, span)
        weights = state.weights[start : start + span.known]
        if span.known < span.stop - span.start:
            weights = torch.cat([weights, weights.new_zeros(span.stop - span.start - span.known)])
        arrays = {
            name: array[start : start + span.length] if span.length else array[:0]
            for name, array in state.arrays.items()
        }
        yield StoredSlice(
            span.start, span.stop, span.length, _kept(span.number, weights, arrays, state)
        )


def state_from(
    own: Layout, spans: Sequence[ShardRange], parts: Iterable[StoredSlice], dtype: torch.dtype
) -> SliceState:
    """Assemble a rank's state from parts, each of which lies in one of its spans.

    Each part is freed before the next is taken. Elements outside of all spans are zero. Parts that
    do not cover the spans exactly raise DamagedCheckpoint.
    """
    state = SliceState(torch.zeros(own.size, dtype=dtype))
    trainable = own.parameters_stop
    starts = [span.start for span in spans]
    covered, first = [0] * len(spans), dict.fromkeys(range(len(spans)), math.inf)
    for part in parts:
        k = bisect.bisect_right(starts, part.start) - 1
        span, place = spans[k], _place(own, spans[k]) + part.start - spans[k].start
        known = max(0, min(part.stop, span.start + span.known) - part.start)
        state.weights[place : place + known] = part.state.weights[:known]
        for name, array in part.state.arrays.items():
            if name not in state.arrays:
                state.arrays[name] = torch.zeros(trainable, dtype=array.dtype)
            state.arrays[name][place : place + known] = array[:known]
        covered[k] += part.stop - part.start
        if part.start < first[k]:  # values for the whole parameter come from its earliest part
            first[k] = part.start
            state.held.update(part.state.held)
            state.others.update(part.state.others)
    for span, length in zip(spans, covered, strict=True):
        if length != span.stop - span.start:
            raise DamagedCheckpoint(
                f"elements {span.start} to {span.stop} of the state did not come exactly once"
            )
    return state


def _place(own: Layout, span: ShardRange) -> int:
    return own.buffers_start if span.number is None else own.segments[span.number].start


def cut(part: StoredSlice, start: int, stop: int, number: int | None) -> StoredSlice | None:
    """Return the part of a stored slice that lies in a range, or None.

    It includes the state of parameter ``number`` that belongs to no single element.
    """
    low, high = max(part.start, start), min(part.stop, stop)
    if low >= high:
        return None
    first, length = low - part.start, max(0, min(high, part.start + part.trainable_length) - low)
    arrays = {name: array[first : first + length] for name, array in part.state.arrays.items()}
    weights = part.state.weights[first : first + high - low]
    return StoredSlice(low, high, length, _kept(number, weights, arrays, part.state))


def _kept(
    number: int | None, weights: torch.Tensor, arrays: dict[str, torch.Tensor], state: SliceState
) -> SliceState:
    """Return a state with the other values that ``state`` has for one parameter."""
    if number is None or number not in state.others:
        return SliceState(weights, arrays)
    held, others = {number: state.held[number]}, {number: state.others[number]}
    return SliceState(weights, arrays, held, others)


def for_slice(
    spans: Sequence[ShardRange], parts: Sequence[StoredSlice], plan: SliceSpec
) -> bytearray:
    """Pack the pieces that a rank sends to the owner of a slice."""
    return _packed(
        cut(part, plan.start, plan.stop, span.number)
        for span, part in zip(spans, parts, strict=True)
    )


def for_shards(part: StoredSlice, spans: Sequence[ShardRange]) -> bytearray:
    """Pack the pieces that the owner of a slice sends to a rank with these spans."""
    return _packed(cut(part, span.start, span.stop, span.number) for span in spans)


def _packed(parts: Iterable[StoredSlice | None]) -> bytearray:
    """Pack parts as safetensors files, each preceded by its length."""
    return join_files(
        to_bytes(_plan(part.start, part.stop, part.trainable_length), part.state)
        for part in parts
        if part is not None
    )


def unpacked(data: memoryview) -> Iterator[StoredSlice]:
    """Yield the parts that a rank was sent."""
    return map(unpack, split_files(data))
