"""The part of a fit before the data is read: build the model and its plans, and check them."""

from __future__ import annotations

import fnmatch
import logging
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from pyspark import cloudpickle
from torch import nn

from sparkdl.care.hints import text_of
from sparkdl.codec.files import mappable
from sparkdl.consistency.base import Consistency
from sparkdl.data.columns.base import Specs
from sparkdl.errors import (
    ModelError,
    ParameterError,
    UserError,
    cannot_travel,
    nearest,
    pickling,
    text_for_number,
)
from sparkdl.infer.evaluate import check_metrics
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import not_tensors
from sparkdl.loop.schedule import Schedule
from sparkdl.metrics.named import resolve
from sparkdl.model.buffers import TrainingOptions, check_rules
from sparkdl.model.flat import Layout, TensorRange, check_memory, layout_of
from sparkdl.model.preparation import check_modules, dumps, passing_buffers
from sparkdl.model.recipe import Recipe
from sparkdl.replica.compare import Description, describe
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.optimizer_probe import SEVERAL, probe_cut_rule
from sparkdl.slices.optimizer_step import wants_loss
from sparkdl.slices.section import GradBucket, compress
from sparkdl.train.spec import TrainerSpec
from sparkdl.usercode import accompanied

logger = logging.getLogger("sparkdl")


@dataclass
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

    def weigh_classes(self, table: tuple[float, ...]) -> None:
        """Set the weight of each class, which the rows of the data decide."""
        self._change(options=replace(self.recipe.options, class_weights=table))

    def read_by(self, trainer: TrainerSpec) -> None:
        """Call the model as the columns of ``trainer`` say, which the rows of the data decide."""
        if self.recipe.signature != trainer.signature:
            self._change(signature=trainer.signature)

    def _change(self, **fields: Any) -> None:
        self.recipe = replace(self.recipe, **fields)
        self.payload = pickled(self.recipe)

    def drop_module(self) -> None:
        """Free the memory of the module, once nothing more is tried on it."""
        self.module = nn.Module()

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


def prepare(trainer: TrainerSpec, start: TrainedModel | None) -> PreparedModel:
    """Build everything that needs no data, and check it."""
    trainer = trainer.settled()
    if trainer.validation is not None:
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


def _tell_of_compilation(trainer: TrainerSpec) -> None:
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


def _weights_file(trainer: TrainerSpec) -> Mapping[str, torch.Tensor] | None:
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


def pickled(recipe: Recipe) -> bytes:
    """Return the recipe as bytes. Raises :class:`ModelError`, which names what cannot be pickled."""
    built = (
        "Pass a function that builds the module (model=make_model), and open files, locks, "
        "connections and Spark sessions inside it."
    )
    remedy = "Use a function or class of an importable module, with no open resource in it."
    names = ("loss", "optimizer", "augment", "compression")
    parts = [(name, getattr(recipe, name), remedy) for name in names]
    parts += [("output", recipe.signature.part, remedy), ("model", None, built)]
    return travelling(recipe, [("model", recipe.model, built), *parts], ModelError, opened=True)


def travelling(
    whole: Any,
    parts: Iterable[tuple[str, Any, str]],
    kind: type[UserError] = ParameterError,
    opened: bool = False,
) -> bytes:
    """Return ``whole`` as bytes, which can be ``opened`` here if that is asked for.

    Raises an error of a ``kind`` that names the first of the ``parts`` that cannot be pickled, else
    the last one: each has a name, a value and a remedy.
    """
    try:
        data = dumps(accompanied(whole))
        if opened:
            pickle.loads(data)
        return data
    except Exception as error:
        cause = error
    for name, part, remedy in parts:
        with pickling(name, remedy, kind):
            pickle.loads(dumps(accompanied(part)))
    raise kind(cannot_travel(name, cause, remedy))


def check_columns(specs: Specs) -> None:
    """Raise :class:`ModelError` if the function of a column cannot be pickled."""
    for name, spec in specs.items():
        remedy = "Use a function of an importable module, with no open resource in it."
        with pickling(f'the function of columns["{name}"]', remedy, ModelError):
            pickle.loads(cloudpickle.dumps(spec))


def build_model(payload: bytes, reported: bool = False) -> nn.Module:
    """Return the module of a pickled recipe. Raises :class:`ModelError` if its function fails.

    With ``reported``, libraries may report what they load.
    """
    try:
        return pickle.loads(payload).build(reported)
    except ModelError:
        raise
    except Exception as error:
        said = f"model(), which is called without arguments, raised {type(error).__name__}: {error}"
        if "CUDA" in said or "NVIDIA" in said:
            said += ". Name no device in it: each task moves the model to its GPU, if it has one."
        raise ModelError(said) from error


def plan_optimizer(
    recipe: Recipe, module: nn.Module, slices: int | None, word: str = "optimizer"
) -> OptimizerSpec:
    """Return the plan of the recipe's optimizers on ``module``.

    ``slices`` None: as many as they allow; ``word`` names them in messages.
    """
    named = dict(module.named_parameters())
    layout = layout_of(module)
    parameters = [named[s.name] for s in layout.segments if s.kind == "parameter"]
    try:
        plan = probe_cut_rule(OptimizerSpec.of(recipe, parameters, module), parameters, module)
    except ModelError as error:
        if word == "optimizer":
            raise
        raise ModelError(f"{word}: {error}") from error
    except Exception as error:
        if problem := text_for_number(recipe.optimizer):
            raise ModelError(f"the {word} cannot be built: {problem}") from error
        # Muon says: "only supports 2D parameters"
        one_kind_only = word == "optimizer" and "parameters" in str(error)
        raise ModelError(
            f"the {word} cannot be built ({type(error).__name__}: {text_of(error)}). Give a "
            "torch.optim class, a partial of one such as partial(torch.optim.Adam, lr=1e-3), or a "
            "callable that is given the module and returns an optimizer."
            + (f" {SEVERAL}" if one_kind_only else "")
        ) from error
    if not any(plan.members):
        raise ModelError(
            f"the {word} has no trainable parameter of the model, so nothing would be trained: "
            "give it the parameters of the module that it is built for."
        )
    if slices is not None and slices > 1 and not plan.separate:
        raise ModelError(
            f"{word} {plan.name} uses all parameters together, so they must be in one slice, "
            f"but there are {slices}: set slices=1."
        )
    return plan


def check_closures(model: Consistency, *plans: OptimizerSpec) -> None:
    """Check that no optimizer needs a loss that a consistency model cannot give it."""
    if model.keep == 1 and model.outer_optimizer is None:
        return
    for part in (part for plan in plans for part in plan.parts):
        if wants_loss(part.kind):  # type: ignore[arg-type]
            raise ModelError(
                f"optimizer {part.name} with consistency={type(model).__name__}: its step needs the "
                "loss of the very weights that it changes, and with this model other changes of the "
                "weights come in between. Use an optimizer whose step takes no closure, such as "
                "torch.optim.Adam, or consistency=sparkdl.Synchronous()."
            )


def check_evaluated(model: Consistency, options: TrainingOptions, plan: OptimizerSpec) -> None:
    """Check that optimizers of replicas that keep a state of their own have no ``eval()``."""
    if options.keeps_own and plan.evaluates:
        raise ModelError(
            f"optimizer {plan.name} with consistency={type(model).__name__}: the weights that count "
            "are those of its eval(), which depend on its state, and with this model each replica "
            "keeps a state of its own. Use an optimizer without eval(), such as torch.optim.AdamW, or "
            "consistency=sparkdl.Synchronous()."
        )


def check_options(options: TrainingOptions, module: nn.Module, layout: Layout) -> None:
    """Raise an error if the model does not support the options of a run."""
    check_modules(module, options.activation_checkpointing)
    tables = [segment.name for segment in layout.segments if segment.sparse]
    if options.steps_on_replicas and tables:
        what = f"local_steps={options.local_steps}"
        if options.keeps_own:
            what = f"consistency={'DiLoCo' if options.outer else 'Gossip'}"
        raise ModelError(
            f"{what} needs dense gradients, and the embedding "
            f'"{tables[0].rpartition(".")[0]}" has sparse=True: leave one of the two out.'
        )
    if options.sync_batchnorm and tables:
        raise ModelError(
            f'sync_batchnorm=True does not go with the embedding "{tables[0].rpartition(".")[0]}", '
            "which has sparse=True: leave one of the two out."
        )
    names = [s.name for s in layout.segments if s.kind == "parameter"]
    for option in ("l1", "l2"):
        value = getattr(options, option)
        for pattern in value if isinstance(value, Mapping) else ():
            if not fnmatch.filter(names, pattern):
                raise ModelError(
                    f"{option}: no trainable parameter matches "
                    f'"{pattern}".{nearest(pattern, names)} A pattern must match the whole name, '
                    'such as "encoder.*" or "*.weight".'
                )


def check_compression(recipe: Recipe, layout: Layout) -> None:
    """Raise :class:`ModelError` if the compression hook fails on this model.

    The hook is tried on the smallest parameter of each number of dimensions, twice, because it has a
    state the second time.
    """
    if recipe.compression is None:
        return
    tried: dict[int, TensorRange] = {}
    for segment in layout.segments:
        if segment.kind == "parameter" and not segment.sparse and segment.length:
            dimensions = len(segment.shape)
            if dimensions not in tried or segment.length < tried[dimensions].length:
                tried[dimensions] = segment
    for segment in tried.values():
        bucket = GradBucket(
            name=segment.name, gradient=torch.ones(segment.shape, dtype=layout.dtype)
        )
        try:
            for iteration in range(2):
                bucket = replace(bucket, iteration=iteration)
                _, kept = compress(recipe.compression, bucket, layout.dtype)
                bucket = replace(bucket, state=kept)
        except Exception as error:
            raise ModelError(
                f'compression fails on a gradient of "{segment.name}" {list(segment.shape)}: '
                f"{type(error).__name__}: {text_of(error)}. It is a function of a sparkdl.GradBucket "
                "that returns a dictionary of tensors, as sparkdl.TopK and sparkdl.PowerSGD do."
            ) from error
