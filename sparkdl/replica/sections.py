"""The sections of a replica: their layout, and writing what the replica computed into them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparkdl.codec.packed import TensorSpec, copy_packed, specs_of
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.step import ReplicaResult
from sparkdl.slices.section import (
    Section,
    SectionLayout,
    cut_rows,
    first_not_finite,
    open_section,
    section_nbytes,
    write_gradients,
)
from sparkdl.slices.spec import SliceSpec


def section_maps(
    live: LiveReplica, plans: Sequence[SliceSpec], outcome: ReplicaResult
) -> list[SectionLayout]:
    """Return the layout of each slice's section for this outcome."""
    wire = live.recipe.options.wire_dtype or live.flat.layout.dtype
    arrays = {
        name: str(array.dtype).removeprefix("torch.") for name, array in outcome.arrays.items()
    }
    return [
        SectionLayout(
            wire,
            {
                fragment.number: len(
                    cut_rows(fragment, outcome.gradients.tables[fragment.number])[0]
                )
                for fragment in plan.tables
                if fragment.number in outcome.gradients.tables
            },
            arrays,
            _specs(plan, outcome),
        )
        for plan in plans
    ]


def _specs(plan: SliceSpec, outcome: ReplicaResult) -> tuple[TensorSpec, ...] | None:
    """Return the specs of the compressed gradients of a slice."""
    if outcome.compressed is None:
        return None
    numbers = [p.number for p in plan.parameters if p.number in outcome.compressed]
    return specs_of({number: outcome.compressed[number] for number in numbers})


def sections_nbytes(
    live: LiveReplica, plans: Sequence[SliceSpec], maps: Sequence[SectionLayout]
) -> list[int]:
    """Return the number of bytes of each slice's section."""
    dtype = live.flat.layout.dtype
    return [section_nbytes(plan, dtype, section) for plan, section in zip(plans, maps, strict=True)]


@torch.no_grad()
def write_sections(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    maps: Sequence[SectionLayout],
    outcome: ReplicaResult,
    out: np.ndarray,
) -> list[Section]:
    """Write the sections into ``out``, uint8, except for gradients that are in them already."""
    layout = live.flat.layout
    buffers = live.flat.buffers()  # ignored without a weight
    sections, place = [], 0
    for plan, section, nbytes in zip(plans, maps, sections_nbytes(live, plans, maps), strict=True):
        opened = open_section(
            plan,
            layout.dtype,
            section,
            out[place : place + nbytes],
            weight=outcome.weight,
            absent=outcome.gradients.absent,
        )
        write_gradients(
            layout,
            plan,
            outcome.gradients.dense,
            outcome.gradients.tables,
            opened,
            outcome.gradients.written,
        )
        if opened.compressed is not None and outcome.compressed is not None:
            copy_packed(opened.compressed, outcome.compressed)
        start = plan.start + plan.buffers_start - layout.buffers_start
        opened.buffers.copy_(buffers[start : start + len(opened.buffers)])
        for name, array in outcome.arrays.items():
            opened.arrays[name].copy_(array[plan.start : plan.start + plan.trainable_length])
        sections.append(opened)
        place += nbytes
    return sections


def not_finite(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    sections: Sequence[Section],
    outcome: ReplicaResult,
) -> str:
    """Return the name of a value in the sections that is inf or NaN, or an empty string."""
    if not np.isfinite(outcome.loss):
        return f"the loss ({outcome.loss})"
    known = outcome.gradients.not_finite
    if known is None:
        found = (first_not_finite(p, s) for p, s in zip(plans, sections, strict=True))
        number = next((n for n in found if n is not None), None)
    else:
        number = min(known, default=None)
    return "" if number is None else f'the gradient of "{live.flat.layout.segments[number].name}"'
