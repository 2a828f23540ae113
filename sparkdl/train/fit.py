"""The order of a fit, from a trainer and data to a trained model."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.registry import EngineInputs
from sparkdl.engines.resources import FitResources
from sparkdl.errors import ParameterError
from sparkdl.gang.slots import cpus_of
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import StoredState
from sparkdl.loop.history import History
from sparkdl.loop.progress import progress_of
from sparkdl.session import context_of, is_connected, settings_of, tell_what_costs_speed
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.executors import waiting_for_locality, warming_up
from sparkdl.train.carried import CarriedRun, chosen_state, has_rows
from sparkdl.train.connected import run_connected
from sparkdl.train.course import FinishedEngine, Start, check_replay, run_course, told_model
from sparkdl.train.engine_inputs import engine_inputs
from sparkdl.train.placed_samples import PlacedSamples, data_of, replicas_of, session_of
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.shared_samples import SharedSamples
from sparkdl.train.sizes import check_gang, check_sizes
from sparkdl.train.trainer import Trainer


def fit(
    trainer: Trainer,
    data: DataFrame | RDD[Any] | SharedSamples,
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
    kept = chosen_state(start, optimizer_state)
    if is_connected(data_of(data)):
        return run_connected(
            trainer, data, resume, start, kept, any_data=any_data, replay=replay
        ).trained
    check_replay(trainer, replay)
    with warming_up(context_of(data_of(data))):
        return run(
            trainer,
            data,
            resume=resume,
            start=start,
            kept=kept,
            any_data=any_data,
            replay=replay,
        ).trained


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
    if is_connected(data):
        done = run_connected(trainer, data, resume, carried=before, one_pass=True)
    else:
        with warming_up(context_of(data)):
            done = run(trainer, data, resume=resume, carried=before, one_pass=True)
    trainer._carried[:] = [done]
    return done.trained


def run(
    trainer: Trainer,
    data: DataFrame | RDD[Any] | SharedSamples,
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    kept: StoredState | None = None,
    carried: CarriedRun | None = None,
    one_pass: bool = False,
    any_data: bool = False,
    replay: History | None = None,
) -> CarriedRun:
    """Train, and return the result and the state in which the run ended.

    ``carried`` and ``one_pass`` are of ``partial_fit``: one pass over ``data``, a part of all data.
    ``any_data``: the checkpoint may come from other data.
    """
    began = time.monotonic()
    placed = data if isinstance(data, PlacedSamples) else None
    given: Any = data_of(data)
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
        prepared, model = [model], replace(model, module=nn.Module())
        ready, profile = placed, trainer.resource_profile if trainer.engine == "gang" else None
        threads = cpus_of(context, profile)

        def inputs(tried: PreparedModel, validation: ValidationSet | None) -> EngineInputs:
            samples = ready.training
            return engine_inputs(
                trainer,
                settings,
                tried,
                samples,
                validation,
                slab,
                threads,
                resources,
                recorded=None if replay is None else replay.decisions,
            )

        def take(done: FinishedEngine) -> TrainedModel:
            return told_model(done, trainer, model, done.engine.weights)

        finished = run_course(
            trainer,
            prepared,
            placed.training,
            placed.validation,
            Start(resuming, kept, carried, one_pass, replay),
            inputs,
            take,
            lambda facts: progress_of(settings.progress, facts, began, one_pass),
            resources,
        )
    schedule = finished.schedule if one_pass else None
    return CarriedRun(finished.result, finished.state, finished.packed_best, schedule)
