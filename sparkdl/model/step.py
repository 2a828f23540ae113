"""A training step of the user: a function of module and batch that returns losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ModelError, kind_of
from sparkdl.model.loss import is_sum
from sparkdl.model.model_loss import OwnLoss, inner

LOSS = "loss"
"""The name of the loss that is minimized, where a step returns named losses."""
EXAMPLE = "examples/two_optimizers.py"
ALONE = (
    "A step returns one loss, by which all parameters are updated at once. Optimizers that take turns "
    f"(as in a GAN) need a loop of their own in sparkdl.gang.run: see {EXAMPLE}."
)
"""The message on what a step cannot do, and on what can."""


@dataclass(frozen=True)
class ReturnedLosses:
    """The result of a step on a mini-batch."""

    loss: Any  # to minimize: a mean over the rows, or (sum, count)
    losses: Mapping[str, Any]  # to show, each like loss
    output: Callable[[], Any]  # runs the model on the inputs alone, for metrics


@dataclass(frozen=True)
class StepLoss(OwnLoss):
    """The loss of ``Trainer(step=function)``."""

    function: Callable[[Any, dict[str, torch.Tensor]], Any]
    inputs: tuple[str, ...]
    labels: tuple[str, ...]

    def returned(
        self,
        model: Callable[..., Any],
        call: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> ReturnedLosses:
        """Call the function with the model and the batch, and look at the losses."""
        if len(inputs) != len(self.inputs):
            raise ModelError(
                f"step gets a batch by name, and {len(inputs)} inputs have {len(self.inputs)} names "
                f"({', '.join(self.inputs)}): name each, features=[...]."
            )
        batch = dict(zip((*self.inputs, *self.labels), (*inputs, *targets), strict=True))
        found = self.function(model, batch)
        named = dict(found) if isinstance(found, Mapping) else {LOSS: found}
        for name, value in named.items():
            _check(name, value, isinstance(found, Mapping))
        total = named.pop(LOSS, None)
        if total is None:
            total = _sum(named)
        return ReturnedLosses(total, named, lambda: call(*inputs))

    def __call__(self, output: ReturnedLosses, target: Any = ()) -> Any:
        """Return the loss that the step returned: a mean, or ``(sum, count)``."""
        return output.loss


def is_step(loss: Any) -> bool:
    """Return whether a loss is a step of the user, also one in :class:`sparkdl.PerReplica`."""
    return isinstance(inner(loss), StepLoss)


def named_losses(returned: Any, weight: float) -> dict[str, tuple[torch.Tensor, float]]:
    """Return (sum, count) of each named loss of a step; nothing for what any model returned.

    A mean counts by ``weight``, the number of rows.
    """
    if not isinstance(returned, ReturnedLosses):
        return {}
    found = {}
    for name, value in returned.losses.items():
        if is_sum(value):
            found[name] = value[0].detach().double().sum(), _count(value)
        else:
            found[name] = value.detach().double() * weight, weight
    return found


def output_of(returned: Any) -> Any:
    """Return what the model returns; after a step it runs now, on the inputs alone."""
    if not isinstance(returned, ReturnedLosses):
        return returned
    with torch.no_grad():
        return returned.output()


def _count(value: Any) -> float:
    return float(torch.as_tensor(value[1]).double().sum())


def _check(name: str, value: Any, named: bool) -> None:
    """Raise :class:`ModelError` if ``value`` is neither one number nor ``(sum, count)``."""
    if is_sum(value) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    shown = shown or kind_of(value)
    what = f'step returned for "{name}"' if named else "step returned"
    raise ModelError(
        f"{what} {shown}: it returns one number, the mean over the rows; or (sum, count), such as the "
        f"sum over tokens and their number; or a mapping of names to such losses. {ALONE}"
    )


def _sum(named: Mapping[str, Any]) -> Any:
    """Return the sum of named losses, of which none is called "loss"."""
    values = list(named.values())
    if not values:
        raise ModelError("step returned an empty mapping: it returns at least one loss.")
    sums = [value for value in values if is_sum(value)]
    if not sums:
        return sum(value.reshape(()) for value in values)
    if len(sums) == len(values) and len({_count(value) for value in sums}) == 1:
        return sum(value[0].sum() for value in values), _count(values[0])
    raise ModelError(
        f"step returned losses over different numbers of things ({', '.join(named)}), whose sum is no "
        f'mean that replicas can average: return one of them, or a mean over rows of each, as "{LOSS}" '
        "too; the others are then shown only."
    )
