"""The mathematics of one slice: sum the gradients in replica order, average, step. Pure torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.plan import SlicePlan


@dataclass(frozen=True)
class Contribution:
    """What replica ``replica`` sends for a slice: ``values`` (the slice's part of its flat vector:
    gradients, then buffers), its number of samples, and the parameters without a gradient."""

    replica: int
    count: int
    values: torch.Tensor
    absent: frozenset[int] = frozenset()


@dataclass
class SliceState:
    """The state of one slice in memory.

    ``weights``: the slice of the flat vector. ``arrays``: optimizer state that has one value for
    each element, by name, each of the slice's trainable length. ``scalars``: all other optimizer
    state (step counts), by parameter number and name.
    """

    weights: torch.Tensor
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[int, dict[str, Any]] = field(default_factory=dict)


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


def step_slice(
    plan: SlicePlan,
    state: SliceState,
    gradient: torch.Tensor,
    absent: frozenset[int],
    optimizer_plan: OptimizerPlan,
    hyperparameters: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """One optimizer step on the slice, in place in ``state``, which must be the caller's own copy.

    State that the optimizer makes on its first step is added to ``state.arrays``.
    """
    pieces = {p.number: p for p in plan.pieces if p.kind == "parameter"}
    tensors = {n: state.weights[p.start : p.stop] for n, p in pieces.items()}
    if not tensors:
        return
    optimizer = optimizer_plan.build(tensors, hyperparameters)
    for number, tensor in tensors.items():
        piece = pieces[number]
        tensor.grad = None if number in absent else gradient[piece.start : piece.stop]
        if number in state.scalars:
            arrays = {k: v[piece.start : piece.stop] for k, v in state.arrays.items()}
            optimizer.state[tensor] = {**arrays, **state.scalars[number]}
    optimizer.step()
    for number, tensor in tensors.items():
        piece = pieces[number]
        tensor.grad = None
        made = optimizer.state.get(tensor)
        if not made:
            continue
        scalars = state.scalars[number] = {}
        for name, value in made.items():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                array = state.arrays.get(name)
                if array is None:
                    array = state.arrays[name] = torch.zeros(
                        plan.trainable_length, dtype=value.dtype
                    )
                place = array[piece.start : piece.stop]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            else:
                scalars[name] = value
