"""The loss of some rows of a batch, computed from the outputs of all of its rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.ragged import Ragged, Rows
from sparkdl.model.loss import Loss, loss_of
from sparkdl.model.recipe import Signature
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, evaluating

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


def _sum(loss: Loss, output: Any, batch: MiniBatch) -> Sum:
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
        return _sum(loss, output, some)

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
        return _of_rows(loss, output, known, labels), max(map(rounding_of, of_rows))
    return take, ROUNDING[torch.float64]


def _of_rows(loss: Loss, output: Any, known: MiniBatch, labels: Sequence[Rows]) -> Take:
    """Return a function that gives the loss of some rows of ``output``.

    Labels of varying length are padded as in a mini-batch of these rows alone.
    """
    lengths = [target.shape[1] if target.ndim > 1 else 0 for target in known.targets]

    def take(numbers: np.ndarray, seed: int) -> Sum:
        chosen = torch.from_numpy(numbers)
        mine = _mapped(output, lambda tensor: tensor[chosen] if tensor.ndim else tensor)
        some = known.rows(numbers)
        for rows, target, longest in zip(labels, some.targets, lengths, strict=True):
            length = target.shape[1] if longest else 0
            if isinstance(rows, Ragged) and length < longest:
                start = longest - length if rows.padding.side == "left" else 0
                mine = _mapped(mine, _Cut(longest, length, start))
        with seeded(seed):
            return _sum(loss, mine, some)

    return take


@dataclass(frozen=True)
class _Cut:
    """Cuts the one dimension of a tensor that has the length ``longest`` to ``length``."""

    longest: int
    length: int
    start: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        places = [d for d in range(1, tensor.ndim) if tensor.shape[d] == self.longest]
        return tensor.narrow(places[0], self.start, self.length) if len(places) == 1 else tensor


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
