"""Between shards and slices: a state that is cut by rows of every parameter, and one cut end to end.

Under ``fully_shard`` rank r holds the r-th part of the rows of *each* parameter. Checkpoints,
snapshots and results are of *slices*: contiguous parts of the flat vector, which any other number of
ranks, strategy or engine can read. Both are intervals of the flat vector, so that one becomes the
other by cutting and sending. Pure torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sparkdl.replica.flat import Layout
from sparkdl.sync.plan import Piece, SlicePlan
from sparkdl.sync.state import SliceState
from sparkdl.train.checkpoint.slices import Part, recut, to_bytes, unpack

_LENGTH = struct.Struct("<q")


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the flat vector: ``length`` of parameter ``number``, then padding; or
    all buffers (None, and ``length`` is 0)."""

    number: int | None
    start: int
    stop: int
    length: int

    @property
    def plan(self) -> SlicePlan:
        """The span as a slice of its own."""
        return _plan(self.start, self.stop, self.length, self.number or 0)

    @property
    def known(self) -> int:
        """Elements that are no padding."""
        return self.stop - self.start if self.number is None else self.length


def _plan(start: int, stop: int, trainable: int, number: int = 0) -> SlicePlan:
    pieces = (Piece(number, "parameter", 0, trainable),) if trainable else ()
    return SlicePlan(0, start, stop, pieces)


def rows_of(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Which rows of a parameter a rank has, as ``torch.chunk`` cuts: [first, last)."""
    each = math.ceil(rows / ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def spans_of(layout: Layout, ranks: int, rank: int) -> list[Span]:
    """What rank ``rank`` has of the flat vector, in ascending order. The buffers every rank has."""
    found = []
    ends = [segment.start for segment in layout.segments[1:]] + [layout.size]
    for number, (segment, end) in enumerate(zip(layout.segments, ends, strict=True)):
        if segment.kind != "parameter" or not segment.length:
            continue
        width = math.prod(segment.shape[1:])
        low, high = (segment.start + row * width for row in rows_of(segment.shape[0], ranks, rank))
        if low < high:
            found.append(Span(number, low, end if high == segment.stop else high, high - low))
    if layout.buffers_start < layout.size:
        found.append(Span(None, layout.buffers_start, layout.size, 0))
    return found


def parts_of(own: Layout, spans: Sequence[Span], state: SliceState) -> Iterator[Part]:
    """A rank's state, span by span. ``own``: the layout of the rank's shards, and of ``state``."""
    for span in spans:
        start = _place(own, span)
        weights = torch.zeros(span.stop - span.start, dtype=state.weights.dtype)
        weights[: span.known] = state.weights[start : start + span.known]
        arrays = {
            name: array[start : start + span.length] if span.length else array[:0]
            for name, array in state.arrays.items()
        }
        yield Part(span.start, span.stop, span.length, _kept(span.number, weights, arrays, state))


def state_from(
    own: Layout, spans: Sequence[Span], parts: Sequence[Part], dtype: torch.dtype
) -> SliceState:
    """A rank's state out of parts that cover its spans; zero where there is no span."""
    state = SliceState(torch.zeros(own.size, dtype=dtype))
    trainable = max((s.stop for s in own.segments if s.kind == "parameter"), default=0)
    for span in spans:
        start = _place(own, span)
        within = [part for part in parts if part.start < span.stop and span.start < part.stop]
        found = recut(within, span.plan, dtype)
        state.weights[start : start + span.known] = found.weights[: span.known]
        for name, array in found.arrays.items():
            if name not in state.arrays:
                state.arrays[name] = torch.zeros(trainable, dtype=array.dtype)
            if span.length:
                state.arrays[name][start : start + span.length] = array
        state.held |= found.held
        state.others |= found.others
    return state


def _place(own: Layout, span: Span) -> int:
    return own.buffers_start if span.number is None else own.segments[span.number].start


def cut(part: Part, start: int, stop: int, number: int | None) -> Part | None:
    """What of ``part`` lies in [start, stop), with what is kept of parameter ``number``."""
    low, high = max(part.start, start), min(part.stop, stop)
    if low >= high:
        return None
    first, length = low - part.start, max(0, min(high, part.start + part.trainable_length) - low)
    arrays = {name: array[first : first + length] for name, array in part.state.arrays.items()}
    weights = part.state.weights[first : first + high - low]
    return Part(low, high, length, _kept(number, weights, arrays, part.state))


def _kept(
    number: int | None, weights: torch.Tensor, arrays: dict[str, torch.Tensor], state: SliceState
) -> SliceState:
    """With what ``state`` keeps of one parameter."""
    if number is None or number not in state.others:
        return SliceState(weights, arrays)
    held, others = {number: state.held[number]}, {number: state.others[number]}
    return SliceState(weights, arrays, held, others)


def for_slices(parts: Iterable[tuple[Span, Part]], slices: Sequence[SlicePlan]) -> list[bytes]:
    """What a rank sends to the owner of each slice."""
    known = list(parts)
    return [
        _packed(cut(part, plan.start, plan.stop, span.number) for span, part in known)
        for plan in slices
    ]


def for_shards(part: Part, spans: Sequence[Sequence[Span]]) -> list[bytes]:
    """What the owner of a slice sends to each rank. ``spans``: of every rank."""
    return [_packed(cut(part, s.start, s.stop, s.number) for s in of_rank) for of_rank in spans]


def _packed(parts: Iterable[Part | None]) -> bytes:
    """Safetensors files, each behind its length."""
    files = [
        to_bytes(_plan(part.start, part.stop, part.trainable_length), part.state)
        for part in parts
        if part is not None
    ]
    return b"".join(_LENGTH.pack(len(file)) + file for file in files)


def unpacked(data: bytes) -> Iterator[Part]:
    """What a rank was sent."""
    place = 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        yield unpack(data[place : place + length])
        place += length
