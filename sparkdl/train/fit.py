"""The order of a fit, from a trainer and data to a trained model."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame
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
from sparkdl.infer.checkpoint_model import told_in_manifest
from sparkdl.infer.kept_state import StoredState
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import (
    BEST,
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
from sparkdl.model.recipe import weights_digest
from sparkdl.session import context_of, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice, ReadCarried, WithoutAverage
from sparkdl.spark.executors import waiting_for_locality
from sparkdl.spark.warm_up import warming_up
from sparkdl.train.carried import CarriedRun, begin_batch, chosen_state, has_rows
from sparkdl.train.engine_inputs import engine_inputs
from sparkdl.train.fit_result import result_maker, trained_model, wanted_weights
from sparkdl.train.gang_checks import check_gang
from sparkdl.train.periodic_tasks import run_identity, stages_of
from sparkdl.train.place_samples import validation_set
from sparkdl.train.placed_samples import PlacedSamples, data_of, replicas_of, session_of
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.rescue import Rescue
from sparkdl.train.sizes import check_sizes
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def fit(
    trainer: Trainer,
    data: DataFrame | RDD[Any] | PlacedSamples,
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
    with warming_up(context_of(data_of(data))):
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
    data: DataFrame | RDD[Any] | PlacedSamples,
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
        data: The training data, or samples that were placed before.
        resume: The checkpoint to resume from, as in :meth:`sparkdl.Trainer.fit`.
        start: The earlier result with whose weights to begin.
        kept: The optimizer state to begin with.
        carried: The end of the previous pass, for ``partial_fit``.
        one_pass: True for ``partial_fit``: one pass over ``data``, which is a part of all data.
        any_data: The checkpoint may come from other data.
    """
    began = time.monotonic()
    placed, given = (data, data.data) if isinstance(data, PlacedSamples) else (None, data)
    context = context_of(given)
    settings = settings_of(context, session_of(given))
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
    if placed is not None:
        placed.check(trainer, model.float_dtype)
        replicas = placed.replicas
    else:
        checkpointed = None if resuming is None else resuming.replicas
        replicas = replicas_of(trainer, context, settings, trainer.replicas or checkpointed)
    check_sizes(trainer, model.layout, replicas, context, settings.slab_dir)
    beside = "" if placed is None else placed.slab.name
    slab = SlabConfig.new(settings.slab_dir, context.applicationId, beside)
    if trainer.engine == "gang":
        check_gang(trainer, model, context, replicas)
    with (
        waiting_for_locality(context),
        FitResources(context, slab, settings.timeout) as resources,
    ):
        if placed is None:
            placed = PlacedSamples.within(resources, trainer, given, replicas, model.float_dtype)
        samples = placed.training
        validation = validation_set(trainer, placed.validation, model.float_dtype)
        output, sums = preflight(trainer, model, samples, validation, endless=one_pass)
        model = replace(model, sums=sums)
        validation = with_dimensions(validation, output)
        engine = build_engine(
            trainer.engine,
            engine_inputs(trainer, settings, model, samples, validation, resources),
        )
        identity = run_identity(trainer, model, samples.handles)
        result = result_maker(trainer, model, samples, output)
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
            callbacks = [rescue, *trainer.callbacks, progress]
            config = LoopConfig.of(trainer)
            state = train(
                trainer, config, engine, schedule, stages, callbacks, state, history, interrupt
            )
            kinds = wanted_weights(trainer, state)
            trained = trained_model(result, model.payload, kinds, engine.weights, history)
            wanted = trainer.keep_optimizer_state or one_pass
            packed = _packed(engine, lose_it=not one_pass) if wanted else None
            best = BEST in kinds and one_pass
            packed_best = tuple(engine.map_slices(PackSlice(), BEST)) if best else None
    if packed is not None:
        digest = weights_digest(trained.module)
        trained.optimizer_state = StoredState(packed, identity.model, model.optimizers, digest)
    return CarriedRun(trained, state, packed_best, schedule if one_pass else None)


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
