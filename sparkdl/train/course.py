"""The course of a fit: what comes between the placement of its samples and its result.

It needs no Spark: it runs on the driver, or in rank 0 of a gang that has no driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import nn

from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.consistency.base import check_recorded_parts, largest_staleness
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.registry import EngineInputs, build_engine
from sparkdl.engines.resources import FitResources
from sparkdl.errors import ParameterError, counted
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import StoredState, manifest_of_model
from sparkdl.loop.advance import catch_up
from sparkdl.loop.callbacks import Callback, added_callbacks, tell_result
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import BEST, Engine
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt, interruptible
from sparkdl.loop.loop import train
from sparkdl.loop.progress import Progress
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, recent_validations
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.model.recipe import weights_digest
from sparkdl.slices.slice_file import PackSlice
from sparkdl.train.carried import CarriedRun
from sparkdl.train.engine_inputs import load_start, packed_state, settings_of
from sparkdl.train.fit_result import result_maker, trained_model, wanted_weights
from sparkdl.train.periodic_tasks import periodic_tasks, run_identity
from sparkdl.train.place_samples import validation_set
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.rescue import Rescue
from sparkdl.train.trainer import Trainer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Start:
    """The state in which a run begins, if that is not the recipe's."""

    resuming: ResumeCandidates | None = None
    kept: StoredState | None = None
    carried: CarriedRun | None = None
    one_pass: bool = False  # of ``partial_fit``: one pass, over a part of all data
    replay: History | None = None  # its decisions are repeated


def check_replay(trainer: Trainer, replay: History | None) -> None:
    """Check that a run can repeat what was decided on the iterations of a history."""
    if replay is None:
        return
    model = trainer.consistency_model
    if bool(replay.commits) != isinstance(model, Asynchronous):
        found = "the order of asynchronous steps" if replay.commits else "no order of steps"
        raise ParameterError(
            f"replay: the history has {found}: train with the consistency= of the recorded run."
        )
    recorded = replay.decisions
    if isinstance(model, Asynchronous) and (groups := model.groups or trainer.replicas):
        for number, decisions in recorded.items():
            model.check_recorded(number, decisions, groups)
    check_recorded_parts(trainer, replay.micro_batches, replay.inner_steps)
    most, keep = largest_staleness(recorded), model.keep
    if most >= keep:
        raise ParameterError(
            f"replay: the history has gradients that are {most} versions old, and this trainer keeps "
            f"{keep}: train with consistency=sparkdl.StaleSynchronous(staleness={most})."
        )
    check_replayed_settings(replay, {"seed": trainer.seed})


def check_replayed_settings(replay: History, settings: Mapping[str, int]) -> None:
    """Raise :class:`ParameterError` if a history was recorded with other settings, as far as it tells.

    The decisions would be repeated, but on other random numbers or other rows.
    """
    recorded = replay.settings
    for name, here in settings.items():
        if recorded.get(name, here) != here:
            raise ParameterError(
                f"replay: the history was recorded with {name}={recorded[name]}, and this trainer has "
                f"{name}={here}, so the bits would differ: train with {name}={recorded[name]}."
            )


def check_replayed_data(replay: History, plan: EpochPlan) -> None:
    """Check that a history is that of a run with such data, as far as it tells."""
    first = next(iter(replay), None)
    if first is None or first["iteration"] != 1:
        return
    epochs, rows, iterations = replay.epochs(), plan.num_samples, plan.num_iterations
    found = epochs[0]["iterations"]
    if found > iterations or (len(epochs) > 1 and found < iterations):
        raise ParameterError(
            f"replay: an epoch of the history has {found:,} iterations, and one of this run has "
            f"{iterations:,}: train with the data and batch_size= of the recorded run."
        )
    batch = min(plan.batch_size, rows)
    left_out = replay.micro_batches or replay.inner_steps
    if not replay.commits and not left_out and first["samples"] != batch:
        raise ParameterError(
            f"replay: the history has {first['samples']:,} samples in an iteration, and this run has "
            f"{batch:,}: train with the batch_size= of the recorded run."
        )


@dataclass(frozen=True)
class FinishedCourse(Generic[Result]):
    """The end of a course."""

    result: Result  # of ``take``
    state: TrainState
    schedule: Schedule
    packed_best: tuple[bytes, ...] | None  # None: not kept for another pass


@dataclass(frozen=True)
class FinishedEngine:
    """An engine that has trained, and what its result is made of."""

    engine: Engine
    kinds: list[str]  # of weights
    make: Callable[..., TrainedModel]  # of a ``module`` and a ``history``
    output: Output | None
    history: History
    packed: tuple[bytes, ...] | None  # None: not wanted, or could not be collected
    callbacks: list[Callback]


def run_course(
    trainer: Trainer,
    prepared: list[PreparedModel],
    samples: SampleSet,
    validation_samples: SampleSet | None,
    start: Start,
    inputs: Callable[[PreparedModel, ValidationSet | None], EngineInputs],
    take: Callable[[FinishedEngine], Result],
    progress_of: Callable[[str], Progress],
    resources: FitResources | None = None,
    interrupts: Interrupt | None = None,
) -> FinishedCourse[Result]:
    """Try the model out, build the engine, train, and take the result from the engine.

    ``prepared`` holds one model, which is taken out of it, since its module takes memory. ``take``
    also tells the callbacks of the result; if it fails, the model is kept as :class:`Rescue` says.
    ``interrupts``: requests that do not come as signals to this process.
    """
    model, one_pass, carried = prepared.pop(), start.one_pass, start.carried
    validation = validation_set(trainer, validation_samples, model.float_dtype)
    output, sums = preflight(trainer, model, samples, validation, endless=one_pass)
    model = replace(model, sums=sums)
    validation = with_dimensions(validation, output)
    given = inputs(model, validation)
    engine, recorded = build_engine(trainer.engine, given), given.recorded
    del given  # its parts take memory
    settings = settings_of(trainer, len(samples.counts))
    if start.replay is not None:
        check_replayed_data(start.replay, engine.plan)
        check_replayed_settings(start.replay, settings)
    identity = run_identity(trainer, model, samples.handles)
    make = result_maker(trainer, model, samples, output)
    state, history = load_start(
        trainer, engine, identity, start.resuming, start.kept, carried, resources, anew=one_pass
    )
    history.note_settings(settings)
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
        make(module=model.module, history=history), trainer.freeze, trainer.unfreeze
    )
    periodic = periodic_tasks(
        trainer, engine, validation, identity, manifest_model, state, history, one_pass
    )
    progress = progress_of(_facts(trainer, model, samples))
    model = replace(model, module=nn.Module())  # the preflight's module takes memory
    rescue = Rescue(trainer, engine, identity, manifest_model, history, one_pass)
    asked = interruptible() if interrupts is None else contextlib.nullcontext(interrupts)
    with asked as interrupt, rescue, contextlib.closing(progress):
        own: list[Callback] = [*trainer.callbacks, *added_callbacks(trainer.callbacks)]
        callbacks = [rescue, *own, progress]
        config = LoopConfig.of(trainer, recorded)
        state = train(
            trainer, config, engine, schedule, periodic, callbacks, state, history, interrupt
        )
        kinds = wanted_weights(trainer, state)
        wanted = trainer.keep_optimizer_state or one_pass
        packed = packed_state(engine, lose_it=not one_pass) if wanted else None
        best = BEST in kinds and one_pass
        packed_best = tuple(engine.map_slices(PackSlice(), BEST)) if best else None
        result = take(FinishedEngine(engine, kinds, make, output, history, packed, own))
    return FinishedCourse(result, state, schedule, packed_best)


def told_model(
    done: FinishedEngine,
    trainer: Trainer,
    model: PreparedModel,
    weights: Callable[[str], torch.Tensor],
) -> TrainedModel:
    """Return the trained model with its optimizer state, once the callbacks know of it."""
    trained = trained_model(done.make, model.payload, done.kinds, weights, done.history)
    tell_result(done.callbacks, trainer, with_state(trained, done.packed, model))
    return trained


def with_state(
    trained: TrainedModel, packed: tuple[bytes, ...] | None, model: PreparedModel
) -> TrainedModel:
    """Return ``trained`` with its optimizer state, if that was collected."""
    if packed is not None:
        digest, identity = weights_digest(trained.module), ModelIdentity.of(model.layout)
        trained.optimizer_state = StoredState(packed, identity, model.optimizers, digest)
    return trained


def _facts(trainer: Trainer, model: PreparedModel, samples: SampleSet) -> str:
    """Return the model, the rows, the replicas and the engine in words, for the log."""
    kind = type(model.module).__name__
    size = counted(sum(parameter.numel() for parameter in model.module.parameters()), "parameter")
    rows, replicas = counted(sum(samples.counts), "row"), counted(len(samples.counts), "replica")
    return f'{kind} of {size} on {rows}: {replicas}, engine="{trainer.engine}"'
