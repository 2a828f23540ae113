"""Merging the replicas' buffers (running statistics, counters). Pure torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec


def merge_buffers(plan: SliceSpec, contributions: Sequence[Section], weights: torch.Tensor) -> None:
    """Write the merged buffers into their places in ``weights`` (the slice of the flat vector).

    Floating ones: the weighted average, taken as first + sum of weighted differences, so that what
    is equal on all replicas keeps its bits (infinities too). Others: the first replica's. A replica
    whose share weighs nothing has not been forward.
    """
    ordered = sorted(contributions, key=lambda c: c.replica)
    ordered = [c for c in ordered if c.weight] or ordered
    total = sum(c.weight for c in ordered)
    for piece in plan.pieces:
        if piece.kind == "parameter":
            continue
        place = slice(piece.start - plan.buffers_start, piece.stop - plan.buffers_start)
        first = ordered[0].buffers[place]
        merged = weights[piece.start : piece.stop]
        merged.copy_(first)
        if piece.kind == "average" and total:
            for item in ordered[1:]:
                values = item.buffers[place]
                # -0.0: adding it changes no bit, not even that of a -0.0
                difference = torch.where(values == first, -0.0, values - first)
                merged.add_(difference, alpha=item.weight / total)
