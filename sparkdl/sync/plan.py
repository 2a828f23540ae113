"""Cutting the flat vector into N slices, and what each slice holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from sparkdl.replica.flat import ALIGNMENT, Layout


@dataclass(frozen=True)
class Piece:
    """The part of one segment that lies in a slice.

    ``number``: of the segment in the layout (trainable parameters come first, so it is their number
    too). ``start`` and ``length`` count elements from the start of the slice.
    """

    number: int
    kind: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SlicePlan:
    """Slice ``index``: elements [start, stop) of the flat vector, cut into pieces."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def trainable_length(self) -> int:
        """Elements up to the end of the last trainable piece; optimizer state is this long."""
        return max((p.stop for p in self.pieces if p.kind == "parameter"), default=0)


def boundaries(size: int, slices: int, step: int) -> list[int]:
    """``slices + 1`` ascending cut points of [0, size), multiples of ``step`` but for the last."""
    blocks = -(-size // step)
    return [min(size, blocks * n // slices * step) for n in range(slices)] + [size]


def slice_plans(layout: Layout, slices: int) -> list[SlicePlan]:
    """Cut ``layout`` into ``slices`` contiguous slices of nearly equal length (some may be empty)."""
    cuts = boundaries(layout.size, slices, ALIGNMENT // layout.dtype.itemsize)
    plans = []
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        pieces = []
        for number, segment in enumerate(layout.segments):
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                pieces.append(Piece(number, segment.kind, low - start, high - low))
        plans.append(SlicePlan(index, start, stop, tuple(pieces)))
    return plans
