"""The mathematics of one slice: sum the gradients in replica order, average. Pure torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.sync.plan import SlicePlan


@dataclass(frozen=True)
class Contribution:
    """What replica ``replica`` sends for a slice: ``values`` (the slice's part of its flat vector:
    gradients, then buffers), its number of samples, and the parameters without a gradient."""

    replica: int
    count: int
    values: torch.Tensor
    absent: frozenset[int] = frozenset()


def reduce_gradients(
    plan: SlicePlan, contributions: Sequence[Contribution], out: torch.Tensor
) -> frozenset[int]:
    """The gradient of the mean loss over the global batch, into ``out`` (trainable length).

    Weighted by sample counts and summed in replica order, in the dtype of ``out``. Returns the
    numbers of the parameters that received no gradient from any replica.
    """
    ordered = sorted(contributions, key=lambda c: c.replica)
    total = sum(c.count for c in ordered)
    length = len(out)
    for i, item in enumerate(ordered):
        values, weight = item.values[:length], item.count / total
        if i == 0:
            torch.mul(values, weight, out=out)
        else:
            out.add_(values, alpha=weight)
    return frozenset.intersection(*[c.absent for c in ordered])


def merge_buffers(
    plan: SlicePlan, contributions: Sequence[Contribution], weights: torch.Tensor
) -> None:
    """Write the merged buffers into their places in ``weights`` (the slice of the flat vector).

    Floating ones: the average weighted by counts, taken as first + sum of weighted differences, so
    that what is equal on all replicas keeps its bits (infinities too). Others: the first replica's.
    """
    ordered = sorted(contributions, key=lambda c: c.replica)
    total = sum(c.count for c in ordered)
    for piece in plan.pieces:
        if piece.kind == "parameter":
            continue
        first = ordered[0].values[piece.start : piece.stop]
        merged = weights[piece.start : piece.stop]
        merged.copy_(first)
        if piece.kind == "average":
            for item in ordered[1:]:
                values = item.values[piece.start : piece.stop]
                # -0.0: adding it changes no bit, not even that of a -0.0
                difference = torch.where(values == first, -0.0, values - first)
                merged.add_(difference, alpha=item.count / total)
