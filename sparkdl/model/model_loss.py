"""Losses that are computed from inputs and labels together, and one over the rows of each replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ModelError, kind_of

IGNORED = -100
"""The label that torch's losses, and those of transformers' models, ignore by default."""


class OwnLoss(ABC):
    """A loss that needs the model's inputs and labels together, not only its output.

    It is called with what :meth:`returned` returned.
    """

    @abstractmethod
    def returned(
        self,
        model: Callable[..., Any],
        call: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """Run the model on a mini-batch, and return the argument of the loss.

        Args:
            model: The model.
            call: The model as a function of its inputs by position.
            inputs: The inputs.
            targets: The labels.
        """

    @abstractmethod
    def __call__(self, output: Any, target: Any = ()) -> Any:
        """Return the loss: a mean, or ``(sum, count)``."""


@dataclass(frozen=True)
class ModelLoss(OwnLoss):
    """``loss=sparkdl.ModelLoss()``: the model gets its labels and computes its own loss.

    The models of ``transformers`` do this. The loss is the model's return value, if that is one
    number; or its attribute or key ``loss``; or the one number in a tuple. It must be a mean over
    the labels: replicas are averaged by their numbers of labels.
    """

    labels: str | Sequence[str] | None = "labels"
    """The keyword by which the model takes its label, or one for each of several labels.

    None: labels follow the inputs by position, ``model(x, label)``.
    """
    loss: Callable[[Any], Any] | None = None
    """A function of the model's return value that returns its loss: the mean, or ``(sum, count)``."""
    count: Callable[[Any], Any] | None = None
    """A function of the label (a tuple, if there are several) that returns how many terms the mean has.

    None: for integer labels, the number of labels other than -100, without the first of each row if the
    model returns the output of a causal language model of transformers; otherwise the rows.
    """

    @property
    def names(self) -> tuple[str, ...] | None:
        """Return the keywords of the labels, or None if they have none."""
        if self.labels is None:
            return None
        return (self.labels,) if isinstance(self.labels, str) else tuple(self.labels)

    def returned(
        self,
        model: Callable[..., Any],
        call: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """Call the model with its inputs and labels."""
        if self.names is None:
            return call(*inputs, *targets)
        return call(*inputs, **dict(zip(self.names, targets, strict=True)))

    def __call__(self, output: Any, target: Any = ()) -> Any:
        """Return the loss in the model's return value: a mean, or ``(sum, count)``."""
        found = _found(output) if self.loss is None else self.loss(output)
        if isinstance(found, tuple):  # (sum, count), from the user's function
            return found
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ModelError(
                f"the model's own loss is {shape}, not one number: pass "
                "sparkdl.ModelLoss(loss=function), a function that computes the mean, or (sum, "
                "count), from what the model returns."
            )
        found = found.reshape(())
        count = self.count(target) if self.count is not None else _counted(output, target)
        if count is None:
            return found
        number = float(torch.as_tensor(count).double().sum())
        # the mean of nothing is NaN, and its sum is 0
        return (found * number if number else found.nan_to_num() * 0.0), number


@dataclass(frozen=True)
class PerReplica:
    """``loss=sparkdl.PerReplica(loss)``: ``loss`` of the rows that a replica has at a time.

    Replicas are averaged by their rows, as in DistributedDataParallel. This is for a loss in which
    rows depend on each other, such as one with negatives from the batch. The result then depends on
    ``replicas`` and ``accumulate``.
    """

    loss: Callable[..., Any]
    """A function of (output, target), a :class:`ModelLoss`, or the function of ``Trainer(step=)``."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call ``loss``."""
        return self.loss(*given, **named)


def inner(loss: Any) -> Any:
    """Return the loss inside a :class:`PerReplica`; return any other loss itself."""
    return loss.loss if isinstance(loss, PerReplica) else loss


def is_own_loss(loss: Any) -> bool:
    """Return whether the loss is computed from inputs and labels together."""
    return isinstance(inner(loss), OwnLoss)


def _found(output: Any) -> Any:
    """Return the loss in a model's return value."""
    if isinstance(output, torch.Tensor):
        return output
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)):
        alone = [t for t in output if isinstance(t, torch.Tensor) and t.ndim == 0]
        found = alone[0] if len(alone) == 1 else None
    if found is None:
        raise ModelError(
            f"no loss was found in what the model returned, {kind_of(output)}: it must be one "
            "number, have an attribute or key named loss, or be a tuple with one number in it. "
            "Otherwise pass sparkdl.ModelLoss(loss=function), a function that returns the loss "
            "from it."
        )
    return found


def _counted(output: Any, target: Any) -> torch.Tensor | None:
    """Return how many labels the mean in a model's return value is over, or None for its rows."""
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    # in a causal model's loss each label belongs to the position before it
    shifts = target.ndim > 1 and "CausalLM" in type(output).__name__
    return ((target[:, 1:] if shifts else target) != IGNORED).sum()
