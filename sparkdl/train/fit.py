"""The order of a fit, from a trainer and data to a trained model."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from dataclasses import replace
from typing import Any

from pyspark import SparkContext
from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.save import RunIdentity
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.data.samples import SampleSet
from sparkdl.engines.registry import build_engine
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.placement import INLINE_BYTES
from sparkdl.errors import ParameterError, TrainingError
from sparkdl.gang.slots import SLOT_SECONDS, default_replicas, task_slots
from sparkdl.infer.checkpoint_model import told_in_manifest
from sparkdl.infer.kept_state import StoredState
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.callbacks import added_callbacks
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import (
    AVERAGE,
    BEST,
    CURRENT,
    Engine,
    ReadState,
)
from sparkdl.loop.history import History
from sparkdl.loop.history_tables import counted
from sparkdl.loop.interrupt import interruptible
from sparkdl.loop.loop import train
from sparkdl.loop.progress import progress_of
from sparkdl.loop.state import TrainState, recent_validations
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.model.flat import filled
from sparkdl.model.recipe import weights_digest
from sparkdl.session import context_of, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice, ReadCarried, WithoutAverage
from sparkdl.spark.executors import waiting_for_locality
from sparkdl.spark.gpus import within_gpus
from sparkdl.spark.warm_up import warming_up
from sparkdl.train.carried import CarriedRun, begin_batch, chosen_state, has_rows
from sparkdl.train.engine_inputs import engine_inputs
from sparkdl.train.gang_checks import check_gang
from sparkdl.train.periodic_tasks import run_identity, stages_of
from sparkdl.train.place_samples import place, source, validation_set
from sparkdl.train.preflight import preflight
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.recipes import build_model
from sparkdl.train.rescue import Rescue
from sparkdl.train.sizes import check_sizes
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def fit(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    optimizer_state: bool | None = None,
    any_data: bool = False,
) -> TrainedModel:
    """Train a model; see :meth:`sparkdl.Trainer.fit`."""
    if any_data and resume is None:
        raise ParameterError("any_data= says what to do with resume=: give that too.")
    if resume is not None and start is not None:
        raise ParameterError(
            "resume= and start= exclude each other: a resumed run has its weights."
        )
    kept = chosen_state(start, optimizer_state)
    with warming_up(context_of(data)):
        return run(trainer, data, resume=resume, start=start, kept=kept, any_data=any_data).trained


def partial_fit(
    trainer: Trainer, data: DataFrame | RDD[Any], resume: str | os.PathLike[str] | None = None
) -> TrainedModel:
    """Make one pass over the data; see :meth:`sparkdl.Trainer.partial_fit`."""
    before = trainer._carried[0] if trainer._carried else None
    if before is not None:
        if not has_rows(data):
            return before.trained
        resume = None
        # this pass steps its schedule; if the pass fails, the next one makes a new schedule
        trainer._carried[:] = [replace(before, schedule=None)]
    with warming_up(context_of(data)):
        done = run(trainer, data, resume=resume, carried=before, one_pass=True)
    trainer._carried[:] = [done]
    return done.trained


def run(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    kept: StoredState | None = None,
    carried: CarriedRun | None = None,
    one_pass: bool = False,
    any_data: bool = False,
) -> CarriedRun:
    """Train, and return the result and the state in which the run ended.

    Args:
        trainer: The user's trainer.
        data: The training data.
        resume: The checkpoint to resume from, as in :meth:`sparkdl.Trainer.fit`.
        start: The earlier result with whose weights to begin.
        kept: The optimizer state to begin with.
        carried: The end of the previous pass, for ``partial_fit``.
        one_pass: True for ``partial_fit``: one pass over ``data``, which is a part of all data.
        any_data: The checkpoint may come from other data.
    """
    began = time.monotonic()
    context = context_of(data)
    session = data.sparkSession if isinstance(data, DataFrame) else SparkSession.getActiveSession()
    settings = settings_of(context, session)
    tell_what_costs_speed(context)
    model = prepare(trainer, start)
    if kept is not None:
        kept.check(ModelIdentity.of(model.layout), model.optimizers)
    resuming = (
        None
        if resume is None
        else ResumeCandidates(trainer.checkpoint, resume, one_pass or any_data)
    )
    if trainer.checkpoint is not None:
        store = CheckpointStore(trainer.checkpoint.path)
        store.prepare()
        if resuming is None and carried is None:
            store.tell_of_another_run(trainer.checkpoint.keep)
    chosen = trainer.replicas or (resuming and resuming.replicas)
    replicas = chosen or _replicas(trainer, context, settings.timeout)
    if trainer.resource_profile is None:
        replicas = within_gpus(context, replicas, bool(chosen), trainer.engine)
    check_sizes(trainer, model.layout, replicas, context, settings.slab_dir)
    slab = SlabConfig.new(settings.slab_dir, context.applicationId)
    if trainer.engine == "gang":
        check_gang(trainer, model, context, replicas)
    with (
        waiting_for_locality(context),
        FitResources(context, slab, settings.timeout) as resources,
    ):
        training = source(trainer, data, replicas, model.float_dtype, slab)
        samples = place(trainer, training, resources)
        validation = validation_set(trainer, training, samples, resources)
        output, sums = preflight(trainer, model, samples, validation, endless=one_pass)
        model = replace(model, sums=sums)
        if validation is not None and output is not None and not validation.scorer.apart:
            scorer = replace(validation.scorer, dimensions=output.dimensions)
            validation = replace(validation, scorer=scorer)
        engine = build_engine(
            trainer.engine,
            engine_inputs(trainer, settings, model, samples, validation, replicas, resources),
        )
        identity = run_identity(trainer, model, samples.handles)
        result = functools.partial(
            TrainedModel,
            model=trainer.model,
            loss=trainer.loss,
            features=trainer.feature_columns,
            label=trainer.label_columns,
            columns=trainer.columns,
            fields=samples.fields[: samples.num_features + samples.num_labels],
            num_features=samples.num_features,
            float_dtype=model.float_dtype,
            output=output,
            seed=trainer.seed,
            signature=model.recipe.signature,
        )
        state, history = _begin(
            trainer, engine, identity, resuming, kept, carried, resources, anew=one_pass
        )
        if one_pass:
            trainer = replace(trainer, stop=MaxEpoch(state.epoch + 1))
        if carried is not None and carried.schedule is not None:
            schedule = carried.schedule
            schedule.after(schedule.at, state)
        else:
            schedule = model.schedule
            state = catch_up(schedule, state, history)
        if one_pass and not schedule.follows_validations:
            state = replace(state, validations=recent_validations(state.validations))
        told = told_in_manifest(
            result(module=model.module, history=history), trainer.freeze, trainer.unfreeze
        )
        stages = stages_of(trainer, engine, validation, identity, told, state, history, one_pass)
        facts = _facts(trainer, model, samples)
        progress = progress_of(settings.progress, facts, began, one_pass)
        model = replace(model, module=nn.Module())  # the preflight's module takes memory
        rescue = Rescue(trainer, engine, identity, told, history, one_pass)
        with interruptible() as interrupt, rescue, contextlib.closing(progress):
            given = [*trainer.callbacks, *added_callbacks(trainer.callbacks)]
            callbacks = [rescue, *given, progress]
            config = LoopConfig.of(trainer)
            state = train(
                trainer, config, engine, schedule, stages, callbacks, state, history, interrupt
            )
            results = {
                which: result(
                    module=filled(build_model(model.payload), engine.weights(which)),
                    history=history,
                )
                for which in _wanted(trainer, state)
            }
            trained = results[CURRENT]
            trained.ema, trained.best = results.get(AVERAGE), results.get(BEST)
            wanted = trainer.keep_optimizer_state or one_pass
            packed = _packed(engine, lose_it=not one_pass) if wanted else None
            best = BEST in results and one_pass
            packed_best = tuple(engine.map_slices(PackSlice(), BEST)) if best else None
    if packed is not None:
        digest = weights_digest(trained.module)
        trained.optimizer_state = StoredState(packed, identity.model, model.optimizers, digest)
    for callback in given:
        callback.on_result(trainer, trained)
    return CarriedRun(trained, state, packed_best, schedule if one_pass else None)


def _replicas(trainer: Trainer, context: SparkContext, timeout: float | None) -> int:
    """Return M from the cluster; ``timeout`` bounds the wait for an executor, in seconds."""
    seconds = min(SLOT_SECONDS, timeout or SLOT_SECONDS)
    if trainer.engine == "gang":  # all ranks run at once
        return task_slots(context, trainer.resource_profile, seconds)
    return default_replicas(context, seconds)


def _packed(engine: Engine, lose_it: bool) -> tuple[bytes, ...] | None:
    """Return the state of each slice, packed, or None if it cannot be brought to the driver.

    Raises :class:`sparkdl.TrainingError` instead of returning None unless ``lose_it``.
    """
    try:
        return tuple(engine.map_slices(PackSlice()))
    except TrainingError as error:
        if not lose_it:
            raise
        logger.warning(
            "the model comes without the optimizer's state, which could not be brought to the driver: "
            "%s",
            str(error).partition("\n")[0],
        )
        return None


def _begin(
    trainer: Trainer,
    engine: Engine,
    identity: RunIdentity,
    resuming: ResumeCandidates | None,
    kept: StoredState | None,
    carried: CarriedRun | None,
    resources: FitResources,
    anew: bool,
) -> tuple[TrainState, History]:
    """Load the first state into the engine; return where the run stands, and its history.

    With ``anew`` the run stands at the beginning of the data, even if a checkpoint was written in
    the middle of a pass.
    """
    per_epoch = engine.plan.num_iterations
    restored = None if resuming is None else resuming.restore(engine, identity)
    if restored is not None:
        state = replace(restored.state, iterations_per_epoch=per_epoch)
        if anew or not restored.midway:
            state = begin_batch(state, per_epoch, each_an_epoch=anew)
        return state, restored.history

    def read(packed: tuple[bytes, ...]) -> ReadState:
        large = sum(map(len, packed)) > INLINE_BYTES and trainer.engine == "shuffle"
        carried = ReadCarried(resources.broadcast(packed) if large else packed)
        return WithoutAverage(carried) if trainer.ema is None else carried

    if carried is not None:
        kept = carried.trained.optimizer_state
    engine.load(None if kept is None else read(kept.slices))
    if carried is not None and carried.best is not None:
        engine.load(read(carried.best), which=BEST)
    if carried is not None:
        state = begin_batch(carried.state, per_epoch, each_an_epoch=True)
        return state, carried.trained.history.branch()
    return begin_batch(first_state(trainer.policy), per_epoch), History()


def _facts(trainer: Trainer, model: PreparedModel, samples: SampleSet) -> str:
    """Return the model, the rows, the replicas and the engine in words, for the log."""
    kind = type(model.module).__name__
    size = counted(sum(parameter.numel() for parameter in model.module.parameters()), "parameter")
    rows, replicas = counted(sum(samples.counts), "row"), counted(len(samples.counts), "replica")
    return f'{kind} of {size} on {rows}: {replicas}, engine="{trainer.engine}"'


def _wanted(trainer: Trainer, state: TrainState) -> list[str]:
    """Return the kinds of weights that the result holds."""
    wanted = [CURRENT]
    if trainer.ema is not None:
        wanted.append(AVERAGE)
    if state.best is not None:
        wanted.append(BEST)
    return wanted
