"""The loss of a mini-batch: a mean, plain or weighted by sample, or a sum and what it is over.

A mean of means is the mean over all rows only where each counts as much as what it is over. Of a plain
loss that is its samples; a loss whose mean is over something else, such as tokens or pairs, returns
``(sum, count)``, and sums and counts of several mini-batches are added up.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ModelError, kind_of
from sparkdl.model.model_loss import inner

Loss = Callable[..., Any]
"""Returns a mean, or ``(sum, count)``."""
OF_CLASSES = (nn.functional.cross_entropy, nn.functional.nll_loss)
_FORWARD = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


class NoValuePerSample(ValueError):
    """The loss cannot be weighted: it does not give a value for each sample."""


def call_loss(loss: Loss, output: object, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """``loss(output, target)``; ``loss(output)`` without a label; a tuple for several labels."""
    if not targets:
        return loss(output)
    return loss(output, targets[0] if len(targets) == 1 else tuple(targets))


@dataclass(frozen=True)
class ClassLoss:
    """How a loss of class numbers takes its mean, if it ``averages``: without the label ``ignored``,
    and each of the others times the ``weight`` of its class, as far as there are any."""

    ignored: int
    weight: torch.Tensor | None
    averages: bool

    @staticmethod
    def of(loss: Loss) -> ClassLoss | None:
        """Of CrossEntropyLoss, NLLLoss, their functions and partials of these; None of any other loss,
        whose mean is taken to be that over the samples."""
        loss = inner(loss)
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            if type(loss).forward not in _FORWARD:  # of a subclass: it may do otherwise
                return None
            return ClassLoss(loss.ignore_index, loss.weight, loss.reduction == "mean")
        function, given = unwrapped(loss)
        if function not in OF_CLASSES:
            return None
        averages = given.get("reduction", "mean") == "mean"
        return ClassLoss(given.get("ignore_index", -100), given.get("weight"), averages)

    def masses(self, target: torch.Tensor) -> torch.Tensor:
        """What is kept of each row of ``target`` (class numbers, (rows, ...)): float64, (rows,)."""
        target = target.long().cpu()
        kept = (target != self.ignored).double()
        if self.weight is not None:
            table = self.weight.detach().cpu().double()
            kept *= table[target.clamp(0, len(table) - 1)]  # what is no class is the loss's to say
        return kept.flatten(1).sum(1) if kept.ndim > 1 else kept


def masses_of(loss: Loss, targets: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What each sample counts for in the mean of ``loss``, (rows,) float64 on the CPU; None: all the
    same. See :class:`ClassLoss`."""
    how = ClassLoss.of(loss)
    if how is None or not how.averages or len(targets) != 1 or targets[0].is_floating_point():
        return None
    return how.masses(targets[0])


def weighted_mean(
    loss: Loss,
    output: object,
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor,
    masses: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum(w * l) / sum(w)`` over the samples; ``weights``: (rows,).

    ``torch.nn`` losses and functions with a ``reduction`` are asked for "none"; any other loss must
    return a value for each sample. Values of shape (rows, ...) are averaged over the rest first (added
    up for a reduction "batchmean"); with ``masses``, of :func:`masses_of`, they are added up, and
    divided by ``sum(w * masses)``. Where nothing counts it is 0. Raises :class:`NoValuePerSample`.
    """
    return _weighted(loss, call_loss(unreduced(loss), output, targets), weights, masses)


def loss_of(
    loss: Loss,
    output: object,
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
    masses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float | None]:
    """The loss of some rows: (their mean, None), or what a loss returns as ``(sum, count)``.

    ``weights``: of each row, see :func:`weighted_mean`; sums and counts are then those of each row.
    What the loss returns is not looked through here, see :func:`check_sum`.
    """
    if weights is None:
        found = call_loss(loss, output, targets)
        return _added_up(found) if is_sum(found) else (found, None)
    found = call_loss(unreduced(loss), output, targets)
    if is_sum(found):
        for values in found:
            if not isinstance(values, torch.Tensor) or values.shape != weights.shape:
                raise NoValuePerSample(
                    f"the loss returned (sum, count) of all {len(weights)} samples together"
                )
        total, count = found
        wide = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        return _added_up((wide * weights.to(wide), count.double() * weights.to(count.device)))
    return _weighted(loss, found, weights, masses), None


def is_sum(found: object) -> bool:
    """Whether a loss returned ``(sum, count)``."""
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor)


def _added_up(found: Any) -> tuple[torch.Tensor, float]:
    total, count = found
    number = count.double().sum() if isinstance(count, torch.Tensor) else count
    return total if total.ndim == 0 else total.sum(), float(number)


def check_sum(found: tuple[Any, Any], rows: int) -> None:
    """Raise :class:`ModelError` for what cannot be the ``(sum, count)`` of so many rows."""
    total, count = found
    problem = ""
    if total.numel() != 1 and total.shape != (rows,):
        problem = f"the sum has shape {list(total.shape)}"
    elif isinstance(count, torch.Tensor):
        if count.numel() != 1 and count.shape != (rows,):
            problem = f"the count has shape {list(count.shape)}"
        elif count.requires_grad:
            problem = "the count has a gradient"
    elif isinstance(count, bool) or not isinstance(count, numbers.Real):
        problem = f"the count is {kind_of(count)}"
    if not problem:
        number = float(torch.as_tensor(count).double().min())
        if not (math.isfinite(number) and number >= 0):
            problem = f"the count is {number:g}"
    if problem:
        raise ModelError(
            f"the loss returned a pair, which stands for (sum, count), and {problem}: the sum is one "
            "number or one for each row, the count how many (tokens, pairs, ...) it is over, likewise, "
            "at least 0 and without a gradient."
        )


def _weighted(
    loss: Loss, values: Any, weights: torch.Tensor, masses: torch.Tensor | None
) -> torch.Tensor:
    """See :func:`weighted_mean`; ``values``: what the loss gave for each sample."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != len(weights):
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise NoValuePerSample(f"the loss gave {found} for {len(weights)} samples")
    each = values.reshape(len(values), -1)
    if each.dtype in (torch.float16, torch.bfloat16):  # weights may be large, and so their sum
        each = each.float()
    weights = weights.to(each)
    if masses is None:
        rows = each.sum(dim=1) if reduction_of(loss) == "batchmean" else each.mean(dim=1)
        total, summed = weights.sum(), (rows * weights).sum()
    else:
        total, summed = (masses.to(each) * weights).sum(), (each.sum(dim=1) * weights).sum()
    return summed / torch.where(total == 0, torch.ones_like(total), total)


def unwrapped(loss: Loss) -> tuple[Any, dict[str, Any]]:
    """The function that partials of keywords are of, and what they give."""
    function: Any = inner(loss)
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        function, given = function.func, {**function.keywords, **given}
    return function, given


def reduction_of(loss: Loss) -> Any:
    """Its ``reduction``, where it or a partial of it says one."""
    loss = inner(loss)
    return unwrapped(loss)[1].get("reduction", getattr(loss, "reduction", None))


def check_averages(loss: Loss, parts: str) -> None:
    """Raise :class:`ModelError` for a loss that adds up: the losses of ``parts`` are averaged."""
    if reduction_of(loss) == "sum":
        raise ModelError(
            f'the loss adds up (reduction="sum"), and the losses of {parts} are averaged, each '
            'weighted by its samples: use reduction="mean", or return (sum, count) from a function of '
            "your own, the count being what the mean is over."
        )


def unreduced(loss: Loss) -> Loss:
    """``loss`` with one value a sample, where it has a ``reduction`` to say so."""
    loss = inner(loss)
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        each = copy.copy(loss)
        vars(each)["reduction"] = "none"
        return each
    if _takes_reduction(loss):
        return _Unreduced(loss)
    return loss


class _Unreduced:
    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, *args: Any) -> torch.Tensor:
        return self.loss(*args, reduction="none")


def _takes_reduction(loss: Loss) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False
