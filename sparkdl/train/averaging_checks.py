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
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.data.ragged import Ragged, Rows, dense
from sparkdl.errors import ModelError
from sparkdl.model.loss import Loss, call_loss, is_sum, loss_of, masses_of
from sparkdl.model.model_loss import ModelLoss, PerReplica, inner, is_own_loss
from sparkdl.model.recipe import Recipe
from sparkdl.model.signature import Signature
from sparkdl.model.step import StepLoss
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, evaluating, to_tensors, weigh

ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The allowed difference of the same sum in each dtype, relative to the largest compared number."""
ROUNDING_OF_16_BITS = 0.01
ROWS_OF_A_STEP = 6


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


@dataclass(frozen=True)
class Difference:
    """The loss of all rows compared with that of two parts.

    Attributes:
        whole: The mean loss of all rows.
        together: The mean loss put together from the two parts.
        kind: The kind of loss that would differ like this: "no count", "adds up", "another mean" or
            "depends".
    """

    whole: float
    together: float
    kind: str


def is_averaged(parallel: ParallelPlan, counts: Sequence[int], accumulate: int) -> bool:
    """Return whether the loss of a batch is put together from several mini-batches.

    Args:
        parallel: The plan of how ranks share the work.
        counts: The number of rows of each replica.
        accumulate: The number of micro-batches.
    """
    copies = [sum(counts[rank] for rank in group) for group in parallel.mesh.model_groups]
    return sum(map(bool, copies)) > 1 or accumulate > 1 or parallel.pipeline is not None


def rows_for_loss(loss: Loss, rows: Sequence[Rows], more: Sequence[Rows]) -> Sequence[Rows]:
    """Return the rows to check a loss on: more rows, if it is not one of torch's own.

    A step runs the model on each part of them, so it gets a few.

    Args:
        loss: The loss.
        rows: The rows that the model is tried on.
        more: These and some others.
    """
    if isinstance(inner(loss), StepLoss):
        more = [field[:ROWS_OF_A_STEP] for field in more]
    elif is_own_loss(loss) or type(loss).__module__ == "torch.nn.modules.loss":
        return rows
    if isinstance(loss, PerReplica) or len(more[0]) <= len(rows[0]):
        return rows
    return more


def gives_sums(
    module: nn.Module, recipe: Recipe, batch: Batch, labels: Sequence[Rows], averaged: bool
) -> bool:
    """Return whether the loss returns ``(sum, count)``.

    Args:
        module: A private copy of the model, which accepts the rows.
        recipe: The model, the loss and their options.
        batch: Some rows of the data, as in training.
        labels: The labels of these rows, not padded yet.
        averaged: True if the run averages the losses of several mini-batches.

    Raises:
        ModelError: The second number of the pair is not a count, or ``averaged`` is True and the
            loss of all rows does not follow from the losses of their parts.
    """
    loss, inputs, targets = recipe.loss, _tensors(batch.inputs), _tensors(batch.targets)
    own = None if batch.weights is None else torch.from_numpy(batch.weights)
    weights = weigh(targets, own, recipe.policy)
    known = MiniBatch(inputs, targets, weights, masses_of(loss, targets))
    with torch.no_grad(), seeded(recipe.seed):
        module.train()
        call, part = recipe.signature.call_for_loss, recipe.signature.for_loss
        output = part(loss, call(loss, module, inputs, targets))
        sums = is_sum(call_loss(loss, output, targets))
        if not (averaged or sums) or len(known) < 2 or isinstance(loss, PerReplica):
            return sums
        if is_own_loss(loss):
            take: Take | None = _of_model(module, recipe.signature, loss, known)
            rounding = max((_rounding(p) for p in module.parameters()), default=ROUNDING_OF_16_BITS)
            rounding = max(rounding, ROUNDING[torch.float32])
        else:
            take, rounding = _of_output(loss, output, known, labels)
        found = None if take is None else _difference(take, len(known), rounding, sums)
        if found is not None and (averaged or found.kind == "no count"):
            hint = ""
            if isinstance(inner(loss), ModelLoss):
                hint = _count_of_model(module, recipe.signature, loss, known, rounding)
            told = _message(found, len(known), sums, hint)
            if isinstance(inner(loss), StepLoss):
                told = told.replace(
                    "loss=sparkdl.PerReplica(loss)", "step=sparkdl.PerReplica(step)"
                )
            raise ModelError(told)
    return sums


def _tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return to_tensors(arrays, torch.device("cpu"))


def _rounding(tensor: torch.Tensor) -> float:
    return ROUNDING.get(tensor.dtype, ROUNDING_OF_16_BITS)


def _sum(loss: Loss, output: Any, batch: MiniBatch) -> Sum:
    """Return the loss of a mini-batch as a sum and a count."""
    value, count = loss_of(loss, output, batch.targets, batch.weights, batch.masses)
    if count is not None:
        return Sum(float(value), count)
    weight = batch.weight
    return Sum(float(value) * weight if weight else 0.0, weight)


def _of_model(module: nn.Module, signature: Signature, loss: Loss, known: MiniBatch) -> Take:
    """Return a function that gives the loss that the model itself computes, in evaluation mode."""

    def take(numbers: np.ndarray, seed: int) -> Sum:
        some = _rows(known, numbers)
        with evaluating(module), seeded(seed):
            output = signature.call_for_loss(loss, module, some.inputs, some.targets)
        return _sum(loss, output, some)

    return take


def _of_output(
    loss: Loss, output: Any, known: MiniBatch, labels: Sequence[Rows]
) -> tuple[Take | None, float]:
    """Return a function that gives the loss of some rows of ``output``, and its relative rounding.

    The loss is computed in float64 if that works. The function is None if the rows of the output
    cannot be told apart.
    """
    tensors = list(_leaves(output))
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return None, 0.0
    of_rows = [t for t in tensors if t.ndim]
    if not of_rows or any(len(t) != len(known) for t in of_rows):
        return None, 0.0
    try:
        wide = copy.deepcopy(loss)
        wide = wide.double() if isinstance(wide, nn.Module) else wide
        targets = [_wide(target) for target in known.targets]
        take = _of_rows(
            wide, _mapped(output, _wide), dataclasses.replace(known, targets=targets), labels
        )
        take(np.arange(len(known)), 0)
    except Exception:
        return _of_rows(loss, output, known, labels), max(map(_rounding, of_rows))
    return take, ROUNDING[torch.float64]


def _of_rows(loss: Loss, output: Any, known: MiniBatch, labels: Sequence[Rows]) -> Take:
    """Return a function that gives the loss of some rows of ``output``.

    Labels of varying length are padded as in a mini-batch of these rows alone.
    """
    lengths = [rows.padded().shape[1] if isinstance(rows, Ragged) else 0 for rows in labels]

    def take(numbers: np.ndarray, seed: int) -> Sum:
        chosen = torch.from_numpy(numbers)
        mine = _mapped(output, lambda tensor: tensor[chosen] if tensor.ndim else tensor)
        some = _rows(known, numbers)
        for n, padded in enumerate(dense([rows[numbers] for rows in labels])):
            length = padded.shape[1] if lengths[n] else 0
            if length < lengths[n]:
                some.targets[n] = some.targets[n][:, :length]
                mine = _mapped(mine, _Cut(lengths[n], length))
        with seeded(seed):
            return _sum(loss, mine, some)

    return take


@dataclass(frozen=True)
class _Cut:
    """Cuts the one dimension of a tensor that has the length ``longest`` to ``length``."""

    longest: int
    length: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        places = [d for d in range(1, tensor.ndim) if tensor.shape[d] == self.longest]
        return tensor.narrow(places[0], 0, self.length) if len(places) == 1 else tensor


def _rows(batch: MiniBatch, numbers: np.ndarray) -> MiniBatch:
    """Return the rows of a mini-batch with these numbers."""
    chosen = torch.from_numpy(numbers)
    return MiniBatch(
        [t[chosen] for t in batch.inputs],
        [t[chosen] for t in batch.targets],
        None if batch.weights is None else batch.weights[chosen],
        None if batch.masses is None else batch.masses[chosen],
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor in float64, and any other unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaves(output: Any) -> Iterator[Any]:
    """Yield the values inside nested dicts, tuples and lists, except for numbers and text."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        for value in output:
            yield from _leaves(value)
    elif not isinstance(output, (int, float, str, type(None))):
        yield output


def _mapped(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``output`` with ``change`` applied to every tensor in it."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        for name, value in output.items():
            changed[name] = _mapped(value, change)
        return changed
    if isinstance(output, (tuple, list)):
        values = [_mapped(value, change) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    return output


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
    "train with replicas=1 and accumulate=1, or take what each replica makes of its own rows, as "
    "torch's DDP does: loss=sparkdl.PerReplica(loss)."
)


def _message(found: Difference, rows: int, sums: bool, hint: str) -> str:
    told = (
        f"the loss of the first {rows} rows is {found.whole:.5g}, and {found.together:.5g} where it is "
        "put together from two parts of them as replicas and accumulate do, each part weighted by its "
        f"{'count' if sums else 'rows'}: "
    )
    if hint:
        return told + hint
    if found.kind == "no count":
        return (
            "the loss returned two values, which are taken as (sum, count), and the second one is no "
            "count: it does not grow with the rows. Return the loss alone (metrics belong into "
            f"Validation), or {_PAIR}."
        )
    if found.kind == "adds up":
        return f"{told}it adds up. Return its mean over the rows, or {_PAIR}."
    if found.kind == "another mean" and not sums:
        return (
            f"{told}it is no mean over the rows. If it is one over tokens, pairs or labels that are "
            f"not padding, {_PAIR}. If rows depend on each other in it, {_ALONE}"
        )
    return (
        f"{told}rows depend on each other in it, as with negatives from the batch, or it is no mean. "
        f"{'' if sums else f'If it is one over something else than rows, {_PAIR}. Else '}"
        f"{_ALONE if not sums else _ALONE[0].upper() + _ALONE[1:]}"
    )


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
                take = _of_model(module, signature, tried, known)
                try:
                    take(np.arange(len(known)), 0)
                except Exception:  # the labels have other dimensions
                    continue
                if _difference(take, len(known), rounding, sums=True) is None:
                    return f"its mean is over others. Give loss=sparkdl.ModelLoss(count={written})."
    return (
        "say how many numbers the mean is over with sparkdl.ModelLoss(count=function of the label). If "
        f"rows depend on each other in it, {_ALONE}"
    )
