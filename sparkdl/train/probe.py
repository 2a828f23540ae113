"""Trying the model, the loss and the optimizer on the driver before any task trains."""

from __future__ import annotations

import fnmatch
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.data.assemble import Batch, preview_batch
from sparkdl.data.batches import EpochPlan
from sparkdl.data.handle import Field
from sparkdl.errors import ModelError, nearest
from sparkdl.infer.output import Output
from sparkdl.infer.predictor import evaluating
from sparkdl.replica.care import check_modules
from sparkdl.replica.flat import Layout, layout_of
from sparkdl.replica.policy import Policy
from sparkdl.replica.recipe import Recipe, seeded
from sparkdl.step.compute import to_tensors, weigh
from sparkdl.step.loss import NoValuePerSample, call_loss, weighted_mean
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.traits import SEVERAL
from sparkdl.train.engine import ValidationSet


def pickled(recipe: Recipe) -> bytes:
    """The recipe as bytes. Raises :class:`ModelError` that names the part that cannot travel."""
    from pyspark import cloudpickle

    try:
        data = cloudpickle.dumps(recipe)
        pickle.loads(data)
        return data
    except Exception as error:
        raise _cannot_travel(recipe, error) from None


def _cannot_travel(recipe: Recipe, error: Exception) -> ModelError:
    """Which part of the recipe it was."""
    from pyspark import cloudpickle

    culprit = "model"
    for name in ("model", "loss", "optimizer", "augment"):
        try:
            pickle.loads(cloudpickle.dumps(getattr(recipe, name)))
        except Exception as cause:
            culprit, error = name, cause
            break
    remedy = (
        "Pass a function that builds the module (model=make_model), and open files, locks, "
        "connections and Spark sessions inside it."
        if culprit == "model"
        else "Use a function or class of an importable module, with no open resource in it."
    )
    return ModelError(
        f"{culprit} cannot be pickled, so it cannot travel to the executors "
        f"({type(error).__name__}: {error}). {remedy}"
    )


def build_model(payload: bytes) -> nn.Module:
    """The module of a pickled recipe. Raises :class:`ModelError` where the user's function fails."""
    try:
        return pickle.loads(payload).build()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model() raised {type(error).__name__}: {error}. It is called without arguments; the "
            "traceback above shows where it failed."
        ) from error


def plan_optimizer(recipe: Recipe, module: nn.Module, slices: int | None) -> OptimizerPlan:
    """The recipe's optimizers on ``module``, found fit for ``slices`` (None: as many as it allows).

    Raises :class:`ModelError`.
    """
    named = dict(module.named_parameters())
    layout = layout_of(module)
    parameters = [named[s.name] for s in layout.segments if s.kind == "parameter"]
    try:
        plan = OptimizerPlan.of(recipe, parameters, module)
    except ModelError:
        raise
    except Exception as error:
        one_kind_only = "parameters" in str(error)  # of Muon: "only supports 2D parameters"
        raise ModelError(
            f"the optimizer cannot be built ({type(error).__name__}: {_text(error)}). Give a "
            "torch.optim class, a partial of one such as partial(torch.optim.Adam, lr=1e-3), or a "
            "callable that is given the module and returns an optimizer."
            + (f" {SEVERAL}" if one_kind_only else "")
        ) from error
    if slices is not None and slices > 1 and not plan.separate:
        raise ModelError(
            f"optimizer {plan.name} looks at all parameters together, so they must be in one "
            f"slice, and there are {slices}: set slices=1."
        )
    return plan


def check_policy(policy: Policy, module: nn.Module, layout: Layout) -> None:
    """What a run asks for that this module cannot do. Raises :class:`ModelError`."""
    check_modules(module, policy.activation_checkpointing)
    tables = [segment.name for segment in layout.segments if segment.sparse]
    if policy.local_steps > 1 and tables:
        raise ModelError(
            f"local_steps={policy.local_steps} needs dense gradients, and the embedding "
            f'"{tables[0].rpartition(".")[0]}" has sparse=True: leave one of the two out.'
        )
    names = [s.name for s in layout.segments if s.kind == "parameter"]
    for option in ("l1", "l2"):
        value = getattr(policy, option)
        for pattern in value if isinstance(value, Mapping) else ():
            if not fnmatch.filter(names, pattern):
                raise ModelError(
                    f'{option}: no trainable parameter matches "{pattern}".'
                    f"{nearest(pattern, names)} A pattern is of the whole name, such as "
                    '"encoder.*" or "*.weight".'
                )


def try_model(
    module: nn.Module,
    recipe: Recipe,
    batch: Batch,
    fields: Sequence[Field],
    num_features: int,
) -> Output | None:
    """Forward, loss and backward on a few real rows; what the model puts out for a sample.

    ``batch``: those rows, as in training. ``module`` is a private copy: its running statistics may
    change. Returns None where the output is not a single tensor (it trains, but cannot be predicted
    with). Raises :class:`ModelError`.
    """
    loss, policy = recipe.loss, recipe.policy
    inputs, targets = (
        to_tensors(arrays, torch.device("cpu")) for arrays in (batch.inputs, batch.targets)
    )
    fields = [*input_fields(fields[:num_features]), *fields[num_features:]]
    num_features = len(inputs)
    shown = ", ".join(
        f'"{field.name}" {list(t.shape)}' for field, t in zip(fields, inputs, strict=False)
    )
    module.train()
    with seeded(recipe.seed), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            output = module(*inputs)
        except Exception as error:
            raise ModelError(
                f"the model fails on the first rows ({shown}; {_dtypes(inputs)}): "
                f"{type(error).__name__}: {_text(error)}.{_input_hint(error, inputs, fields)}"
            ) from error
        _check_shapes(output, targets, len(inputs[0]), fields[num_features:])
        weights = _weights_of(batch, targets, policy, fields[num_features:])
        try:
            if policy.weighted:
                weighted_mean(loss, output, targets, torch.ones(len(inputs[0])))
                value = weighted_mean(loss, output, targets, weights)
            else:
                value = call_loss(loss, output, targets)
        except NoValuePerSample as error:
            raise ModelError(
                f"weights of samples or classes need a value for each sample, and {error}: use a "
                'torch loss, a function with reduction="none", or one that returns shape [rows].'
            ) from None
        except Exception as error:
            labels = ", ".join(f"{list(t.shape)} {_short(t)}" for t in targets) or "no label"
            raise ModelError(
                f"the loss fails on output {_shape(output)} and label {labels}: "
                f"{type(error).__name__}: {_text(error)}."
                f"{_label_hint(error, targets, fields[num_features:])}"
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
            hint = (
                _label_hint(error, targets, fields[num_features:])
                if "dtype" in str(error)
                else " It must depend on the model's output through torch operations."
            )
            raise ModelError(
                f"the loss cannot be differentiated: RuntimeError: {_text(error)}.{hint}"
            ) from error
        return _output_in_use(module, inputs)


def _weights_of(
    batch: Batch, targets: Sequence[torch.Tensor], policy: Policy, labels: Sequence[Field]
) -> torch.Tensor:
    """A weight for each row, not all zero; class weights found to fit the label."""
    rows = len(batch.inputs[0])
    own = None if batch.weights is None else torch.from_numpy(batch.weights)
    if policy.class_weights is not None:
        _check_classes(targets, len(policy.class_weights), labels)
    weights = weigh(targets, own, policy)
    return torch.ones(rows) if weights is None or not float(weights.sum()) else weights


def _check_classes(targets: Sequence[torch.Tensor], classes: int, labels: Sequence[Field]) -> None:
    if len(targets) != 1 or targets[0].ndim != 1 or targets[0].is_floating_point():
        raise ModelError(
            "class_weights need one label that holds class numbers: a column of whole numbers."
        )
    low, high = int(targets[0].min()), int(targets[0].max())
    if low < 0 or high >= classes:
        raise ModelError(
            f'class_weights has {classes} classes, 0 to {classes - 1}, and "{labels[0].name}" goes '
            f"from {low} to {high}: give a weight for each class, in a list."
        )


def input_fields(features: Sequence[Field]) -> list[Field]:
    """What the model is called with: the features, each followed by its lengths if it asks so."""
    found = []
    for field in features:
        found.append(field)
        if field.padding is not None and field.padding.lengths:
            found.append(Field(f"lengths of {field.name}", "int64", ()))
    return found


def check_scorer(module: nn.Module, validation: ValidationSet) -> None:
    """Try the validation's metrics on a few rows. Raises :class:`sparkdl.ParameterError`."""
    batch = preview_batch(validation.assembly, validation.samples.preview)
    cpu = torch.device("cpu")
    with evaluating(module):
        output = module(*to_tensors(batch.inputs, cpu))
    validation.scorer.check(output, to_tensors(batch.targets, cpu))


def check_single_rows(
    module: nn.Module,
    inputs: Sequence[np.ndarray],
    plan: EpochPlan,
    iterations: int | None,
    policy: Policy,
) -> None:
    """Raise :class:`ModelError` where a forward pass would have one row and the model needs more.

    Batch norm does. ``inputs``: what the model is called with; ``iterations`` is the last one of
    the run, as far as it is known.
    """
    module.train()
    try:
        with seeded(0), torch.no_grad():
            module(*to_tensors([array[:1] for array in inputs], torch.device("cpu")))
    except Exception as error:
        last = plan.num_iterations - 1
        for batch in (*range(min(last, _SEARCHED_BATCHES)), last):
            single = any(_has_single(stop - start, policy) for start, stop in plan.rows(batch))
            if single and (iterations is None or batch < iterations):
                cut = "".join(
                    f", {name}={getattr(policy, name)}"
                    for name in ("local_steps", "accumulate")
                    if getattr(policy, name) > 1
                )
                raise ModelError(
                    f"the model needs mini-batches of more than one row ({_text(error)}), and in "
                    f"iteration {batch + 1} of each epoch a replica gets one: {plan.num_samples} "
                    f"rows, batch_size={plan.batch_size // policy.local_steps}, "
                    f"replicas={len(plan.counts)}{cut}. Choose another batch_size or fewer replicas"
                    f"{', or cut less' if cut else ''}."
                ) from error


_SEARCHED_BATCHES = 1000


def _has_single(rows: int, policy: Policy) -> bool:
    """Whether the rows of a replica, cut for local steps and micro-batches, leave one row alone."""
    return any(
        1 in _cut(part, min(policy.accumulate, part))
        for part in _cut(rows, policy.local_steps)
        if part
    )


def _cut(rows: int, count: int) -> list[int]:
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def _output_in_use(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Output | None:
    """The output in evaluation mode, which may differ from that in training (auxiliary heads)."""
    with evaluating(module):
        output = module(*inputs)
    if not isinstance(output, torch.Tensor) or output.is_complex():
        return None
    return Output.of(output) if output.ndim and len(output) == len(inputs[0]) else None


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


def _text(error: Exception) -> str:
    return str(error).rstrip(". ")


def _range(tensor: torch.Tensor) -> str:
    return f"from {int(tensor.min())} to {int(tensor.max())}"


def _input_hint(error: Exception, inputs: Sequence[torch.Tensor], fields: Sequence[Field]) -> str:
    hints = []
    integers = [
        (field.name, tensor)
        for field, tensor in zip(fields, inputs, strict=False)
        if not tensor.is_floating_point()
    ]
    if integers and isinstance(error, IndexError):
        ranges = ", ".join(f'"{name}" {_range(tensor)}' for name, tensor in integers)
        hints.append(
            f" The data goes in {ranges}: an embedding needs one row for each number from 0 on."
        )
    elif integers:
        hints.append(
            " Integer columns stay integers; cast a column that holds measurements: "
            'df.withColumn(name, df[name].cast("float")) or .cast("array<float>").'
        )
    if len(inputs) > 1:
        hints.append(
            f" Each of the {len(inputs)} feature columns is an input of its own, model(a, b, ...); "
            "for one input join them first: VectorAssembler, or functions.array(...)."
        )
    return "".join(hints)


def _label_hint(error: Exception, targets: Sequence[torch.Tensor], labels: Sequence[Field]) -> str:
    if len(targets) != 1:
        return ""
    name, target = labels[0].name, targets[0]
    if target.is_floating_point():
        what, kind = "class numbers", "long"
    elif isinstance(error, IndexError):
        return (
            f' "{name}" goes {_range(target)}: give the model an output for each class from 0 on, '
            "or number the classes anew (pyspark.ml.feature.StringIndexer)."
        )
    else:
        what, kind = "measurements", "float"
    kind = kind if target.ndim == 1 else f"array<{kind}>"
    return (
        f' If "{name}" holds {what}, cast it: df.withColumn("{name}", df["{name}"].cast("{kind}")).'
    )
