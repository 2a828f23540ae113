"""Remedies, in words, for a model or a loss that fails on the first rows or has the wrong shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sparkdl.data.fields import Field
from sparkdl.data.row_errors import columns_with
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import DataError, ModelError, counted
from sparkdl.model.loss import (
    Loss,
    MaskedLoss,
    StepLoss,
    call_loss,
    ignored_by,
    inner,
    unmasked,
    unwrapped,
)
from sparkdl.model.recipe import described, for_example

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def shape_of(output: Any) -> str:
    """Return the shape and dtype of a model's output, or its type if it is no tensor."""
    if isinstance(output, torch.Tensor):
        return f"{list(output.shape)} {short(output)}"
    return type(output).__name__


def short(tensor: torch.Tensor) -> str:
    """Return the dtype's name without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def dtypes_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtypes of the tensors, separated by commas."""
    return ", ".join(short(tensor) for tensor in tensors)


def text_of(error: Exception) -> str:
    """Return the message of an exception without its full stop, for use inside a sentence."""
    return str(error).rstrip(". ")


def _range(tensor: torch.Tensor) -> str:
    return f"from {int(tensor.min())} to {int(tensor.max())}"


def precision_hint(module: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """Return the remedy if a model with weights of half precision fails on floating-point inputs."""
    floats = {short(t) for t in inputs if t.is_floating_point()}
    lower = {short(p) for p in module.parameters()} & set(_PRECISIONS)
    if not floats or len(lower) != 1:
        return ""
    (name,) = lower
    return (
        f" The model has weights of {name}, and columns of floats arrive as {' and '.join(floats)}: "
        f'build it in float32 and pass precision="{_PRECISIONS[name]}", which computes in {name}, or '
        f"begin its forward with x = x.to(torch.{name})."
    )


def input_hint(error: Exception, inputs: Sequence[torch.Tensor], fields: Sequence[Field]) -> str:
    """Return the remedy if the model fails on its inputs."""
    hints, varying = [], [f'"{field.name}"' for field in fields if field.ragged]
    integers = [
        (field.name, tensor)
        for field, tensor in zip(fields, inputs, strict=True)
        if not tensor.is_floating_point()
    ]
    if integers and isinstance(error, IndexError):
        ranges = ", ".join(f'"{name}" goes {_range(tensor)}' for name, tensor in integers)
        hints.append(
            f" In the data, {ranges}: an embedding needs a row for each number from 0 to the "
            "largest."
        )
    elif any(tensor.dtype == torch.uint8 for _, tensor in integers):
        hints.append(
            " Images with scale=None are bytes (uint8): leave scale out, or convert them to floats "
            "in augment or in the model."
        )
    elif integers and not varying and not isinstance(error, TypeError):
        hints.append(
            " Integer columns stay integers; cast a column that holds measurements: "
            'df.withColumn(name, df[name].cast("float")) or .cast("array<float>").'
        )
    if varying:
        longest = max(t.shape[1] for f, t in zip(fields, inputs, strict=True) if f.ragged)
        hints.append(
            f" The rows of {' and '.join(varying)} have up to {longest:,} elements: if the model has "
            "fewer positions, cut them with max_length= of their sparkdl.Text or sparkdl.Sequence."
        )
    elif len(inputs) > 1:
        names = ", ".join(field.name for field in fields)
        hints.append(
            f" Each of the {len(inputs)} feature columns is an input of its own, model(a, b, ...); "
            f'for one input join them first: df.selectExpr("array({names}) AS features", ...), which '
            "is data.select of a job, or VectorAssembler."
        )
    if len(inputs) == 1 and inputs[0].ndim == 1 and inputs[0].is_floating_point():
        name = fields[0].name
        hints.append(
            f' "{name}" is one number a row: df.withColumn("{name}", functions.array("{name}")) makes '
            "it [rows, 1]."
        )
    elif not hints and isinstance(error, RuntimeError):
        hints.append(" Each is [rows, ...]: build the model for inputs of these shapes and types.")
    return "".join(hints)


def step_hint(loss: Any) -> str:
    """Return how a step is called, if the loss is one."""
    step = inner(loss)
    if not isinstance(step, StepLoss):
        return ""
    names = ", ".join(f'"{name}"' for name in (*step.inputs, *step.labels))
    return f" It is called as step(module, batch), and the batch has {names}."


_ONE_HOT = (
    "make them 0 and 1, or use CrossEntropyLoss for class numbers and MSELoss for measurements"
)
_SIGNS = 'make them -1 and 1: df.withColumn("{0}", df["{0}"] * 2 - 1) does if they are 0 and 1'
_COUNTS = "filter out such rows, or use MSELoss for measurements"
_PROBABILITIES = "make them probabilities, which add up to 1 in each row"
_CLASSES = f'{_PROBABILITIES}, or cast class numbers to "long"'
LABELS: tuple[tuple[type[nn.Module], Callable[..., Any], float, float, str], ...] = (
    (nn.BCELoss, functional.binary_cross_entropy, 0, 1, _ONE_HOT),
    (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, 0, 1, _ONE_HOT),
    (nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, 0, 1, _ONE_HOT),
    (nn.HingeEmbeddingLoss, functional.hinge_embedding_loss, -1, 1, _SIGNS),
    (nn.SoftMarginLoss, functional.soft_margin_loss, -1, 1, _SIGNS),
    (nn.CrossEntropyLoss, functional.cross_entropy, 0, 1, _CLASSES),
    (nn.KLDivLoss, functional.kl_div, 0, math.inf, _PROBABILITIES),
    (nn.PoissonNLLLoss, functional.poisson_nll_loss, 0, math.inf, _COUNTS),
)
"""The labels that losses of torch are defined for: their least and largest value, and a remedy.

Torch raises an error only for ``BCELoss``. With -1 and 1 there is nothing between. Class numbers are
not here, since only the output tells how many there are.
"""


def check_labels(loss: Loss, samples: SampleSet, prefix: str = "") -> None:
    """Raise ModelError if a row has a label that the loss is not defined for.

    ``prefix`` is the beginning of the message.
    """
    labels = samples.fields[samples.num_features :][: samples.num_labels]
    function, keywords = unwrapped(unmasked(loss))
    rows = (row for row in LABELS if function is row[1] or _forwards_as(function, row[0]))
    kind, _, low, high, remedy = next(rows, (None, None, 0, 0, ""))
    log_target = keywords.get("log_target", getattr(function, "log_target", False))
    several = len(labels) > 1 and not isinstance(inner(loss), MaskedLoss)
    if kind is None or several or log_target:
        return
    for number, label in enumerate(labels, samples.num_features):
        if kind is nn.CrossEntropyLoss and (label.dtype[:5] != "float" or not label.shape):
            continue  # class numbers
        ends = [
            [
                e.value
                for handle in samples.handles
                for e in handle.extremes
                if e.field == number and e.sign == sign and not e.of_length
            ]
            for sign in (-1, 1)
        ]
        if not all(ends):
            continue
        least, most = min(ends[0]), max(ends[1])
        if label.dtype[:3] == "int" and least in ignored_by(loss):
            least = low
        if low == -1:
            fits, takes = {least, most} <= {-1, 1}, "labels of -1 and 1"
        else:
            slack = 0.0 if kind is nn.BCELoss else 1e-3  # probabilities are rounded
            fits, takes = low - slack <= least and most <= high + slack, "labels of at least 0"
            takes = takes if math.isinf(high) else "labels from 0 to 1"
        if not fits:
            raise ModelError(
                f'{prefix}"{label.name}" goes from {least:g} to {most:g}, and {kind.__name__} takes '
                f"{takes}: {remedy.format(label.name)}."
            )


def check_there(loss: Loss, samples: SampleSet) -> None:
    """Raise DataError if no row has any label."""
    ignored = set(ignored_by(loss))
    labels = samples.fields[samples.num_features :][: samples.num_labels]
    for number, label in enumerate(labels, samples.num_features):
        notes = [e for h in samples.handles for e in h.extremes if e.field == number]
        there = {e.value for e in notes if e.sign and not e.of_length}
        if not (there <= ignored if label.dtype.startswith("int") else not there) or not notes:
            return
    if labels:
        names = " and ".join(f'"{label.name}"' for label in labels)
        raise DataError(
            f"no row has a label: {names} {'are' if len(labels) > 1 else 'is'} missing in all "
            f"{sum(handle.num_rows for handle in samples.handles):,} rows, so the loss has nothing to "
            "learn from. Look at how the data was made, or at a join in it."
        )


def missing_labels(
    samples: SampleSet, validation: ValidationSet | None
) -> tuple[set[int], tuple[str, str] | None]:
    """Return the numbers of the labels that are missing in some rows, though no specification says
    so, and the name and place of the first one."""
    names = [field.name for field in samples.fields[samples.num_features :][: samples.num_labels]]
    numbers, first = set(), None
    sets = {"": samples, **({"validation data: ": validation.samples} if validation else {})}
    for prefix, of in sets.items():
        for partition, handle in enumerate(of.handles):
            for name, row in ((one.name, one.problem) for one in handle.adapted):
                if row is None:
                    continue
                numbers.add(names.index(name))
                place = f"partition {partition if row.partition is None else row.partition}"
                first = first or (name, f"{prefix}{row.message(place)}")
    return numbers, first


def missing_label_error(name: str, place: str) -> DataError:
    """Return the error to raise if the loss does not leave out labels that are missing."""
    return DataError(
        f"{place} A loss that leaves out what is missing, such as sparkdl.MaskedLoss(loss), would get "
        'such rows, and the loss here does not; handle_invalid="skip" leaves them out, and '
        f"{columns_with(name, 'Masked()')} gives them to any loss."
    )


def _forwards_as(loss: Any, kind: type[nn.Module]) -> bool:
    """Return whether ``loss`` is of this class, or of a subclass that computes the same."""
    return isinstance(loss, kind) and type(loss).forward is kind.forward


def loss_hint(
    error: Exception, output: Any, targets: Sequence[torch.Tensor], labels: Sequence[Field]
) -> str:
    """Return the remedy if the loss fails on the output and the label."""
    if not isinstance(output, torch.Tensor):
        return (
            f" The loss gets what the model returns, {described(output)}: say which part of it the "
            f"loss needs, {for_example(output)}, write a loss that takes all of it, or, if the "
            "model computes its own loss from the label, use loss=sparkdl.ModelLoss()."
        )
    if len(targets) > 1:
        names = ", ".join(f'"{label.name}"' for label in labels)
        return (
            f" The {len(targets)} labels arrive as a tuple of tensors, loss(output, labels): give a "
            f"loss that takes it, or make one array column of them: functions.array({names})."
        )
    if "1D target" in str(error) and targets[0].ndim > 1:
        name = labels[0].name
        first = f'df.withColumn("{name}", df["{name}"][0])'
        return f' "{name}" holds arrays, and the loss takes numbers: {first}.'
    if isinstance(error, TypeError):
        called = "loss(output, label)" if targets else "loss(output)"
        return f" It is called as {called}."
    if "size" in str(error) and targets and output.shape != targets[0].shape:
        classes = (
            "" if targets[0].is_floating_point() else " For class numbers use CrossEntropyLoss."
        )
        shape = f" Give the model an output of the label's shape.{classes}"
        return _classes_hint(output, targets[0]) or shape
    if targets and any(word in str(error).lower() for word in ("size", "weight tensor")):
        return " weight= and pos_weight= of a loss have a number for each output, or each class."
    if isinstance(error, (RuntimeError, IndexError, ValueError)):
        return label_hint(error, targets, labels)
    return ""


def _classes_hint(output: torch.Tensor, target: torch.Tensor) -> str:
    """Return the remedy for an output [rows, positions, classes]; torch wants the classes second."""
    if target.is_floating_point() or output.ndim < 3 or output.shape[:-1] != target.shape:
        return ""
    return (
        " torch takes classes as the second dimension: let the model return output.movedim(-1, 1), or "
        "give a loss that moves them and returns (sum, count): lambda output, label: "
        '(cross_entropy(output.movedim(-1, 1), label, reduction="sum"), (label != -100).sum()).'
    )


def label_hint(error: Exception, targets: Sequence[torch.Tensor], labels: Sequence[Field]) -> str:
    """Return the remedy if the loss does not accept the label's type or range."""
    if len(targets) != 1:
        return ""
    name, target = labels[0].name, targets[0]
    if target.is_floating_point() or (target.dtype == torch.bool and "Long" in str(error)):
        what, kind = "class numbers", "long"
    elif isinstance(error, IndexError) or "out of range" in str(error):
        return (
            f' "{name}" goes {_range(target)}: give the model an output for each class from 0 on, '
            "or renumber the classes (pyspark.ml.feature.StringIndexer)."
        )
    else:
        what, kind = "measurements", "float"
    kind = kind if target.ndim == 1 else f"array<{kind}>"
    return (
        f' If "{name}" holds {what}, cast it: df.withColumn("{name}", df["{name}"].cast("{kind}")).'
    )


def _brings_together(loss: Loss, output: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether ``loss`` itself brings the two tensors to one shape.

    It does if random numbers give the same result in these shapes as in one shape, or if it accepts
    only these shapes.
    """
    if len(target) < 2 or not (output.is_floating_point() and target.is_floating_point()):
        return False
    one, other = torch.rand_like(output), torch.rand_like(target)
    try:
        found = call_loss(loss, one, (other,))
    except Exception:
        return False
    try:
        expected = call_loss(loss, one.reshape(other.shape), (other,))
    except Exception:
        return True
    alike = all(isinstance(one, torch.Tensor) for one in (found, expected))
    return alike and found.shape == expected.shape and torch.allclose(found, expected)


def check_shapes(
    loss: Loss, output: Any, targets: Sequence[torch.Tensor], rows: int, labels: Sequence[Field]
) -> None:
    """Raise ModelError if torch would broadcast the output and the label against each other.

    An output [B, 1] and a label [B] would give [B, B], which nobody intends.
    """
    if not isinstance(output, torch.Tensor) or len(targets) != 1:
        return
    shapes = [list(output.shape), list(targets[0].shape)]
    fits = [*shapes[1], 1] != shapes[0] and [*shapes[0], 1] != shapes[1]
    if not fits and not _brings_together(loss, output, targets[0]):
        remedy = (
            "end the model with torch.nn.Flatten(0) or .squeeze(-1)"
            if len(shapes[0]) > len(shapes[1])
            else "give the model an output of that shape, for example .unsqueeze(-1)"
        )
        raise ModelError(
            f'the output has shape {shapes[0]} and the label "{labels[0].name}" {shapes[1]} '
            f"({counted(rows, 'row')}): torch would broadcast them against each other; {remedy}."
        )
