"""The loss of a mini-batch: a mean, plain or weighted by sample."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Loss = Callable[..., torch.Tensor]


class NoValuePerSample(ValueError):
    """The loss cannot be weighted: it does not give a value for each sample."""


def call_loss(loss: Loss, output: object, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """``loss(output, target)``; ``loss(output)`` without a label; a tuple for several labels."""
    if not targets:
        return loss(output)
    return loss(output, targets[0] if len(targets) == 1 else tuple(targets))


def mass_of(loss: Loss, targets: Sequence[torch.Tensor]) -> float | None:
    """What the mean of ``loss`` is divided by, where that need not be the number of samples: the
    targets that CrossEntropyLoss and NLLLoss do not ignore, each times the weight of its class.

    None for any other loss.
    """
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss.reduction != "mean":
        return None
    if len(targets) != 1 or targets[0].is_floating_point():
        return None
    kept = targets[0][targets[0] != loss.ignore_index]
    return float(kept.numel() if loss.weight is None else loss.weight[kept].double().sum())


def weighted_mean(
    loss: Loss, output: object, targets: Sequence[torch.Tensor], weights: torch.Tensor
) -> torch.Tensor:
    """``sum(w * l) / sum(w)`` over the samples; ``weights``: (rows,), not all zero.

    ``torch.nn`` losses and functions with a ``reduction`` are asked for "none"; any other loss must
    return a value for each sample. Values of shape (rows, ...) are averaged over the rest first.
    Raises :class:`NoValuePerSample`.
    """
    values = call_loss(unreduced(loss), output, targets)
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != len(weights):
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise NoValuePerSample(f"the loss gave {found} for {len(weights)} samples")
    each = values.reshape(len(values), -1).mean(dim=1)
    weights = weights.to(each)
    return (each * weights).sum() / weights.sum()


def unreduced(loss: Loss) -> Loss:
    """``loss`` with one value a sample, where it has a ``reduction`` to say so."""
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
