"""The loss of a mini-batch: a mean, plain or weighted by sample, or a sum with its count.

A mean of means is the mean over all rows only if each counts in proportion to its number of
terms. For a plain loss these are samples. A loss that is a mean over something else, such as
tokens or pairs, returns ``(sum, count)``, and the sums and counts of several mini-batches are
added up.
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
"""A callable that returns a mean, or ``(sum, count)``."""
OF_CLASSES = (nn.functional.cross_entropy, nn.functional.nll_loss)
_FORWARD = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


class NoValuePerSample(ValueError):
    """The loss cannot be weighted, because it does not give a value for each sample."""


def call_loss(loss: Loss, output: object, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Call ``loss(output, target)``, or ``loss(output)`` without a label.

    Several labels become one tuple.
    """
    if not targets:
        return loss(output)
    return loss(output, targets[0] if len(targets) == 1 else tuple(targets))


@dataclass(frozen=True)
class ClassLoss:
    """The averaging rule of a loss on class numbers."""

    ignored: int  # the label that does not count
    weight: torch.Tensor | None
    averages: bool  # the loss takes a mean

    @staticmethod
    def of(loss: Loss) -> ClassLoss | None:
        """Return the rule of CrossEntropyLoss, NLLLoss, their functions, and partials of these.

        Return None for any other loss; its mean is assumed to be over the samples.
        """
        loss = inner(loss)
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            if type(loss).forward not in _FORWARD:  # a subclass may do otherwise
                return None
            return ClassLoss(loss.ignore_index, loss.weight, loss.reduction == "mean")
        function, given = unwrapped(loss)
        if function not in OF_CLASSES:
            return None
        averages = given.get("reduction", "mean") == "mean"
        return ClassLoss(given.get("ignore_index", -100), given.get("weight"), averages)

    def masses(self, target: torch.Tensor) -> torch.Tensor:
        """Return the mass of each row of ``target`` (class numbers, (rows, ...)): float64, (rows,).

        The mass is the sum of the class weights of the row's labels that are not ignored.
        """
        target = target.long().cpu()
        kept = (target != self.ignored).double()
        if self.weight is not None:
            table = self.weight.detach().cpu().double()
            kept *= table[target.clamp(0, len(table) - 1)]  # the loss reports invalid classes
        return kept.flatten(1).sum(1) if kept.ndim > 1 else kept


def masses_of(loss: Loss, targets: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return how much each sample counts in the mean of ``loss``, (rows,) float64 on the CPU.

    Return None if all count the same. See :class:`ClassLoss`.
    """
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
    """Return ``sum(w * l) / sum(w)`` over the samples, or 0 if nothing counts.

    ``torch.nn`` losses and functions with a ``reduction`` are called with "none"; any other loss
    must return a value for each sample. Values of shape (rows, ...) are first averaged over the
    other dimensions (summed for a reduction "batchmean"). With ``masses`` they are summed, and the
    divisor is ``sum(w * masses)``. Raise NoValuePerSample if the loss gives no such values.
    """
    return _weighted(loss, call_loss(unreduced(loss), output, targets), weights, masses)


def loss_of(
    loss: Loss,
    output: object,
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
    masses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float | None]:
    """Return the loss of some rows: (their mean, None), or the ``(sum, count)`` of the loss.

    The result of the loss is not checked here, see :func:`check_sum`. With ``weights``, the loss
    must return its sums and counts by row, or a value for each sample; else raise NoValuePerSample.
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
    """Return whether a loss returned ``(sum, count)``."""
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor)


def _added_up(found: Any) -> tuple[torch.Tensor, float]:
    total, count = found
    number = count.double().sum() if isinstance(count, torch.Tensor) else count
    return total if total.ndim == 0 else total.sum(), float(number)


def check_sum(found: tuple[Any, Any], rows: int) -> None:
    """Raise :class:`ModelError` if ``found`` cannot be the ``(sum, count)`` of ``rows`` rows."""
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
            f"the loss returned a pair, which stands for (sum, count), and {problem}: the sum must "
            "be one number or one for each row; the count must be the number of values (tokens, "
            "pairs, ...) in it, in the same shape, at least 0 and without a gradient."
        )


def _weighted(
    loss: Loss, values: Any, weights: torch.Tensor, masses: torch.Tensor | None
) -> torch.Tensor:
    """Average ``values``, the loss of each sample; see :func:`weighted_mean`."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != len(weights):
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise NoValuePerSample(f"the loss gave {found} for {len(weights)} samples")
    each = values.reshape(len(values), -1)
    if each.dtype in (torch.float16, torch.bfloat16):  # the weights, and so their sum, may be large
        each = each.float()
    weights = weights.to(each)
    if masses is None:
        rows = each.sum(dim=1) if reduction_of(loss) == "batchmean" else each.mean(dim=1)
        total, summed = weights.sum(), (rows * weights).sum()
    else:
        total, summed = (masses.to(each) * weights).sum(), (each.sum(dim=1) * weights).sum()
    return summed / torch.where(total == 0, torch.ones_like(total), total)


def unwrapped(loss: Loss) -> tuple[Any, dict[str, Any]]:
    """Return the function inside partials of keywords, and these keywords."""
    function: Any = inner(loss)
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        function, given = function.func, {**function.keywords, **given}
    return function, given


def reduction_of(loss: Loss) -> Any:
    """Return the ``reduction`` of the loss or of a partial of it, or None."""
    loss = inner(loss)
    return unwrapped(loss)[1].get("reduction", getattr(loss, "reduction", None))


def check_averages(loss: Loss, parts: str) -> None:
    """Raise :class:`ModelError` for a loss that sums: the losses of ``parts`` are averaged."""
    if reduction_of(loss) == "sum":
        raise ModelError(
            f'the loss adds up (reduction="sum"), but the losses of {parts} are averaged, each '
            'weighted by its samples: use reduction="mean", or return (sum, count) from your own '
            "function, where count is the number of values in the sum."
        )


def unreduced(loss: Loss) -> Loss:
    """Return ``loss`` without its ``reduction``, if it has one: it then gives one value a sample."""
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
