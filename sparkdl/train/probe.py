"""Trying the model, the loss and the optimizer on the driver before any task trains."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.partition import Field
from sparkdl.errors import ModelError
from sparkdl.infer.output import Output
from sparkdl.replica.recipe import Recipe, seeded
from sparkdl.step.compute import call_loss, to_tensors


def pickled(recipe: Recipe) -> bytes:
    """The recipe as bytes. Raises :class:`ModelError` that names the part that cannot travel."""
    from pyspark import cloudpickle

    for name in ("model", "loss", "optimizer"):
        try:
            data = cloudpickle.dumps(getattr(recipe, name))
            pickle.loads(data)
        except Exception as error:
            remedy = (
                "Pass a function that builds the module (model=make_model), and open files, locks, "
                "connections and Spark sessions inside it."
                if name == "model"
                else "Use a function or class of an importable module, with no open resource in it."
            )
            raise ModelError(
                f"{name} cannot be pickled, so it cannot travel to the executors "
                f"({type(error).__name__}: {error}). {remedy}"
            ) from None
    return cloudpickle.dumps(recipe)


def try_model(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    rows: Sequence[np.ndarray],
    fields: Sequence[Field],
    num_features: int,
    seed: int,
) -> Output | None:
    """One forward, loss and backward on a few real rows; what the model puts out for a sample.

    ``module`` is a private copy: its running statistics may change. Returns None where the output
    is not a single tensor (it trains, but cannot be predicted with). Raises :class:`ModelError`.
    """
    tensors = to_tensors(rows, torch.device("cpu"))
    inputs, targets = tensors[:num_features], tensors[num_features:]
    shown = ", ".join(
        f'"{field.name}" {list(t.shape)}' for field, t in zip(fields, inputs, strict=False)
    )
    module.train()
    with seeded(seed), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            output = module(*inputs)
        except Exception as error:
            raise ModelError(
                f"the model fails on the first rows ({shown}; {_dtypes(inputs)}): "
                f"{type(error).__name__}: {error}.{_input_hint(inputs, num_features)}"
            ) from error
        _check_shapes(output, targets, len(inputs[0]), fields[num_features:])
        try:
            value = call_loss(loss, output, targets)
        except Exception as error:
            labels = ", ".join(f"{list(t.shape)} {_short(t)}" for t in targets) or "no label"
            raise ModelError(
                f"the loss fails on output {_shape(output)} and label {labels}: "
                f"{type(error).__name__}: {error}.{_label_hint(targets, fields[num_features:])}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, torch.Tensor)
                else f"a {type(value).__name__}"
            )
            raise ModelError(
                f"the loss returned {found}: it must return one number, the mean over the batch "
                '(reduction="mean" in torch.nn losses).'
            )
        try:
            value.backward()
        except RuntimeError as error:
            raise ModelError(
                f"the loss cannot be differentiated ({error}): it must depend on the model's "
                "output through torch operations."
            ) from error
    if isinstance(output, torch.Tensor) and output.ndim and len(output) == len(inputs[0]):
        return Output.of(output)
    return None


def _check_shapes(
    output: Any, targets: Sequence[torch.Tensor], rows: int, labels: Sequence[Field]
) -> None:
    """Output [B, 1] against label [B] would be broadcast to [B, B]: never what is meant."""
    if not isinstance(output, torch.Tensor) or len(targets) != 1:
        return
    shapes = [list(output.shape), list(targets[0].shape)]
    if [*shapes[1], 1] == shapes[0] or [*shapes[0], 1] == shapes[1]:
        remedy = (
            "end the model with torch.nn.Flatten(0) or .squeeze(-1)"
            if len(shapes[0]) > len(shapes[1])
            else "give the model an output of that shape, for example .unsqueeze(-1)"
        )
        raise ModelError(
            f'the output has shape {shapes[0]} and the label "{labels[0].name}" {shapes[1]} '
            f"({rows} rows): torch would broadcast them against each other; {remedy}."
        )


def _shape(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"{list(output.shape)} {_short(output)}"
    return type(output).__name__


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtypes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(_short(tensor) for tensor in tensors)


def _input_hint(inputs: Sequence[torch.Tensor], num_features: int) -> str:
    hints = []
    if any(not tensor.is_floating_point() for tensor in inputs):
        hints.append(
            " Integer columns stay integers; cast a column that holds measurements: "
            'df.withColumn(name, df[name].cast("float")) or .cast("array<float>").'
        )
    if num_features > 1:
        hints.append(
            f" Each of the {num_features} feature columns is an input of its own, model(a, b, ...); "
            "for one input join them first: VectorAssembler, or functions.array(...)."
        )
    return "".join(hints)


def _label_hint(targets: Sequence[torch.Tensor], labels: Sequence[Field]) -> str:
    if len(targets) == 1 and targets[0].is_floating_point():
        name = labels[0].name
        return (
            f' If "{name}" holds class numbers, make them integers: '
            f'df.withColumn("{name}", df["{name}"].cast("long")).'
        )
    if len(targets) == 1:
        name = labels[0].name
        return (
            f' If "{name}" holds measurements, make them floats: '
            f'df.withColumn("{name}", df["{name}"].cast("float")).'
        )
    return ""
