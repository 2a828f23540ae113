"""Checks that replicas can average a loss: the loss of some rows must follow from that of two parts.

This holds if the loss is a mean over rows, or ``(sum, count)``. The losses are computed from the
same outputs, so neither batch norm nor dropout affects them. Only if the model computes its loss
itself does it run forward on each part, in evaluation mode.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.care.differences import DIFFERENCES
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import ModelError
from sparkdl.model.loss import Loss, ModelLoss, PerReplica, inner, is_own_loss, is_step, loss_of
from sparkdl.model.recipe import Recipe, Signature, with_tensors
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, evaluating

ROWS_OF_A_STEP = 6
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The allowed difference of the same sum in each dtype, relative to the largest compared number."""
ROUNDING_OF_16_BITS = 0.01


@dataclass(frozen=True)
class Sum:
    """The sum of a loss over some rows, and the number it is over (rows, tokens, ...)."""

    total: float
    count: float

    @property
    def mean(self) -> float:
        """The loss per counted item; 0 if nothing is counted."""
        return self.total / self.count if self.count else 0.0


Take = Callable[[np.ndarray, int], Sum]
"""A function that returns the loss of the rows with these numbers, with seeded random draws."""


def rounding_of(tensor: torch.Tensor) -> float:
    """Return the allowed difference for the dtype of a tensor."""
    return ROUNDING.get(tensor.dtype, ROUNDING_OF_16_BITS)


def sum_of(loss: Loss, output: Any, batch: MiniBatch) -> Sum:
    """Return the loss of a mini-batch as a sum and a count."""
    value, count = loss_of(loss, output, batch.targets, batch.weights, batch.masses)
    if count is not None:
        return Sum(float(value), count)
    weight = batch.weight
    return Sum(float(value) * weight if weight else 0.0, weight)


def losses_by_model(module: nn.Module, signature: Signature, loss: Loss, known: MiniBatch) -> Take:
    """Return a function that gives the loss that the model itself computes, in evaluation mode."""

    def take(numbers: np.ndarray, seed: int) -> Sum:
        some = known.rows(numbers)
        with evaluating(module), seeded(seed):
            output = signature.call_for_loss(loss, module, some.inputs, some.targets)
        return sum_of(loss, output, some)

    return take


def losses_of_output(
    loss: Loss, output: Any, known: MiniBatch, labels: Sequence[Rows]
) -> tuple[Take | None, float]:
    """Return a function that gives the loss of some rows of ``output``, and its relative rounding.

    The loss is computed in float64 if that works. The function is None if the rows of the output
    cannot be told apart.
    """
    tensors = list(leaves(output))
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return None, 0.0
    of_rows = [t for t in tensors if t.ndim]
    if not of_rows or any(t.is_nested or len(t) != len(known) for t in of_rows):
        return None, 0.0
    try:
        wide = copy.deepcopy(loss)
        wide = wide.double() if isinstance(wide, nn.Module) else wide
        targets = [_wide(target) for target in known.targets]
        take = _of_rows(
            wide, with_tensors(output, _wide), dataclasses.replace(known, targets=targets), labels
        )
        take(np.arange(len(known)), 0)
    except Exception:
        return _of_rows(loss, output, known, labels), max(map(rounding_of, of_rows))
    return take, ROUNDING[torch.float64]


def _of_rows(loss: Loss, output: Any, known: MiniBatch, labels: Sequence[Rows]) -> Take:
    """Return a function that gives the loss of some rows of ``output``.

    Labels of varying length are padded as in a mini-batch of these rows alone.
    """
    lengths = [target.shape[1] if target.ndim > 1 else 0 for target in known.targets]

    def take(numbers: np.ndarray, seed: int) -> Sum:
        chosen = torch.from_numpy(numbers)
        mine = with_tensors(output, lambda tensor: tensor[chosen] if tensor.ndim else tensor)
        some = known.rows(numbers)
        for rows, target, longest in zip(labels, some.targets, lengths, strict=True):
            length = target.shape[1] if longest else 0
            if isinstance(rows, Ragged) and length < longest:
                start = longest - length if rows.padding.side == "left" else 0
                mine = with_tensors(
                    mine, partial(_cut, longest=longest, length=length, start=start)
                )
        with seeded(seed):
            return sum_of(loss, mine, some)

    return take


def _cut(tensor: torch.Tensor, longest: int, length: int, start: int) -> torch.Tensor:
    """Return a tensor with the one dimension of the length ``longest`` cut to ``length``."""
    places = [d for d in range(1, tensor.ndim) if tensor.shape[d] == longest]
    return tensor.narrow(places[0], start, length) if len(places) == 1 else tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor in float64, and any other unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def leaves(output: Any) -> Iterator[Any]:
    """Yield the values inside nested dicts, tuples and lists, except for numbers and text."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        for value in output:
            yield from leaves(value)
    elif not isinstance(output, (int, float, str, type(None))):
        yield output


def rows_for_loss(loss: Loss, rows: Sequence[Rows], more: Sequence[Rows]) -> Sequence[Rows]:
    """Return the rows to check a loss on: more rows, if it is not one of torch's own.

    A step runs the model on each part of them, so it gets a few.
    """
    if is_step(loss):
        more = [field[:ROWS_OF_A_STEP] for field in more]
    elif is_own_loss(loss) or type(loss).__module__ == "torch.nn.modules.loss":
        return rows
    if isinstance(loss, PerReplica) or len(more[0]) <= len(rows[0]):
        return rows
    return more


def check_parts(
    module: nn.Module,
    recipe: Recipe,
    known: MiniBatch,
    output: Any,
    labels: Sequence[Rows],
    sums: bool,
    averaged: bool,
) -> None:
    """Raise ModelError if, with ``averaged``, the loss of all rows does not follow from its parts.

    ``output`` is the argument of the loss for ``known``, ``labels`` are not padded yet, and ``sums``
    says that the loss returns ``(sum, count)``, whose count is checked in any case.
    """
    loss = recipe.loss
    if not (averaged or sums) or len(known) < 2 or isinstance(loss, PerReplica):
        return
    with torch.no_grad(), seeded(recipe.seed):
        if is_own_loss(loss):
            take: Take | None = losses_by_model(module, recipe.signature, loss, known)
            rounding = rounding_of_module(module)
        else:
            take, rounding = losses_of_output(loss, output, known, labels)
        shown = None if take is None else _shown(take, len(known), rounding, sums)
        if shown is None or not (averaged or shown.kind == "no count"):
            return
        if isinstance(inner(loss), ModelLoss):
            shown = dataclasses.replace(shown, kind="a model's own loss")
    text = DIFFERENCES[shown.kind].sentence.format(
        rows=len(known),
        whole=shown.whole,
        together=shown.together,
        weight="count" if sums else "rows",
        word="step" if is_step(loss) else "loss",
    )
    if any(lengths.left for lengths in known.lengths if lengths is not None):
        text += (
            " Texts are padded on the left here: a loss that shifts its labels then takes in the "
            'padding\'s last place. Text(padding_side="right") avoids that.'
        )
    raise ModelError(text)


@dataclass(frozen=True)
class _Shown:
    """The loss of all rows compared with that of two parts."""

    whole: float
    together: float
    kind: str  # a key of DIFFERENCES


def _shown(take: Take, rows: int, rounding: float, sums: bool) -> _Shown | None:
    """Return how the loss of all rows differs from that of two parts.

    Return None if it does not differ, or if this cannot be found out.
    """
    everything = np.arange(rows)
    try:
        whole, again = take(everything, 0), take(everything, 1)
    except Exception:
        return None
    if sums and whole.total and not whole.count:
        return _Shown(whole.mean, whole.mean, "no count")
    if not math.isfinite(whole.mean) or _differ(whole.mean, again.mean, rounding):
        return None  # the loss draws random numbers, for example
    shown, adds_up, between, counts = None, not sums, True, not sums
    for one, other in _splits(everything):
        try:
            parts = take(one, 0), take(other, 0)
        except Exception:  # the loss accepts no single row
            continue
        means = [part.mean for part in parts if part.count]
        if not all(map(math.isfinite, means)):
            continue
        if not agree(whole, parts, rounding):
            shown = shown or added(parts)
        adds_up &= not _differ(whole.mean, sum(means), rounding, means)
        between &= bool(means) and min(means) <= whole.mean <= max(means)
        counts |= whole.count > max(part.count for part in parts)
    if shown is None:
        return None
    kind = "a sum" if adds_up else "another mean" if between and not sums else "depends"
    kind = "a sum that depends" if sums else kind
    return _Shown(whole.mean, shown.mean, kind if counts else "no count")


def _splits(rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return some ways to divide the rows into two parts."""
    half = len(rows) // 2
    found = [(rows[:half], rows[half:])]
    if len(rows) > 2:
        found += [(rows[::2], rows[1::2]), (rows[:1], rows[1:]), (rows[:-1], rows[-1:])]
    return found


def added(parts: Sequence[Sum]) -> Sum:
    """Return the loss of several parts together."""
    return Sum(sum(part.total for part in parts), sum(part.count for part in parts))


def agree(whole: Sum, parts: Sequence[Sum], rounding: float) -> bool:
    """Return whether the loss of all rows is that of its parts, but for rounding."""
    together, means = added(parts), [part.mean for part in parts if part.count]
    return not (
        _differ(whole.mean, together.mean, rounding, means)
        or _differ(whole.count, together.count, rounding)
    )


def _differ(one: float, other: float, rounding: float, parts: Sequence[float] = ()) -> bool:
    """Return whether two numbers differ by more than rounding."""
    return abs(one - other) > rounding * max(map(abs, (one, other, *parts)))


def rounding_of_module(module: nn.Module) -> float:
    """Return the allowed difference for a loss that a module computes."""
    rounding = max((rounding_of(p) for p in module.parameters()), default=ROUNDING_OF_16_BITS)
    return max(rounding, ROUNDING[torch.float32])
