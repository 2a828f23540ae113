"""The trainer: what to train, and ``fit``."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.batches import EpochPlan
from sparkdl.data.samples import Source, materialize, materialize_here
from sparkdl.errors import ParameterError, nearest, raise_all
from sparkdl.replica.flat import FlatModule, layout_of
from sparkdl.replica.recipe import Recipe
from sparkdl.replica.run import Run
from sparkdl.session import context_of, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.train.callbacks import Callback, ProgressBar
from sparkdl.train.engine import Engine
from sparkdl.train.local import LocalEngine
from sparkdl.train.loop import train
from sparkdl.train.probe import build_model, check_single_rows, pickled, plan_optimizer, try_model
from sparkdl.train.resources import Resources
from sparkdl.train.schedule import PER, Schedule
from sparkdl.train.shuffle import ShuffleEngine
from sparkdl.train.trained import TrainedModel
from sparkdl.train.triggers import MaxEpoch, Trigger

ENGINES = ("local", "shuffle")
TEN_EPOCHS = MaxEpoch(10)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What to train and how; :meth:`fit` trains. Mistakes raise :class:`sparkdl.ParameterError`.

    The result is a function of these values and of the data: the same on any number of executors,
    bit for bit on CPUs.
    """

    model: Callable[[], nn.Module] | nn.Module
    """A callable that builds the module (called with seeded random numbers), or a module, which is
    copied and not changed."""
    loss: Callable[..., torch.Tensor]
    """``loss(output, target)`` -> mean over the batch. ``loss(output)`` without a label; with
    several labels ``target`` is a tuple."""
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    """A ``torch.optim`` class or a partial of one, given the trainable parameters; or any callable
    of the module that returns an optimizer (for parameter groups) or several. Or several by name:
    a mapping from submodules, parameters or patterns ("*.bias"; "" is all the rest)."""
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    """A partial of a ``torch.optim.lr_scheduler`` class, or a callable of the optimizer that
    returns a scheduler. With several optimizers each gets one."""
    schedule_per: str = "iteration"
    """"iteration" or "epoch": when the schedule steps."""
    schedule_metric: str | None = None
    """The validation's metric that ``ReduceLROnPlateau`` follows."""
    features: str | Sequence[str] = "features"
    """Feature column, or a list of columns: each is an input of its own, ``model(a, b)``."""
    label: str | Sequence[str] | None = "label"
    """Label column, a list of columns, or None."""
    batch_size: int = 256
    """The global batch: samples of all replicas together. The last batch of an epoch may be short."""
    replicas: int | None = None
    """M; None: the cluster's task slots (``spark.default.parallelism``)."""
    slices: int | None = None
    """N; None: M."""
    engine: str = "shuffle"
    """"local" (this process, for debugging) or "shuffle"."""
    stop: Trigger = TEN_EPOCHS
    """When to stop; triggers combine with ``&`` and ``|``."""
    callbacks: Sequence[Callback] = ()
    """Called in order around the loop."""
    seed: int = 0
    """Of the initial weights, the shuffling and every random draw inside the model."""

    def __post_init__(self) -> None:
        raise_all(ParameterError, list(_problems(self)))

    @property
    def feature_columns(self) -> tuple[str, ...]:
        return (self.features,) if isinstance(self.features, str) else tuple(self.features)

    @property
    def label_columns(self) -> tuple[str, ...]:
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    def fit(self, data: DataFrame | RDD) -> TrainedModel:
        """Train on ``data``: a DataFrame, or an RDD of ``(features, label)`` or ``Sample``.

        Raises :class:`sparkdl.UserError` before anything trains where the data, the model or a
        parameter cannot work, and :class:`sparkdl.TrainingError` where an iteration fails for good.
        """
        context = context_of(data)
        settings = settings_of(context)
        tell_what_costs_speed(context)
        recipe = Recipe(self.model, self.loss, self.optimizer, self.seed)
        payload = pickled(recipe)
        module = build_model(payload)
        layout = layout_of(module)
        float_dtype = str(layout.dtype).removeprefix("torch.")
        replicas = self.replicas or context.defaultParallelism
        slices = self.slices or replicas
        schedule = Schedule(
            plan_optimizer(recipe, module, slices),
            self.schedule,
            self.schedule_per,
            self.schedule_metric,
        )
        slab = SlabConfig.new(settings.slab_dir, context.applicationId)
        source = Source(data, self.feature_columns, self.label_columns, replicas, float_dtype, slab)
        bar = ProgressBar(settings.progress)
        with Resources(context, slab) as resources, contextlib.closing(bar):
            here = self.engine == "local"
            samples = materialize_here(source) if here else materialize(source, resources.persist)
            output = try_model(
                module, self.loss, samples.preview, samples.fields, samples.num_features, self.seed
            )
            plan = EpochPlan(samples.counts, self.batch_size)
            limit = self.stop.limit(plan.num_iterations)
            schedule.check(limit, plan.num_iterations)
            check_single_rows(module, samples.preview[: samples.num_features], plan, limit)
            run = Run(
                slab,
                self.seed,
                replicas,
                slices,
                samples.num_features,
                int(context.getConf().get("spark.task.cpus", "1") or 1),
            )
            if here:
                engine: Engine = LocalEngine(samples.handles, run, payload, self.batch_size)
            else:
                engine = ShuffleEngine(samples, layout, run, payload, self.batch_size, resources)
            history = train(self, engine, schedule, [*self.callbacks, bar])
            weights = engine.weights()
        return TrainedModel(
            module=_with_weights(pickle.loads(payload), weights),
            model=self.model,
            loss=self.loss,
            features=self.feature_columns,
            label=self.label_columns,
            fields=samples.fields,
            num_features=samples.num_features,
            float_dtype=float_dtype,
            output=output,
            history=history,
        )


def _problems(trainer: Trainer) -> Iterator[str]:
    """What is wrong with the parameters, one sentence each with its remedy."""
    for name in ("batch_size", "replicas", "slices"):
        value = getattr(trainer, name)
        if value is None and name != "batch_size":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name}={value!r}: give a whole number of at least 1."
    if trainer.engine not in ENGINES:
        yield (
            f'engine="{trainer.engine}": use one of {", ".join(ENGINES)}.'
            f"{nearest(str(trainer.engine), ENGINES)}"
        )
    if trainer.schedule_per not in PER:
        yield f"schedule_per={trainer.schedule_per!r}: use one of {', '.join(PER)}."
    if isinstance(trainer.loss, type):
        name = trainer.loss.__name__
        yield f"loss is the class {name}: give an instance, {name}()."
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        name = type(trainer.optimizer).__name__
        yield f"optimizer is already built; give its recipe: partial(torch.optim.{name}, lr=...)."
    for name, kind, remedy in _KINDS:
        value = getattr(trainer, name)
        if not isinstance(value, kind):
            yield f"{name} is a {type(value).__name__}: {remedy}."
    for name, value in (("features", trainer.features), ("label", trainer.label or ())):
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            yield f"{name}={value!r}: give a column name, or a list of names."
        elif name == "features" and not names:
            yield "features is empty: name at least one column."
    if isinstance(trainer.callbacks, (list, tuple)):
        for callback in trainer.callbacks:
            if isinstance(callback, type):
                yield f"callback {callback.__name__} is a class: give an instance of it."
            elif not isinstance(callback, Callback):
                yield f"callback {callback!r} is not a sparkdl.Callback."
    if isinstance(trainer.seed, bool) or not isinstance(trainer.seed, int):
        yield f"seed={trainer.seed!r}: give a whole number."
    elif not 0 <= trainer.seed < 2**63:
        yield f"seed={trainer.seed}: give a number from 0 to 2**63 - 1."


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("model", Callable, "give a function that builds a torch.nn.Module, or a module"),
    ("loss", Callable, "give a function of (output, target), such as torch.nn.MSELoss()"),
    (
        "optimizer",
        (Callable, Mapping, torch.optim.Optimizer),
        "give a torch.optim class, or a partial of one such as partial(torch.optim.Adam, lr=1e-3)",
    ),
    (
        "schedule",
        (Callable, type(None)),
        "give a partial of a torch.optim.lr_scheduler class, such as partial(StepLR, step_size=10)",
    ),
    ("stop", Trigger, "give a trigger, such as sparkdl.max_epoch(10)"),
    ("callbacks", (list, tuple), "give a list of sparkdl.Callback objects"),
)


def _with_weights(recipe: Recipe, weights: torch.Tensor) -> nn.Module:
    """The recipe's module with ``weights`` (a flat vector) in it, each tensor its own memory."""
    flat = FlatModule(recipe.build())
    flat.flat.copy_(weights)
    flat.refresh()
    for _, parameter in flat.parameters:
        parameter.data = parameter.data.clone()
    return flat.module.eval()
