"""Cutting a slice into blocks that stay in cache while they are reduced and stepped.

A block is a slice of a slice: a :class:`SliceSpec` of its own, so what works on a slice works on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.codec.safe import mapped
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section
from sparkdl.slices.spec import Fragment, SliceSpec
from sparkdl.slices.state import SliceState

BLOCK_ELEMENTS = 1 << 20
"""Elements of a block. Measured on a core with 2 MiB of second-level cache and a large shared one:
smaller blocks lose more by their fixed cost (0.1 ms with Python's part cold) than they gain."""

GPU_BLOCK_ELEMENTS = 1 << 26
"""On a GPU: what its memory holds beside the slice. Not measured."""


def cut_blocks(plan: SliceSpec, elements: int = BLOCK_ELEMENTS) -> list[SliceSpec]:
    """``plan`` in blocks of at most ``elements`` elements, a multiple of 64; all of a small one.

    Only dense parameters are cut: tables and buffers make the last block.
    """
    assert elements % ALIGNMENT == 0
    if plan.length <= elements:
        return [plan]
    dense, end = [piece for piece in plan.parameters if not piece.sparse], plan.dense_length
    pieces: list[list[Fragment]] = [[] for _ in range(0, end, elements)]
    for piece in dense:
        for block in range(piece.start // elements, -(-piece.stop // elements)):
            pieces[block].append(_part(piece, block * elements, (block + 1) * elements))
    blocks = [
        _block(plan, start, min(start + elements, end), own)
        for start, own in zip(range(0, end, elements), pieces, strict=True)
    ]
    rest = [replace(p, start=p.start - end) for p in plan.pieces[len(dense) :]]
    return [*blocks, _block(plan, end, plan.length, rest)] if end < plan.length else blocks


def _block(plan: SliceSpec, start: int, stop: int, pieces: list[Fragment]) -> SliceSpec:
    return SliceSpec(plan.index, plan.start + start, plan.start + stop, tuple(pieces))


def _part(piece: Fragment, start: int, stop: int) -> Fragment:
    low, high = max(start, piece.start), min(stop, piece.stop)
    shape = piece.shape if high - low == piece.length else ()
    return replace(piece, start=low - start, length=high - low, shape=shape)


def block_of_state(
    plan: SliceSpec, block: SliceSpec, arrays_of: SliceState, rest_of: SliceState
) -> SliceState:
    """The block's part of a slice's state. Weights and arrays share memory with ``arrays_of``; what
    is kept of whole parameters is a copy of ``rest_of``'s, since each block of one steps it anew."""
    start, stop = block.start - plan.start, block.stop - plan.start
    numbers = [p.number for p in block.parameters if p.number in rest_of.others]
    return SliceState(
        arrays_of.weights[start:stop],
        {name: array[start:stop] for name, array in arrays_of.arrays.items()},
        {n: rest_of.held[n] for n in numbers},
        {n: mapped(rest_of.others[n], torch.Tensor, torch.clone) for n in numbers},
    )


def keep_block(plan: SliceSpec, block: SliceSpec, stepped: SliceState, whole: SliceState) -> None:
    """Put into ``whole`` what a step on a block's state, a part of it, has made besides."""
    start = block.start - plan.start
    for name, array in stepped.arrays.items():
        if name not in whole.arrays:
            length, home = plan.trainable_length, array.device
            whole.arrays[name] = torch.zeros(length, dtype=array.dtype, device=home)
        place = whole.arrays[name][start : start + len(array)]
        if place.data_ptr() != array.data_ptr():
            place.copy_(array)
    whole.held.update(stepped.held)
    whole.others.update(stepped.others)


def block_of_contribution(plan: SliceSpec, block: SliceSpec, whole: Section) -> Section:
    """The block's part of the gradients that a replica gives to a slice; shares memory."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return replace(whole, gradient=whole.gradient[start:stop], tables=tables)


def block_of_reduced(plan: SliceSpec, block: SliceSpec, whole: ReducedGradient) -> ReducedGradient:
    """The block's part of a slice's gradient; shares memory."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return ReducedGradient(whole.gradient[start:stop], whole.absent, tables)
