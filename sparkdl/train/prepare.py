"""The part of a fit before the data is read: build the model and its plans, and check them."""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from sparkdl.codec.files import mappable
from sparkdl.errors import DataError, ModelError, ParameterError, SessionError
from sparkdl.infer.evaluate import check_metrics
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import not_tensors
from sparkdl.loop.schedule import Schedule
from sparkdl.metrics.named import resolve
from sparkdl.model.buffers import check_rules
from sparkdl.model.flat import Layout, check_memory, layout_of
from sparkdl.model.preparation import passing_buffers
from sparkdl.model.recipe import Recipe
from sparkdl.replica.compare import Description, describe
from sparkdl.session import context_of
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.train.recipes import (
    build_model,
    check_closures,
    check_columns,
    check_compression,
    check_evaluated,
    check_options,
    pickled,
    plan_optimizer,
)
from sparkdl.usercode import tell_of_changed_constants

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class PreparedModel:
    """The recipe of a model and what follows from it."""

    recipe: Recipe
    payload: bytes
    module: nn.Module  # for the preflight
    layout: Layout
    built: Description  # executors compare it with what they build; empty: local engine
    optimizer: OptimizerSpec
    schedule: Schedule
    outer: OptimizerSpec | None = None  # of the slices, if replicas take the steps of ``optimizer``
    sums: bool = False  # the loss returns (sum, count), as the preflight finds out

    @property
    def slice_optimizer(self) -> OptimizerSpec:
        """The plan of the optimizers with which slices are updated."""
        return self.outer or self.optimizer

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimizers."""
        outer = () if self.outer is None else self.outer.parts
        return tuple(part.name for part in (*outer, *self.optimizer.parts))

    @property
    def float_dtype(self) -> str:
        """The name of the dtype of the flat vector, such as "float32"."""
        return str(self.layout.dtype).removeprefix("torch.")


def prepare(
    trainer: Trainer,
    start: TrainedModel | None,
    check_data: Callable[[Any], Any] = context_of,
) -> PreparedModel:
    """Build everything that needs no data, and check it.

    ``check_data`` raises an error for validation data that this fit cannot read.
    """
    if trainer.validation is not None:
        _check_data(trainer.validation.data, check_data)
        check_metrics(resolve(trainer.validation.metrics))
    weights = _weights_file(trainer) if start is None else start.module.state_dict()
    options = replace(
        trainer.options, weighted=trainer.weight is not None or trainer.class_weights is not None
    )
    recipe = Recipe(
        trainer.model,
        trainer.objective,
        trainer.optimizer,
        trainer.seed,
        options,
        weights,
        trainer.strict_weights,
        tuple(trainer.freeze),
        tuple(trainer.unfreeze),
        trainer.augment,
        trainer.compression,
        {} if start is None else passing_buffers(start.module),
        trainer.signature,
        trainer.consistency_model.outer_optimizer,
    )
    _tell_of_compilation(trainer)
    if trainer.engine != "gang":
        ignored = {"strategy": trainer.strategy != type(trainer).strategy, "mesh": trainer.mesh}
        for name in (name for name, given in ignored.items() if given):
            text = '%s= is for engine="gang" and has no effect with engine="%s".'
            logger.warning(text, name, trainer.engine)
    payload = pickled(recipe)
    if trainer.engine != "local":
        tell_of_changed_constants(recipe, trainer.columns)
    check_columns(trainer.columns)
    module = build_model(payload, reported=True)
    if problem := next(not_tensors(module), None):
        logger.warning("the trained model could not be saved: %s", problem)
    check_rules(module, options.buffers, gossip=options.topology is not None)
    layout = layout_of(module, options.buffers)
    if isinstance(trainer.model, nn.Module):
        check_memory(trainer.model, layout)
        _check_hooks(trainer.model)
    built = {} if trainer.engine == "local" else describe(module)
    check_options(options, module, layout)
    check_compression(recipe, layout)
    _import_compiler()
    outer = None
    if options.outer:
        outer = plan_optimizer(recipe.for_slices, module, trainer.slices, "outer_optimizer")
    optimizer = plan_optimizer(recipe, module, None if outer else trainer.slices)
    check_closures(trainer.consistency_model, optimizer, *([] if outer is None else [outer]))
    check_evaluated(trainer.consistency_model, options, optimizer)
    for part in trainer.parts.values():
        part.check_model(module, layout, optimizer, options)
    schedule = Schedule(optimizer, trainer.schedule, trainer.schedule_per, trainer.schedule_metric)
    return PreparedModel(recipe, payload, module, layout, built, optimizer, schedule, outer)


def _check_hooks(module: nn.Module) -> None:
    """Raise ModelError if a parameter has a hook on its gradient, which no copy of it would have."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f'the model is an instance of a module, and its "{name}" has a hook on the gradient, '
                "which the copies that train would not have: pass a function that builds the module "
                "and registers the hook."
            )


def _tell_of_compilation(trainer: Trainer) -> None:
    """Warn if ``module.compile()`` was called, which leaves no trace in a pickle."""
    if isinstance(trainer.model, nn.Module) and not trainer.compile:
        for name, module in trainer.model.named_modules():
            if module._compiled_call_impl is not None:
                where = f'its "{name}"' if name else "it"
                logger.warning(
                    "model is a module, and %s was compiled with .compile(), which is not sent to "
                    "the executors: it is trained without compilation. Pass compile=True to "
                    "compile it there.",
                    where,
                )
                return


def _import_compiler() -> None:
    """Import torch's compiler, which the first optimizer of a process does anyway.

    The garbage collector is off meanwhile: it would scan all objects again and again, for a third of
    the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        if collects:
            gc.enable()


def _check_data(data: object, check: Callable[[Any], Any]) -> None:
    """Raise :class:`sparkdl.UserError` if ``data`` cannot be validated on."""
    try:
        check(data)
    except (DataError, SessionError) as error:
        raise type(error)(f"validation data: {error}") from None


def _weights_file(trainer: Trainer) -> Mapping[str, torch.Tensor] | None:
    """Return the state_dict to start from, or None. Raises :class:`sparkdl.ParameterError`."""
    weights = trainer.weights
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        arrays = {n: torch.tensor(v) for n, v in weights.items() if isinstance(v, np.ndarray)}
        return {**weights, **arrays}
    try:
        with mappable(weights, links=True) as path:
            return safetensors.torch.load_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(
            f'weights="{os.fspath(weights)}" cannot be read as a safetensors file ({reason}). Give '
            "its path, or a state_dict."
        ) from None
