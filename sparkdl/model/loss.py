"""The loss of a mini-batch: a mean, plain or weighted by sample, or a sum with its count.

A mean of means is the mean over all rows only if each counts in proportion to its number of
terms. For a plain loss these are samples. A loss that is a mean over something else, such as
tokens or pairs, returns ``(sum, count)``, and the sums and counts of several mini-batches are
added up.

Losses that are computed from inputs and labels together, and one over the rows of each replica.

A training step of the user: a function of module and batch that returns losses.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ModelError, kind_of, known_arguments

Call = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
IGNORED = -100
"""The label that torch's losses, and those of transformers' models, ignore by default."""


class OwnLoss(ABC):
    """A loss that needs the model's inputs and labels together, not only its output.

    It is called with what :meth:`returned` returned.
    """

    @abstractmethod
    def returned(self, model: Call, call: Call, inputs: Tensors, targets: Tensors) -> Any:
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


@known_arguments
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

    def returned(self, model: Call, call: Call, inputs: Tensors, targets: Tensors) -> Any:
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


@dataclass(frozen=True)
class MaskedLoss:
    """``loss=sparkdl.MaskedLoss(loss)``: the mean of ``loss`` over the labels that are there.

    A label is missing that is NaN or, of whole numbers, -100: see :class:`sparkdl.Masked`. Several
    labels are compared with the columns of one output, or each with its member of a tuple of outputs.
    """

    loss: Callable[..., Any]
    """A loss of torch, or a function with ``reduction``, that gives one value for each label."""

    def __call__(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of the losses of each row, and the numbers of its labels."""
        if not isinstance(target, tuple):
            return self._sums(output, target)
        if isinstance(output, torch.Tensor):
            return self._sums(output, torch.stack(_alike(target), 1))
        pairs = [self._sums(*pair) for pair in zip(output, target, strict=True)]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)  # type: ignore[return-value]

    def _sums(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        how = ClassLoss.of(self.loss)
        missing = target.isnan() if target.is_floating_point() else target == IGNORED
        if how is not None and not target.is_floating_point():
            missing |= target == how.ignored
        filled = target.masked_fill(missing, 0)
        if output.ndim == target.ndim + 1 and output.shape[-1] == 1 and how is None:
            output = output.squeeze(-1)
        values = call_loss(unreduced(self.loss), output, [filled])
        if not isinstance(values, torch.Tensor) or values.shape != target.shape:
            shown = list(values.shape) if isinstance(values, torch.Tensor) else kind_of(values)
            raise ModelError(
                f"MaskedLoss: the loss gave {shown} for labels {list(target.shape)}, and one value for "
                "each label is needed: give MSELoss, BCEWithLogitsLoss, CrossEntropyLoss or the like, "
                "or mask the labels in a loss of your own, which returns (sum, count)."
            )
        counts = (~missing).double()
        if how is not None and how.weight is not None and not target.is_floating_point():
            counts *= how.weight.to(counts)[filled]
        rows = len(target)
        known = values.masked_fill(missing, 0.0)
        return known.reshape(rows, -1).sum(1), counts.reshape(rows, -1).sum(1)


def _alike(labels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return labels of one kind: beside floats, what is missing of whole numbers is NaN, too."""
    wide = next((label.dtype for label in labels if label.is_floating_point()), None)
    if wide is None:
        return list(labels)
    return [
        label if label.dtype == wide else label.to(wide).masked_fill(label == IGNORED, math.nan)
        for label in labels
    ]


def unmasked(loss: Any) -> Any:
    """Return the loss inside a :class:`MaskedLoss`; return any other loss itself."""
    loss = inner(loss)
    return loss.loss if isinstance(loss, MaskedLoss) else loss


def ignored_by(loss: Any) -> list[int]:
    """Return the whole numbers that a loss takes for no label."""
    how, masks = ClassLoss.of(unmasked(loss)), isinstance(inner(loss), MaskedLoss)
    return [*([] if how is None else [how.ignored]), *([IGNORED] if masks else [])]


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


def loss_of(
    loss: Loss,
    output: object,
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
    masses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float | None]:
    """Return the loss of some rows: (their mean, None), or the ``(sum, count)`` of the loss.

    The result of the loss is not checked here, see :func:`check_sum`. With ``weights``, ``torch.nn``
    losses and functions with a ``reduction`` are called with "none"; any other loss must return its
    sums and counts by row, or a value for each sample; else raise NoValuePerSample.
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
    return found[0] if found[0].ndim == 0 else found[0].sum(), _count(found)


def _count(found: Any) -> float:
    count = found[1]
    return float(
        count if isinstance(count, numbers.Real) else torch.as_tensor(count).double().sum()
    )


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
    """Return ``sum(w * l) / sum(w)`` over the samples, or 0 if nothing counts.

    Values of shape (rows, ...) are first averaged over the other dimensions (summed for a reduction
    "batchmean"). With ``masses`` they are summed, and the divisor is ``sum(w * masses)``.
    """
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
        return functools.partial(loss, reduction="none")
    return loss


def _takes_reduction(loss: Loss) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


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
        self, model: Call, call: Call, inputs: Tensors, targets: Tensors
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
