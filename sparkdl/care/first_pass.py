"""The first pass of a model, a loss and metrics over a few rows, and what is wrong if it fails."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparkdl.care.hints import (
    check_shapes,
    dtypes_of,
    input_hint,
    label_hint,
    loss_hint,
    precision_hint,
    shape_of,
    short,
    step_hint,
    text_of,
)
from sparkdl.data.batches import Batch, preview_batch
from sparkdl.data.fields import Field
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import ModelError, kind_of
from sparkdl.infer.forward import run_batches
from sparkdl.infer.outputs import Output
from sparkdl.model.loss import (
    ALONE,
    IGNORED,
    NoValuePerSample,
    call_loss,
    check_averages,
    check_sum,
    ignored_by,
    inner,
    is_own_loss,
    is_step,
    is_sum,
    loss_of,
    masses_of,
)
from sparkdl.model.recipe import Recipe, Signature, described, with_tensors
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating, to_tensors, weigh


@dataclass(frozen=True)
class Tried:
    """The result of a first pass."""

    output: Output | None  # of a sample, in evaluation mode; None: not a single tensor
    sums: bool  # the loss returns (sum, count)
    value: float
    count: float | None  # of a sum
    given: Any  # to the loss, without gradients
    in_use: Any  # the output in evaluation mode; None: the model fails without labels


def try_model(
    module: nn.Module,
    recipe: Recipe,
    batch: Batch,
    inputs_are: Sequence[Field],
    labels_are: Sequence[Field],
) -> Tried:
    """Run forward, loss and backward on a few real rows, then forward in evaluation mode.

    The running statistics of ``module`` may change.
    """
    loss, options = recipe.loss, recipe.options
    module.zero_grad()  # those of an earlier pass are none that a step has computed
    inputs, targets = fresh_tensors(batch)
    shown = ", ".join(
        f'"{field.name}" {list(t.shape)}' for field, t in zip(inputs_are, inputs, strict=True)
    )
    with seeded(recipe.seed), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            output = recipe.signature.call_for_loss(loss, module, inputs, targets)
        except ModelError:
            raise
        except Exception as error:
            of_label = is_own_loss(loss) and "target" in str(error).lower()
            hint = (
                (label_hint(error, targets, labels_are) if of_label else "")
                or step_hint(loss)
                or precision_hint(module, inputs)
                or input_hint(error, inputs, inputs_are)
            )
            who = "step" if is_step(loss) else "the model"
            raise ModelError(
                f"{who} fails on the first rows ({shown}; {dtypes_of(inputs)}): "
                f"{type(error).__name__}: {text_of(error)}.{hint}"
            ) from error
        if is_step(loss) and any(p.grad is not None for p in module.parameters()):
            raise ModelError(f"step runs backward, which belongs to the engine. {ALONE}")
        if output is None:
            raise ModelError("the model returned None: its forward must return the output.")
        if not is_own_loss(loss):
            output = _part_of(output, recipe.signature)
        _check_loss(loss)
        if not is_own_loss(loss):
            check_shapes(loss, output, targets, len(inputs[0]), labels_are)
        masses = masses_of(loss, targets)
        weights = _weights_of(batch, targets, recipe, labels_are)
        try:
            if options.weighted:
                loss_of(loss, output, targets, torch.ones(len(inputs[0])))
                value, count = loss_of(loss, output, targets, weights, masses)
            else:
                value, count = _checked(call_loss(loss, output, targets), len(inputs[0]))
        except NoValuePerSample as error:
            raise ModelError(
                f"weights of samples or classes need a loss value for each sample, but {error}: "
                'use a torch loss, a function with reduction="none", or one that returns shape '
                "[rows], or (sum, count) of that shape each."
            ) from None
        except ModelError:
            raise
        except Exception as error:
            labels = ", ".join(f"{list(t.shape)} {short(t)}" for t in targets) or "no label"
            hint = loss_hint(error, output, targets, labels_are)
            raise ModelError(
                f"the loss fails on output {shape_of(output)} and label {labels}: "
                f"{type(error).__name__}: {text_of(error)}.{hint}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, torch.Tensor)
                else kind_of(value)
            )
            raise ModelError(
                f"the loss returned {found}: it must return one number, the mean over the batch "
                '(reduction="mean" in torch.nn losses), or (sum, count).'
            )
        counts = bool(count) if count is not None else masses is None or bool(masses.sum())
        # False if the loss ignores every label
        if options.on_nan == "raise" and counts and not torch.isfinite(value):
            cause = (
                "Look for a division by 0, the log or root of 0, or inputs that are too large; "
                'on_nan="skip" skips such updates.'
            )
            if any(t.is_floating_point() and bool(t.isnan().any()) for t in targets):
                cause = (
                    "Labels are missing, and the loss must leave them out: "
                    "loss=sparkdl.MaskedLoss(loss) does."
                )
            raise ModelError(
                f"{_what_is_not_finite(output, value)} on the first rows ({shown}; "
                f"{dtypes_of(inputs)}), before any training. {cause}"
            )
        try:
            value.backward()
        except RuntimeError as error:
            hint = (
                label_hint(error, targets, labels_are)
                if "dtype" in str(error)
                else " It must depend on the model's output through torch operations."
            )
            raise ModelError(
                f"the loss cannot be differentiated: RuntimeError: {text_of(error)}.{hint}"
            ) from error
        given, value = with_tensors(output, torch.Tensor.detach), value.detach()
        in_use, shape = _output_in_use(module, batch, recipe.signature, is_own_loss(loss))
        return Tried(shape, count is not None, float(value.real), count, given, in_use)


def masks(module: nn.Module, recipe: Recipe, batch: Batch, missing: Collection[int]) -> bool | None:
    """Return whether the loss leaves out the labels with these numbers where they are missing.

    They are taken from every second row: NaN, or -100 among whole numbers. The gradient of the output
    must then be finite, and 0 for these rows, or where another label would change it: else the loss
    takes a missing label for some number. None: the model or the loss fails on rows with all labels.
    """
    loss, signature = recipe.loss, recipe.signature
    inputs, targets = fresh_tensors(batch)
    rows = len(inputs[0])
    without = torch.arange(rows) % 2 == 1
    if is_own_loss(loss):
        return False  # the model gets the labels, and its output says nothing

    def gradients(change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        """Return those of the rows whose missing labels are changed, as one vector."""
        labels = list(known)
        for number in missing:
            there = without.reshape(-1, *(1 for _ in known[number].shape[1:]))
            labels[number] = torch.where(there, change(known[number]), known[number])
        parts: list[torch.Tensor] = []

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            parts.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
            return parts[-1]

        given = with_tensors(output, leaf)
        weights = torch.ones(rows) if recipe.options.weighted else None
        value, _ = loss_of(loss, given, labels, weights, masses_of(loss, labels))
        value.sum().backward()
        found = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in parts if p.requires_grad
        ]
        if not all(bool(one.isfinite().all()) for one in (value, *found)):
            raise ValueError("not finite")
        of_rows = [one[without].reshape(-1) for one in found if one.ndim and len(one) == rows]
        return torch.cat(of_rows)

    with seeded(recipe.seed), buffers_kept(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            returned = signature.call_for_loss(loss, module, inputs, targets)
            output = signature.for_loss(loss, returned)
            known = [_filled(target) for target in targets]
            before = gradients(lambda label: label)
        except Exception:
            return None
        with contextlib.suppress(Exception):
            after = gradients(
                lambda label: label.new_tensor(math.nan if label.is_floating_point() else IGNORED)
            )
            if not after.any():
                return bool(before.any())
            depends = before != gradients(lambda label: (label == 0).to(label.dtype))
            return bool(depends.any()) and not bool(after[depends].any())
    return False


def _filled(target: torch.Tensor) -> torch.Tensor:
    """Return a label with its first value in place of what is missing."""
    missing = target.isnan() if target.is_floating_point() else target == IGNORED
    return target.masked_fill(missing, next(iter(target[~missing].tolist()), 0))


def fresh_tensors(batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return copies of the inputs and labels of a batch, since a model may write to its inputs."""
    inputs, targets = to_tensors(batch.inputs), to_tensors(batch.targets)
    return [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in targets]


def _checked(found: Any, rows: int) -> tuple[Any, float | None]:
    """Return the result of a loss as a mean and None, or as a sum and a count."""
    if not is_sum(found):
        return found, None
    check_sum(found, rows)
    return loss_of(lambda _: found, None, ())


def _what_is_not_finite(output: Any, value: torch.Tensor) -> str:
    """Return, in words, whether the output or the loss is NaN or inf."""
    if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
        wrong = "NaN" if torch.isnan(output).any() else "inf"
        return f"the output of the model holds {wrong}"
    return f"the loss is {float(value.detach().real)}"


def _weights_of(
    batch: Batch, targets: Sequence[torch.Tensor], recipe: Recipe, labels: Sequence[Field]
) -> torch.Tensor:
    """Return a weight for each row, not all zero; check that class weights fit the label."""
    rows = len(batch.inputs[0])
    own = None if batch.weights is None else torch.from_numpy(batch.weights)
    weights_of_classes = recipe.options.class_weights
    if weights_of_classes is not None:
        _check_classes(targets, len(weights_of_classes), ignored_by(recipe.loss), labels)
    weights = weigh(targets, own, recipe.options)
    return torch.ones(rows) if weights is None or not float(weights.sum()) else weights


def _check_classes(
    targets: Sequence[torch.Tensor], classes: int, ignored: Sequence[int], labels: Sequence[Field]
) -> None:
    """Raise ModelError if the label does not hold class numbers below ``classes``."""
    if len(targets) != 1 or targets[0].ndim != 1 or targets[0].is_floating_point():
        raise ModelError(
            "class_weights need one label that holds class numbers: a column of whole numbers."
        )
    found = targets[0][~torch.isin(targets[0].long(), torch.tensor(ignored, dtype=torch.int64))]
    low, high = (int(found.min()), int(found.max())) if len(found) else (0, 0)
    if low < 0 or high >= classes:
        raise ModelError(
            f'class_weights has {classes} classes, 0 to {classes - 1}, and "{labels[0].name}" goes '
            f"from {low} to {high}: give a list with a weight for each class."
        )


def _part_of(returned: Any, signature: Signature) -> Any:
    """Return the output in what the model returned. Raises ModelError."""
    try:
        return signature.output(returned)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"output=, the function of what the model returns, fails on {described(returned)}: "
            f"{type(error).__name__}: {text_of(error)}."
        ) from error


def check_scorer(module: nn.Module, signature: Signature, validation: ValidationSet) -> None:
    """Try the model, the loss and the metrics on a few rows of the validation data."""
    batch = preview_batch(validation.batch_spec, validation.samples.preview)
    targets = to_tensors(batch.targets)
    rows = len(batch.inputs[0])
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    loss = replace(validation.scorer, metrics=())
    with evaluating(module):
        try:
            own, whole = (loss.loss, batch.targets), replace(signature, part=None)
            [(output, _)] = list(run_batches(module, batch.inputs, rows, signature=whole, own=own))
            loss.update(loss.start(), output, targets, weights, rows)
        except ModelError as error:
            raise ModelError(f"validation data: {error}") from error.__cause__
        validation.scorer.check(output, targets)


def _check_loss(loss: Any) -> None:
    """Raise ModelError if the loss would be trained otherwise than its author expects."""
    check_averages(loss, "replicas")
    loss = inner(loss)
    if isinstance(loss, nn.Module):
        trains = [name for name, p in loss.named_parameters() if p.requires_grad]
        if trains:
            raise ModelError(
                f"the loss has parameters ({', '.join(trains[:3])}), but only the parameters of "
                "the model are trained: move them into the model, or set requires_grad=False."
            )


def _output_in_use(
    module: nn.Module, batch: Batch, signature: Signature, own_loss: bool
) -> tuple[Any, Output | None]:
    """Return the output in evaluation mode, which may differ from that in training (auxiliary heads).

    With ``own_loss`` the model got the labels in training and may fail without them; the result is
    then None.
    """
    inputs, _ = fresh_tensors(batch)
    with evaluating(module):
        try:
            output = _part_of(signature.call(module, inputs), signature)
        except ModelError:
            raise
        except Exception as error:
            if own_loss:
                return None, None
            raise ModelError(
                "the model works in training, and fails on the same rows in evaluation mode without "
                f"gradients, as in validation and predictions: {type(error).__name__}: "
                f"{text_of(error)}. If its forward computes gradients, as by torch.autograd.grad, do "
                "that in a block of torch.enable_grad()."
            ) from error
    single = isinstance(output, torch.Tensor) and not output.is_complex()
    of_rows = single and output.ndim and len(output) == len(inputs[0])
    return output, Output.of(output) if of_rows else None
