"""Checks that replicas can average a loss: the loss of some rows must follow from that of two parts.

This holds if the loss is a mean over rows, or ``(sum, count)``. The losses are computed from the
same outputs, so neither batch norm nor dropout affects them. Only if the model computes its loss
itself does it run forward on each part, in evaluation mode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.data.ragged import Rows
from sparkdl.errors import ModelError
from sparkdl.model.loss import (
    Loss,
    ModelLoss,
    PerReplica,
    call_loss,
    inner,
    is_own_loss,
    is_step,
    is_sum,
    masses_of,
)
from sparkdl.model.recipe import Recipe, Signature, with_tensors
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, to_tensors, weigh
from sparkdl.train.row_losses import (
    ROUNDING,
    ROUNDING_OF_16_BITS,
    Sum,
    Take,
    losses_by_model,
    losses_of_output,
    rounding_of,
)

ROWS_OF_A_STEP = 6


@dataclass(frozen=True)
class Difference:
    """The loss of all rows compared with that of two parts."""

    whole: float
    together: float
    kind: str  # "no count", "adds up", "another mean" or "depends"


def is_averaged(parallel: ParallelPlan, counts: Sequence[int], accumulate: int) -> bool:
    """Return whether the loss of a batch is put together from several mini-batches."""
    return have_copies(parallel, counts) or accumulate > 1 or parallel.micro_batches > 1


def have_copies(parallel: ParallelPlan, counts: Sequence[int]) -> bool:
    """Return whether several copies of the model have rows, of which ``counts`` are each replica's."""
    copies = [sum(counts[rank] for rank in group) for group in parallel.mesh.model_groups]
    return sum(map(bool, copies)) > 1


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


def gives_sums(
    module: nn.Module, recipe: Recipe, batch: Batch, labels: Sequence[Rows], averaged: bool
) -> bool:
    """Return whether the loss returns ``(sum, count)``; ``labels`` are not padded yet.

    Raise ModelError if, with ``averaged``, the loss of all rows does not follow from those of their
    parts.
    """
    loss, inputs, targets = recipe.loss, to_tensors(batch.inputs), to_tensors(batch.targets)
    own = None if batch.weights is None else torch.from_numpy(batch.weights)
    weights = weigh(targets, own, recipe.options)
    known = MiniBatch(inputs, targets, weights, masses_of(loss, targets), batch.lengths)
    with torch.no_grad(), seeded(recipe.seed):
        call, part = recipe.signature.call_for_loss, recipe.signature.for_loss
        with torch.enable_grad():  # a forward or a step may compute gradients
            returned = call(loss, module, inputs, targets)
        output = with_tensors(part(loss, returned), torch.Tensor.detach)
        sums = is_sum(call_loss(loss, output, targets))
        if not (averaged or sums) or len(known) < 2 or isinstance(loss, PerReplica):
            return sums
        if is_own_loss(loss):
            take: Take | None = losses_by_model(module, recipe.signature, loss, known)
            rounding = max(
                (rounding_of(p) for p in module.parameters()), default=ROUNDING_OF_16_BITS
            )
            rounding = max(rounding, ROUNDING[torch.float32])
        else:
            take, rounding = losses_of_output(loss, output, known, labels)
        found = None if take is None else _difference(take, len(known), rounding, sums)
        if found is not None and (averaged or found.kind == "no count"):
            hint = ""
            if isinstance(inner(loss), ModelLoss):
                hint = _count_of_model(module, recipe.signature, loss, known, rounding)
            told = _message(found, len(known), sums, hint)
            if is_step(loss):
                told = told.replace(
                    "loss=sparkdl.PerReplica(loss)", "step=sparkdl.PerReplica(step)"
                )
            if any(known.left for known in batch.lengths if known is not None):
                told += (
                    " Texts are padded on the left here: a loss that shifts its labels then takes in "
                    'the padding\'s last place. Text(padding_side="right") avoids that.'
                )
            raise ModelError(told)
    return sums


def _difference(take: Take, rows: int, rounding: float, sums: bool) -> Difference | None:
    """Return how the loss of all rows differs from that of two parts.

    Return None if it does not differ, or if this cannot be found out.
    """
    everything = np.arange(rows)
    try:
        whole, again = take(everything, 0), take(everything, 1)
    except Exception:
        return None
    if sums and whole.total and not whole.count:
        return Difference(whole.mean, whole.mean, "no count")
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
        together = Sum(sum(p.total for p in parts), sum(p.count for p in parts))
        if _differ(whole.mean, together.mean, rounding, means) or _differ(
            whole.count, together.count, rounding
        ):
            shown = shown or together
        adds_up &= not _differ(whole.mean, sum(means), rounding, means)
        between &= bool(means) and min(means) <= whole.mean <= max(means)
        counts |= whole.count > max(part.count for part in parts)
    if shown is None:
        return None
    kind = "adds up" if adds_up else "another mean" if between else "depends"
    kind = kind if counts else "no count"
    return Difference(whole.mean, shown.mean, kind)


def _splits(rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return some ways to divide the rows into two parts."""
    half = len(rows) // 2
    found = [(rows[:half], rows[half:])]
    if len(rows) > 2:
        found += [(rows[::2], rows[1::2]), (rows[:1], rows[1:]), (rows[:-1], rows[-1:])]
    return found


def _differ(one: float, other: float, rounding: float, parts: Sequence[float] = ()) -> bool:
    """Return whether two numbers differ by more than rounding."""
    return abs(one - other) > rounding * max(map(abs, (one, other, *parts)))


_PAIR = "return both, (sum, count), such as ((losses * mask).sum(), mask.sum())"
_ALONE = (
    "train with replicas=1 and accumulate=1, or let each replica compute the loss of its own rows, "
    "as torch's DDP does: loss=sparkdl.PerReplica(loss)."
)


def _message(found: Difference, rows: int, sums: bool, hint: str) -> str:
    text = (
        f"the loss of the first {rows} rows is {found.whole:.5g}, and {found.together:.5g} when "
        "two parts of them are combined as replicas and accumulate do, each part weighted by its "
        f"{'count' if sums else 'rows'}: "
    )
    if hint:
        return text + hint
    if found.kind == "no count":
        return (
            "the loss returned two values, which stand for (sum, count), but the second one is not "
            "a count: it does not grow with the rows. Return the loss alone (metrics belong in "
            f"Validation), or {_PAIR}."
        )
    if found.kind == "adds up":
        return f"{text}it is a sum. Return its mean over the rows, or {_PAIR}."
    if found.kind == "another mean" and not sums:
        return (
            f"{text}it is not a mean over the rows. If it is a mean over tokens, pairs or labels "
            f"that are not padding, {_PAIR}. If it makes rows depend on each other, {_ALONE}"
        )
    text += "it makes rows depend on each other, as with negatives from the batch, or is no mean. "
    if sums:
        return text + _ALONE[0].upper() + _ALONE[1:]
    return f"{text}If it is a mean over something other than rows, {_PAIR}. Otherwise {_ALONE}"


_COUNTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "lambda labels: (labels != -100).sum()": lambda labels: (labels != -100).sum(),
    "lambda labels: (labels[:, 1:] != -100).sum()": lambda labels: (labels[:, 1:] != -100).sum(),
    "lambda labels: (labels != -1).sum()": lambda labels: (labels != -1).sum(),
    "lambda labels: (labels[:, 1:] != -1).sum()": lambda labels: (labels[:, 1:] != -1).sum(),
    "lambda labels: (labels != 0).sum()": lambda labels: (labels != 0).sum(),
    "lambda labels: (labels[:, 1:] != 0).sum()": lambda labels: (labels[:, 1:] != 0).sum(),
    "len": len,
}
"""Common counts of a model's mean, by the source text that an error message suggests."""


def _count_of_model(
    module: nn.Module, signature: Signature, loss: Loss, known: MiniBatch, rounding: float
) -> str:
    """Return the remedy for a model whose own loss is a mean over something else than is counted."""
    if len(known.targets) == 1:
        for written, count in _COUNTS.items():
            tried = dataclasses.replace(inner(loss), count=count)
            with torch.no_grad():
                take = losses_by_model(module, signature, tried, known)
                try:
                    take(np.arange(len(known)), 0)
                except Exception:  # the labels have other dimensions
                    continue
                if _difference(take, len(known), rounding, sums=True) is None:
                    return (
                        "its mean is over something else. Give "
                        f"loss=sparkdl.ModelLoss(count={written})."
                    )
    return (
        "say how many values the mean is over with sparkdl.ModelLoss(count=function of the label). "
        f"If it makes rows depend on each other, {_ALONE}"
    )
