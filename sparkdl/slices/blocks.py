"""Blocks of a slice that stay in the CPU cache while they are reduced and stepped.

A block is a slice of a slice. It has its own :class:`SliceSpec`, so all code that works on a slice
works on a block too.
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
"""The number of elements of a block on the CPU. Measured on a core with 2 MiB of second-level cache
and a large shared cache: smaller blocks lose more by their fixed cost (0.1 ms while Python's part
is not in cache) than they gain."""

GPU_BLOCK_ELEMENTS = 1 << 26
"""The number of elements of a block on a GPU. It limits the memory that an update needs in addition
to the slice. Not tuned by measurement."""


def cut_blocks(plan: SliceSpec, elements: int = BLOCK_ELEMENTS) -> list[SliceSpec]:
    """Cut a slice into blocks.

    Only dense parameters are cut: sparse tables and buffers together form the last block.
    """
    assert elements % ALIGNMENT == 0
    if plan.length <= elements:
        return [plan]
    dense, end = (
        [fragment for fragment in plan.parameters if not fragment.sparse],
        plan.dense_length,
    )
    fragments: list[list[Fragment]] = [[] for _ in range(0, end, elements)]
    for fragment in dense:
        for block in range(fragment.start // elements, -(-fragment.stop // elements)):
            fragments[block].append(_part(fragment, block * elements, (block + 1) * elements))
    blocks = [
        _block(plan, start, min(start + elements, end), own)
        for start, own in zip(range(0, end, elements), fragments, strict=True)
    ]
    rest = [replace(p, start=p.start - end) for p in plan.fragments[len(dense) :]]
    return [*blocks, _block(plan, end, plan.length, rest)] if end < plan.length else blocks


def _block(plan: SliceSpec, start: int, stop: int, fragments: list[Fragment]) -> SliceSpec:
    return SliceSpec(plan.index, plan.start + start, plan.start + stop, tuple(fragments))


def _part(fragment: Fragment, start: int, stop: int) -> Fragment:
    low, high = max(start, fragment.start), min(stop, fragment.stop)
    shape = fragment.shape if high - low == fragment.length else ()
    return replace(fragment, start=low - start, length=high - low, shape=shape)


def block_of_state(
    plan: SliceSpec, block: SliceSpec, arrays_of: SliceState, rest_of: SliceState
) -> SliceState:
    """Return the part of a slice's state that belongs to a block.

    Weights and arrays share the memory of ``arrays_of``. ``others`` are copied from ``rest_of``,
    because each block that has a fragment of a parameter steps them anew.
    """
    start, stop = block.start - plan.start, block.stop - plan.start
    numbers = [p.number for p in block.parameters if p.number in rest_of.others]
    return SliceState(
        arrays_of.weights[start:stop],
        {name: array[start:stop] for name, array in arrays_of.arrays.items()},
        {n: rest_of.held[n] for n in numbers},
        {n: mapped(rest_of.others[n], torch.Tensor, torch.clone) for n in numbers},
    )


def keep_block(plan: SliceSpec, block: SliceSpec, stepped: SliceState, whole: SliceState) -> None:
    """Copy into the slice's state ``whole`` what a step added to the state of one of its blocks."""
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


def block_of_section(plan: SliceSpec, block: SliceSpec, whole: Section) -> Section:
    """Return a block's part of a replica's section. It shares memory with the section."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return replace(whole, gradient=whole.gradient[start:stop], tables=tables)


def block_of_reduced(plan: SliceSpec, block: SliceSpec, whole: ReducedGradient) -> ReducedGradient:
    """Return a block's part of a reduced gradient. It shares memory with the gradient."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return ReducedGradient(whole.gradient[start:stop], whole.absent, tables)
