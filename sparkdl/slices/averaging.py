"""What becomes of the replicas' weights and optimizer state after local steps. Pure torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.slices.reduce import ReducedGradient, shares_of
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState, unpack


def average(
    plan: SliceSpec, state: SliceState, moved: ReducedGradient, contributions: Sequence[Section]
) -> None:
    """After local steps: the mean of the replicas' weights, and of the optimizer state of those that
    had a gradient for a parameter; what has no mean is that of the first of these."""
    state.weights[: plan.dense_length].add_(moved.gradient)
    ordered = sorted(contributions, key=lambda c: c.replica)
    told = {c.replica: unpack(c.others) for c in ordered if c.others}
    for piece in plan.parameters:
        stepped = [
            c
            for c in ordered
            if c.replica in told
            and piece.number not in c.absent
            and piece.number in told[c.replica][1]
        ]
        if not stepped:
            continue
        held, others = told[stepped[0].replica]
        state.held[piece.number] = held[piece.number]
        state.others[piece.number] = others[piece.number]
        shares = shares_of([c.weight for c in stepped])
        for name in held[piece.number]:
            first = stepped[0].arrays[name]
            if name not in state.arrays:
                state.arrays[name] = torch.zeros_like(first, device=state.weights.device)
            place = state.arrays[name][piece.start : piece.stop]
            if not first.is_floating_point():
                place.copy_(first[piece.start : piece.stop])
                continue
            place.zero_()
            for c, share in zip(stepped, shares, strict=True):
                if name in c.arrays:
                    place.add_(c.arrays[name][piece.start : piece.stop], alpha=share)
