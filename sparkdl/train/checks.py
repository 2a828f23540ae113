"""Checks of a trainer's fields that need no data. Each problem is one sentence with its remedy."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyspark.resource import ResourceProfile
from torch import nn

from sparkdl.checkpoint import Checkpoint
from sparkdl.consistency.base import Consistency
from sparkdl.data.schema import check_specs
from sparkdl.errors import in_quotes, kind_of, nearest, shown
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.triggers import Trigger, max_epoch, no_trigger
from sparkdl.loop.validation import Validation
from sparkdl.model.buffers import PRECISIONS, problems_of_rules
from sparkdl.model.recipe import problems_of_part
from sparkdl.parallel.plan import problems_of as problems_of_parallel
from sparkdl.train.combinations import is_count, problems_of_combinations

ENGINES = ("local", "shuffle", "gang")
_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "precision": tuple(PRECISIONS),
    "wire": tuple(PRECISIONS),
    "on_nan": ("raise", "skip"),
    "schedule_per": ("iteration", "epoch"),
}
_COUNTS = (
    *("batch_size", "replicas", "min_ranks", "slices", "accumulate", "local_steps"),
    "bucketing",
)
_OPTIONAL = ("replicas", "min_ranks", "slices", "bucketing", "clip_norm", "clip_value", "ema")
VALUES = (
    "output",
    *_COUNTS,
    *("clip_norm", "clip_value", "ema", "l1", "l2", "class_weights", "seed", "mesh"),
    *("strict_weights", "sync_batchnorm", "keep_optimizer_state"),
)
"""Fields that also take numbers of NumPy, pandas or torch."""
NAMES = ("features", "label", "freeze", "unfreeze", "activation_checkpointing")
"""Fields with lists of names, which may also be an array or an Index."""
_PATTERNS = ("freeze", "unfreeze", "activation_checkpointing")
_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("model", Callable, "give a function that builds a torch.nn.Module, or a module"),
    (
        "loss",
        (Callable, type(None)),
        "give a function of (output, target), such as torch.nn.MSELoss(), or sparkdl.ModelLoss() for a "
        "model that computes its own",
    ),
    ("step", (Callable, type(None)), "give a function of (module, batch) that returns the loss"),
    (
        "optimizer",
        (Callable, torch.optim.Optimizer, Mapping),
        "give a torch.optim class, or a partial of one such as partial(torch.optim.Adam, lr=1e-3)",
    ),
    (
        "schedule",
        (Callable, type(None)),
        "give a partial of a torch.optim.lr_scheduler class, such as partial(StepLR, step_size=10)",
    ),
    ("augment", (Callable, type(None)), "give a function of (*features, rng)"),
    (
        "compression",
        (Callable, type(None)),
        "give sparkdl.TopK(), sparkdl.PowerSGD(), a function of a sparkdl.GradBucket, or None",
    ),
    (
        "consistency",
        (Consistency, type(None)),
        "give sparkdl.Synchronous(), sparkdl.StaleSynchronous(staleness=1), sparkdl.Asynchronous(), "
        "sparkdl.DiLoCo(), sparkdl.Gossip(), or None",
    ),
    ("validation", (Validation, type(None)), "give sparkdl.Validation(data, metrics=[...])"),
    ("checkpoint", (Checkpoint, type(None)), 'give sparkdl.Checkpoint("path")'),
    ("callbacks", (list, tuple), "give a list of sparkdl.Callback objects"),
    ("weight", (str, type(None)), "give the name of a column"),
    ("schedule_metric", (str, type(None)), "give the name of a metric of the validation"),
    ("compile", (bool, Mapping), "give True, or a mapping of torch.compile's options"),
    (
        "weights",
        (Mapping, str, os.PathLike, type(None)),
        "give a state_dict, or the path of a safetensors file",
    ),
    ("strict_weights", bool, "give True or False"),
    ("sync_batchnorm", bool, "give True or False"),
    (
        "resource_profile",
        (ResourceProfile, type(None)),
        "give a pyspark.resource.ResourceProfile, or None",
    ),
    ("keep_optimizer_state", bool, "give True or False"),
)


def problems_of(trainer: Any) -> Iterator[str]:
    """Yield every problem of a trainer that can be found without the data."""
    yield from _numbers(trainer)
    for name, choices in _CHOICES.items():
        value = getattr(trainer, name)
        if not isinstance(value, str) or value not in choices:
            yield (
                f"{name}={in_quotes(value)}: use one of {', '.join(choices)}."
                f"{nearest(str(value), choices)}"
            )
    parallel = list(problems_of_parallel(trainer.strategy, trainer.mesh))
    yield from parallel
    classes = [
        name
        for name in ("loss", "compression", "consistency")
        if isinstance(getattr(trainer, name), type)
    ]
    for name in classes:
        class_name = getattr(trainer, name).__name__
        yield f"{name} is the class {class_name}: give an instance, {class_name}()."
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        name = type(trainer.optimizer).__name__
        yield (
            "optimizer is already built: give a recipe for it instead, "
            f"partial(torch.optim.{name}, lr=...)."
        )
    if not isinstance(trainer.stop, Trigger):
        yield no_trigger("stop={}", trainer.stop, "sparkdl.max_epoch(10)", max_epoch)
    if not isinstance(trainer.histograms, (Trigger, type(None))):
        yield no_trigger("histograms={}", trainer.histograms, "sparkdl.every(100)")
    for name, kind, remedy in _KINDS:
        value = getattr(trainer, name)
        if name not in classes and not isinstance(value, kind):
            yield f"{name} is {kind_of(value)}: {remedy}."
    yield from problems_of_part(trainer.output)
    yield from _names(trainer)
    yield from _callbacks(trainer)
    yield from _compile_options(trainer.compile)
    yield from problems_of_rules(trainer.buffers, "buffers")
    yield from problems_of_combinations(trainer, strategies=not parallel)


def problems_of_start(
    resume: Any, start: Any = None, optimizer_state: Any = None, replay: Any = None
) -> Iterator[str]:
    """Yield the problems of the arguments that say how a run begins."""
    if not isinstance(resume, (str, os.PathLike, type(None))):
        yield (
            f'resume is {kind_of(resume)}: give "latest", or the path of a checkpoint or of '
            "a folder of them."
        )
    if not isinstance(start, (TrainedModel, type(None))):
        yield (
            f"start is {kind_of(start)}: give what fit returned, or sparkdl.load(path). A "
            "state_dict or a file is weights= of the trainer."
        )
    if not isinstance(optimizer_state, (bool, type(None))):
        yield f"optimizer_state={shown(optimizer_state)}: give True, False or None."
    if not isinstance(replay, (History, type(None))):
        yield f"replay is {kind_of(replay)}: give the history of a run, trained.history."


def _numbers(trainer: Any) -> Iterator[str]:
    for name in _COUNTS:
        value = getattr(trainer, name)
        if value is None and name in _OPTIONAL:
            continue
        if not is_count(value):
            yield f"{name}={shown(value)}: give a whole number of at least 1."
    for name in ("clip_norm", "clip_value"):
        value = getattr(trainer, name)
        if value is not None and not (_is_number(value) and value > 0):
            yield f"{name}={shown(value)}: give a number above 0, or None."
    if trainer.ema is not None and not (_is_number(trainer.ema) and 0 < trainer.ema < 1):
        yield f"ema={shown(trainer.ema)}: give a decay between 0 and 1, such as 0.999, or None."
    for name in ("l1", "l2"):
        value = getattr(trainer, name)
        for strength in value.values() if isinstance(value, Mapping) else (value,):
            if not (_is_number(strength) and strength >= 0):
                yield (
                    f"{name}={shown(value)}: give a number of at least 0, or a mapping of patterns to "
                    "such numbers."
                )
                break
    yield from _class_weights(trainer.class_weights)
    if isinstance(trainer.seed, bool) or not isinstance(trainer.seed, int):
        yield f"seed={shown(trainer.seed)}: give a whole number."
    elif not 0 <= trainer.seed < 2**63:
        yield f"seed={trainer.seed}: give a number from 0 to 2**63 - 1."


def _class_weights(weights: Any) -> Iterator[str]:
    remedy = "give a list with the weight of each class, or a mapping {class: weight}, all >= 0."
    if weights is None:
        return
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Mapping, list, tuple)):
        yield f"class_weights is {kind_of(weights)}: {remedy}"
        return
    values = list(weights.values()) if isinstance(weights, Mapping) else list(weights)
    classes = list(weights) if isinstance(weights, Mapping) else []
    if not values or not all(_is_number(value) and value >= 0 for value in values):
        yield f"class_weights={shown(weights)}: {remedy}"
    elif not all(_is_number(c) and c >= 0 and c == int(c) for c in classes):
        yield f"class_weights={shown(weights)}: classes are whole numbers, starting at 0."
    elif not any(values) and (not classes or len(classes) == max(classes) + 1):
        yield (
            f"class_weights={shown(weights)}: no sample would count. Give at least one class a weight "
            "above 0."
        )


def _compile_options(options: Any) -> Iterator[str]:
    if isinstance(options, Mapping):
        try:
            torch.compile(nn.Identity(), **options)
        except Exception as error:
            reason = textwrap.shorten(str(error), 160, placeholder="...").rstrip(".")
            yield f"compile={shown(options)}: torch.compile does not take these options ({reason})."


def _wrong_names(trainer: Any) -> Iterator[str]:
    for name, value in (("features", trainer.features), ("label", trainer.label)):
        names = [value] if isinstance(value, str) else value
        if name == "features" and isinstance(value, Mapping):
            names = list(value.values())
            if not all(isinstance(one, str) for one in (*value, *names)) or not all(
                keyword.isidentifier() for keyword in value
            ):
                yield (
                    f"features={shown(value)}: give a mapping from each parameter of forward to "
                    "the name of a column."
                )
                continue
        if name == "label" and value is None:
            continue
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            yield f"{name}={shown(value)}: give a column name, or a list of names."
        elif name == "features" and not names:
            yield "features is empty: name at least one column."


def _names(trainer: Any) -> Iterator[str]:
    yield from _wrong_names(trainer)
    for name in _PATTERNS:
        value = getattr(trainer, name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(n, str) for n in value):
            yield f'{name}={shown(value)}: give a list of names or patterns, such as ["encoder.*"].'
    if not list(_wrong_names(trainer)):
        yield from check_specs(
            trainer.columns, trainer.feature_columns, trainer.label_columns, trainer.weight
        )


def _callbacks(trainer: Any) -> Iterator[str]:
    if isinstance(trainer.callbacks, (list, tuple)):
        for callback in trainer.callbacks:
            if isinstance(callback, type):
                yield f"callback {callback.__name__} is a class: give an instance of it."
            elif not isinstance(callback, Callback):
                yield f"callback {shown(callback)} is not a sparkdl.Callback."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
