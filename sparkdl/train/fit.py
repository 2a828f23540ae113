"""The order of a fit, from a trainer and data to a trained model."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.core.rdd import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.data.samples import SampleSet
from sparkdl.engines.registry import build_engine
from sparkdl.engines.resources import FitResources
from sparkdl.errors import ParameterError
from sparkdl.infer.checkpoint_model import manifest_of_model
from sparkdl.infer.kept_state import StoredState
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.advance import catch_up
from sparkdl.loop.callbacks import added_callbacks
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import (
    BEST,
)
from sparkdl.loop.history import History
from sparkdl.loop.history_tables import counted
from sparkdl.loop.interrupt import interruptible
from sparkdl.loop.loop import train
from sparkdl.loop.progress import progress_of
from sparkdl.loop.state import recent_validations
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.model.recipe import weights_digest
from sparkdl.session import context_of, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice
from sparkdl.spark.executors import waiting_for_locality
from sparkdl.spark.warm_up import warming_up
from sparkdl.train.carried import CarriedRun, chosen_state, has_rows
from sparkdl.train.engine_inputs import engine_inputs, load_start, packed_state
from sparkdl.train.fit_result import result_maker, trained_model, wanted_weights
from sparkdl.train.periodic_tasks import run_identity, stages_of
from sparkdl.train.place_samples import validation_set
from sparkdl.train.placed_samples import PlacedSamples, data_of, replicas_of, session_of
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.rescue import Rescue
from sparkdl.train.sizes import check_gang, check_sizes
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def fit(
    trainer: Trainer,
    data: DataFrame | RDD[Any] | PlacedSamples,
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    optimizer_state: bool | None = None,
    any_data: bool = False,
    replay: History | None = None,
) -> TrainedModel:
    """Train a model; see :meth:`sparkdl.Trainer.fit`."""
    if any_data and resume is None:
        raise ParameterError(
            "any_data= has no effect without resume=: pass resume= too, or leave it out."
        )
    if resume is not None and start is not None:
        raise ParameterError(
            "resume= and start= cannot be combined: a resumed run has its own weights. Pass one of "
            "them."
        )
    recorded = recorded_staleness(trainer, replay)
    kept = chosen_state(start, optimizer_state)
    with warming_up(context_of(data_of(data))):
        return run(
            trainer,
            data,
            resume=resume,
            start=start,
            kept=kept,
            any_data=any_data,
            recorded=recorded,
        ).trained


def recorded_staleness(trainer: Trainer, replay: History | None) -> dict[int, int] | None:
    """Return the staleness of each iteration of a history; None without a history.

    Raises:
        ParameterError: The consistency model keeps too few versions to repeat it.
    """
    if replay is None:
        return None
    recorded = replay.staleness
    most, keep = max(recorded.values(), default=0), trainer.consistency_model.keep
    if most >= keep:
        raise ParameterError(
            f"replay: the history has gradients that are {most} versions old, and this trainer keeps "
            f"{keep}: train with consistency=sparkdl.StaleSynchronous(staleness={most})."
        )
    return recorded


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
    recorded: Mapping[int, int] | None = None,
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
        recorded: The staleness to repeat, by the number of the iteration; None: no replay.
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
    directory, beside = settings.slab_dir, ""
    if placed is not None:
        directory, beside = placed.slab.directory, placed.slab.name
    slab = SlabConfig.new(directory, context.applicationId, beside)
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
            engine_inputs(
                trainer,
                settings,
                model,
                samples,
                validation,
                resources,
                replays=recorded is not None,
            ),
        )
        identity = run_identity(trainer, model, samples.handles)
        result = result_maker(trainer, model, samples, output)
        state, history = load_start(
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
        manifest_model = manifest_of_model(
            result(module=model.module, history=history), trainer.freeze, trainer.unfreeze
        )
        stages = stages_of(
            trainer, engine, validation, identity, manifest_model, state, history, one_pass
        )
        facts = _facts(trainer, model, samples)
        progress = progress_of(settings.progress, facts, began, one_pass)
        model = replace(model, module=nn.Module())  # the preflight's module takes memory
        rescue = Rescue(trainer, engine, identity, manifest_model, history, one_pass)
        with interruptible() as interrupt, rescue, contextlib.closing(progress):
            own = [*trainer.callbacks, *added_callbacks(trainer.callbacks)]
            callbacks = [rescue, *own, progress]
            config = LoopConfig.of(trainer, recorded)
            state = train(
                trainer, config, engine, schedule, stages, callbacks, state, history, interrupt
            )
            kinds = wanted_weights(trainer, state)
            trained = trained_model(result, model.payload, kinds, engine.weights, history)
            wanted = trainer.keep_optimizer_state or one_pass
            packed = packed_state(engine, lose_it=not one_pass) if wanted else None
            best = BEST in kinds and one_pass
            packed_best = tuple(engine.map_slices(PackSlice(), BEST)) if best else None
    if packed is not None:
        digest = weights_digest(trained.module)
        trained.optimizer_state = StoredState(packed, identity.model, model.optimizers, digest)
    for callback in own:
        callback.on_result(trainer, trained)
    return CarriedRun(trained, state, packed_best, schedule if one_pass else None)


def _facts(trainer: Trainer, model: PreparedModel, samples: SampleSet) -> str:
    """Return the model, the rows, the replicas and the engine in words, for the log."""
    kind = type(model.module).__name__
    size = counted(sum(parameter.numel() for parameter in model.module.parameters()), "parameter")
    rows, replicas = counted(sum(samples.counts), "row"), counted(len(samples.counts), "replica")
    return f'{kind} of {size} on {rows}: {replicas}, engine="{trainer.engine}"'
