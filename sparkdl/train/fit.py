"""One fit, from a trainer and data to a trained model: the order in which everything happens."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from pyspark import SparkContext
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.assemble import Assembly, preview_batch
from sparkdl.data.batches import EpochPlan
from sparkdl.data.samples import SampleSet, Source, materialize, materialize_here
from sparkdl.errors import DataError, ParameterError
from sparkdl.infer.metrics import resolve
from sparkdl.infer.output import Output
from sparkdl.infer.scoring import Scorer
from sparkdl.infer.validate import WeightedLoss
from sparkdl.replica.flat import FlatModule, Layout, layout_of
from sparkdl.replica.recipe import Recipe
from sparkdl.replica.run import Run
from sparkdl.session import context_of, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.train.callbacks import ProgressBar
from sparkdl.train.checkpointing import Checkpointer, Identity, Resuming
from sparkdl.train.continuing import (
    Carried,
    PackSlice,
    ReadCarried,
    begin_batch,
    chosen_state,
    history_of,
)
from sparkdl.train.engine import AVERAGE, BEST, CURRENT, Engine, ValidationSet
from sparkdl.train.history import History
from sparkdl.train.local import LocalEngine
from sparkdl.train.loop import Stage, train
from sparkdl.train.probe import (
    build_model,
    check_policy,
    check_scorer,
    check_single_rows,
    pickled,
    plan_optimizer,
    try_model,
)
from sparkdl.train.progress import first_state
from sparkdl.train.resources import Resources
from sparkdl.train.schedule import Schedule
from sparkdl.train.shuffle import ShuffleEngine
from sparkdl.train.state import TrainState
from sparkdl.train.trained import TrainedModel
from sparkdl.train.trainer import Trainer
from sparkdl.train.triggers import MaxEpoch
from sparkdl.train.validation import Validator, best_of

INLINE_BYTES = 1 << 20


def fit(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    optimizer_state: bool | None = None,
) -> TrainedModel:
    """See :meth:`sparkdl.Trainer.fit`."""
    if resume is not None and start is not None:
        raise ParameterError(
            "resume= and start= exclude each other: a resumed run has its weights."
        )
    slices = chosen_state(start, optimizer_state)
    trained, _ = run(trainer, data, resume=resume, start=start, slices=slices)
    return trained


def run(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    slices: tuple[bytes, ...] | None = None,
    carried: Carried | None = None,
    only_state: bool = False,
    one_pass: bool = False,
) -> tuple[TrainedModel, TrainState]:
    """Train; the result and where the run ended.

    ``slices``: state to begin with. ``carried``: an earlier pass to go on from. ``only_state``: of a
    checkpoint its state is wanted, whatever data it was made with. ``one_pass``: stop after it.
    """
    context = context_of(data)
    settings = settings_of(context)
    tell_what_costs_speed(context)
    model = _prepare(trainer, start)
    resuming = None if resume is None else Resuming(trainer, resume)
    replicas = trainer.replicas or (resuming and resuming.replicas) or context.defaultParallelism
    slab = SlabConfig.new(settings.slab_dir, context.applicationId)
    bar = ProgressBar(settings.progress)
    with Resources(context, slab) as resources, contextlib.closing(bar):
        source = _source(trainer, data, replicas, model.float_dtype, slab)
        samples = _materialize(trainer, source, resources)
        validation = _validation_set(trainer, source, samples, resources)
        output = _try_out(trainer, model, samples, validation)
        engine = _engine(trainer, context, model, samples, replicas, resources)
        identity = Identity.of(trainer, model.layout, samples.handles, [model.optimizer.name])
        state, history = _begin(
            trainer, engine, None if only_state else identity, resuming, slices, carried, resources
        )
        if one_pass:
            trainer = replace_stop(trainer, state.epoch + 1)
        model.schedule.catch_up(state)
        stages = _stages(trainer, engine, validation, identity, history)
        state = train(
            trainer, engine, model.schedule, stages, [*trainer.callbacks, bar], state, history
        )
        flats = _weights(trainer, engine, state)
        kept = trainer.keep_optimizer_state or one_pass
        packed = tuple(engine.with_states(PackSlice())) if kept else None
    results = {
        which: TrainedModel(
            module=_with_weights(pickle.loads(model.payload), flat),
            model=trainer.model,
            loss=trainer.loss,
            features=trainer.feature_columns,
            label=trainer.label_columns,
            columns=trainer.columns,
            fields=samples.fields[: samples.num_features + samples.num_labels],
            num_features=samples.num_features,
            float_dtype=model.float_dtype,
            output=output,
            history=history,
        )
        for which, flat in flats.items()
    }
    trained = results[CURRENT]
    trained.ema, trained.best = results.get(AVERAGE), results.get(BEST)
    trained.optimizer_state = packed
    return trained, state


@dataclass(frozen=True)
class _Model:
    """The recipe and what follows from it; ``module`` is for trying."""

    recipe: Recipe
    payload: bytes
    module: nn.Module
    layout: Layout
    optimizer: OptimizerPlan
    schedule: Schedule

    @property
    def float_dtype(self) -> str:
        return str(self.layout.dtype).removeprefix("torch.")


def _prepare(trainer: Trainer, start: TrainedModel | None) -> _Model:
    """Build everything that needs no data, and find what is wrong with it."""
    weights = _weights_file(trainer) if start is None else start.module.state_dict()
    policy = replace(
        trainer.policy, weighted=trainer.weight is not None or trainer.class_weights is not None
    )
    recipe = Recipe(
        trainer.model,
        trainer.loss,
        trainer.optimizer,
        trainer.seed,
        policy,
        weights,
        trainer.strict_weights,
        tuple(trainer.freeze),
        tuple(trainer.unfreeze),
        trainer.augment,
    )
    payload = pickled(recipe)
    module = build_model(payload)
    layout = layout_of(module)
    check_policy(policy, module, layout)
    optimizer = plan_optimizer(recipe, module, trainer.slices)
    schedule = Schedule(optimizer, trainer.schedule, trainer.schedule_per, trainer.schedule_metric)
    return _Model(recipe, payload, module, layout, optimizer, schedule)


def _weights_file(trainer: Trainer) -> Mapping[str, torch.Tensor] | None:
    """The state_dict to start from."""
    weights = trainer.weights
    if weights is None or isinstance(weights, Mapping):
        return weights
    try:
        return safetensors.torch.load_file(str(weights))
    except (OSError, safetensors.SafetensorError) as error:
        raise ParameterError(
            f'weights="{os.fspath(weights)}" cannot be read as a safetensors file ({error}). Give '
            "its path, or a state_dict."
        ) from None


def _source(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    replicas: int,
    float_dtype: str,
    slab: SlabConfig,
) -> Source:
    return Source(
        data,
        trainer.feature_columns,
        trainer.label_columns,
        replicas,
        float_dtype,
        slab,
        columns=trainer.columns,
        weight=trainer.weight,
    )


def _materialize(trainer: Trainer, source: Source, resources: Resources) -> SampleSet:
    if trainer.engine == "local":
        return materialize_here(source)
    return materialize(source, resources.persist)


def _assembly(trainer: Trainer, samples: SampleSet, float_dtype: str) -> Assembly:
    """How training rows become mini-batches, but for ``augment``, which travels with the recipe."""
    return Assembly(
        num_features=samples.num_features,
        num_labels=samples.num_labels,
        weighted=samples.weighted,
        bucketing=trainer.bucketing,
        float_dtype=float_dtype,
        seed=trainer.seed,
    )


def _validation_set(
    trainer: Trainer, training: Source, samples: SampleSet, resources: Resources
) -> ValidationSet | None:
    """The validation's samples, in slabs beside the training's."""
    validation = trainer.validation
    if validation is None:
        return None
    try:
        found = _materialize(trainer, replace(training, data=validation.data), resources)
    except DataError as error:
        raise DataError(f"validation data: {error}") from None
    for mine, theirs in zip(found.fields, samples.fields, strict=True):
        if mine != theirs:
            raise DataError(
                f'validation data: "{mine.name}" is {mine}, in the training data {theirs}.'
            )
    scorer = Scorer(
        trainer.loss,
        tuple(resolve(validation.metrics)),
        WeightedLoss(trainer.loss) if samples.weighted else None,
    )
    assembly = _assembly(trainer, samples, training.float_dtype)
    return ValidationSet(found, scorer, assembly, validation.batch_size)


def _try_out(
    trainer: Trainer, model: _Model, samples: SampleSet, validation: ValidationSet | None
) -> Output | None:
    """Run model, loss and metrics on a few rows, here; what the model puts out."""
    assembly = replace(_assembly(trainer, samples, model.float_dtype), augment=trainer.augment)
    batch = preview_batch(assembly, samples.preview, augment=True)
    output = try_model(model.module, model.recipe, batch, samples.fields, samples.num_features)
    plan = EpochPlan(samples.counts, trainer.batch_size * trainer.local_steps)
    limit = trainer.stop.limit(plan.num_iterations)
    check_single_rows(model.module, batch.inputs, plan, limit, trainer.policy)
    metrics = list(validation.scorer.higher_is_better) if validation else []
    model.schedule.check(limit, plan.num_iterations, metrics)
    if validation is not None:
        check_scorer(model.module, validation)
    return output


def _engine(
    trainer: Trainer,
    context: SparkContext,
    model: _Model,
    samples: SampleSet,
    replicas: int,
    resources: Resources,
) -> Engine:
    total = sum(samples.counts)
    batch_size = trainer.batch_size * trainer.local_steps
    made = Run(
        resources.slab,
        trainer.seed,
        replicas,
        trainer.slices or (replicas if model.optimizer.separate else 1),
        _assembly(trainer, samples, model.float_dtype),
        tuple(max(1, round(trainer.batch_size * rows / total)) for rows in samples.counts),
        int(context.getConf().get("spark.task.cpus", "1") or 1),
    )
    if trainer.engine == "local":
        return LocalEngine(samples, made, model.payload, batch_size)
    return ShuffleEngine(
        samples, model.layout, made, model.payload, trainer.policy, batch_size, resources
    )


def _begin(
    trainer: Trainer,
    engine: Engine,
    identity: Identity | None,
    resuming: Resuming | None,
    slices: tuple[bytes, ...] | None,
    carried: Carried | None,
    resources: Resources,
) -> tuple[TrainState, History]:
    """Give the engine its first state; where the run stands and what happened before."""
    per_epoch = engine.plan.num_iterations
    restored = None if resuming is None else resuming.restore(engine, identity)
    if restored is not None:
        state = restored.state
        if identity is None:
            state = begin_batch(state, per_epoch)
        return state, restored.history
    if carried is not None:
        slices = carried.trained.optimizer_state
    if slices is not None:
        large = sum(map(len, slices)) > INLINE_BYTES and trainer.engine != "local"
        engine.start(ReadCarried(resources.broadcast(slices) if large else slices))
    else:
        engine.start()
    if carried is not None:
        return begin_batch(carried.state, per_epoch), history_of(carried.trained)
    return begin_batch(first_state(trainer.policy), per_epoch), History()


def _stages(
    trainer: Trainer,
    engine: Engine,
    validation: ValidationSet | None,
    identity: Identity,
    history: History,
) -> list[Stage]:
    stages: list[Stage] = []
    if validation is not None and trainer.validation is not None:
        stages.append(Validator(engine, trainer.validation, validation, history))
    if trainer.checkpoint is not None:
        stages.append(Checkpointer(trainer, engine, identity, history))
    return stages


def _weights(trainer: Trainer, engine: Engine, state: TrainState) -> dict[str, torch.Tensor]:
    """The flat vectors that the result holds."""
    wanted = [CURRENT]
    if trainer.ema is not None:
        wanted.append(AVERAGE)
    kept = trainer.validation.best if trainer.validation is not None else None
    if kept is not None and best_of(state, kept) is not None:
        wanted.append(BEST)
    return {which: engine.weights(which) for which in wanted}


def replace_stop(trainer: Trainer, epochs: int) -> Trainer:
    """The trainer with another end: one pass over what it is given."""
    return replace(trainer, stop=MaxEpoch(epochs))


def _with_weights(recipe: Recipe, weights: torch.Tensor) -> nn.Module:
    """The recipe's module with ``weights`` (a flat vector) in it, each tensor its own memory."""
    flat = FlatModule(recipe.build())
    flat.flat.copy_(weights)
    flat.refresh()
    for _, parameter in flat.parameters:
        parameter.data = parameter.data.clone()
    return flat.module.eval()
