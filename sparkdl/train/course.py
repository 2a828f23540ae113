"""The course of a fit: what comes between the placement of its samples and its result.

It needs no Spark: it runs on the driver, in rank 0 of a gang that has no driver, or in a task.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from py4j.protocol import Py4JError

from sparkdl.care.advice import ENOUGH_ITERATIONS, Spent, advice
from sparkdl.care.hints import check_there
from sparkdl.care.rules import BALANCED
from sparkdl.checkpoint.manifest import (
    DataIdentity,
    Manifest,
    ModelIdentity,
    RunIdentity,
    consistency_text,
)
from sparkdl.checkpoint.resume import RestoredRun, ResumeCandidates
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.codec.describe import describe, describe_trainer
from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.consistency.base import check_replicas, largest_staleness
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.fields import SampleHandle, invalid_in, told_of_invalid
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.recovery import RecoveringEngine
from sparkdl.engines.registry import build_engine
from sparkdl.engines.shuffle.placement import INLINE_BYTES
from sparkdl.errors import ModelError, ParameterError, counted
from sparkdl.gang.slots import slots_now
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import manifest_of_model
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.callbacks import Callback, added_callbacks
from sparkdl.loop.engine import BEST, Engine, PendingStateWork, ReadState, StateWork
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt, interruptible
from sparkdl.loop.loop import LoopConfig, PeriodicTask, train
from sparkdl.loop.state import TrainState, recent_validations
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.loop.validation import Validator
from sparkdl.model.recipe import frozen_digest
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice, ReadCarried, WithoutAverage
from sparkdl.train.engine_inputs import Site, engine_inputs, facts_of, packed_state, settings_of
from sparkdl.train.placed_samples import as_read, balanced_weights, validation_set, with_draws
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import FitRequest, begin_batch
from sparkdl.train.result import (
    FinishedFit,
    FitEnd,
    Rescue,
    result_maker,
    trained_model,
    wanted_weights,
)
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")


def check_replay(trainer: TrainerSpec, replay: History | None) -> None:
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
    if isinstance(model, Asynchronous) and (groups := model.groups or trainer.number_of_replicas):
        for number, decisions in recorded.items():
            model.check_recorded(number, decisions, groups)
    _check_recorded_parts(trainer, replay)
    most, keep = largest_staleness(recorded), model.keep
    if most >= keep:
        raise ParameterError(
            f"replay: the history has gradients that are {most} versions old, and this trainer keeps "
            f"{keep}: train with consistency=sparkdl.StaleSynchronous(staleness={most})."
        )
    check_replayed_settings(replay, {"seed": trainer.seed})


def _check_recorded_parts(trainer: TrainerSpec, replay: History) -> None:
    """Check that a run can repeat what the replicas of a history left out."""
    micro_batches, inner_steps = replay.micro_batches, replay.inner_steps
    counts = [*micro_batches.values(), *inner_steps.values()]
    if not counts:
        return
    if micro_batches and trainer.options.steps_on_replicas:
        raise ParameterError(
            "replay: the history has replicas that left out micro-batches, which replicas with steps "
            "of their own do not: train with the consistency= and local_steps= of the recorded run."
        )
    if inner_steps and not trainer.options.outer:
        raise ParameterError(
            "replay: the history has replicas that left out steps of their own, which only those of "
            "DiLoCo do: train with the consistency= of the recorded run."
        )
    if (replicas := trainer.number_of_replicas) is not None:
        check_replicas(max(map(len, counts)), replicas)
    if trainer.engine == "gang":
        what = "micro-batches" if micro_batches else "steps of their own"
        raise ParameterError(
            f"replay: the history has replicas that left out {what}, which the ranks of a gang "
            'cannot: use engine="shuffle" or "local".'
        )
    most, steps = max(map(max, counts)), trainer.consistency_model.inner_steps
    if micro_batches and most > trainer.accumulate:
        raise ParameterError(
            f"replay: the history has replicas with {most} micro-batches, and this trainer has "
            f"accumulate={trainer.accumulate}: train with that of the recorded run."
        )
    if inner_steps and most > steps:
        raise ParameterError(
            f"replay: the history has replicas with {most} steps of their own, and this trainer has "
            f"inner_steps={steps}: train with that of the recorded run."
        )


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


@contextlib.contextmanager
def run_course(
    request: FitRequest,
    model: PreparedModel,
    samples: SampleSet,
    validation_samples: SampleSet | None,
    resuming: ResumeCandidates | None,
    site: Site,
) -> Iterator[FinishedFit]:
    """Try the model out, build the engine, and train; in the block the result is taken from it.

    If the block fails, the model is kept as :class:`Rescue` says. The module of ``model`` is freed,
    since it takes memory.
    """
    trainer, one_pass, before = request.trainer, request.one_pass, request.before
    trainer = as_read(trainer, samples, validation_samples)
    model.read_by(trainer)
    samples = replace(samples, columns=trainer.columns)
    samples = with_draws(trainer, samples, site.gang)
    if not one_pass:  # the next rows may have labels
        check_there(trainer.objective, samples)
    if trainer.class_weights == BALANCED:
        model.weigh_classes(balanced_weights(samples, site.gang))
    validation = validation_set(trainer, validation_samples, model.float_dtype)
    site.progress.doing("trying the model")
    output, sums = preflight(trainer, model, samples, validation, one_pass, site.settings.care)
    validation = with_dimensions(validation, output)
    recorded = None if request.replay is None else request.replay.decisions
    inputs = engine_inputs(trainer, site, model, samples, validation, sums, recorded)
    site.progress.doing("starting the gang" if trainer.engine == "gang" else "placing the weights")
    engine = build_engine(trainer.engine, inputs)
    slices = inputs.run.slices
    del inputs  # its parts take memory
    settings = settings_of(trainer, len(samples.counts))
    facts = facts_of(trainer, site, model, samples)
    if request.replay is not None:
        check_replayed_data(request.replay, engine.plan)
        check_replayed_settings(request.replay, settings)
    identity = run_identity(trainer, model, samples.handles)
    state, history = load_start(request, engine, identity, resuming, site)
    history.note_settings(settings)
    history.note_facts(facts)
    history.note_plan(request.plan)
    for role, placed in (("training", samples), ("validation", validation_samples)):
        found = None if placed is None else invalid_in(placed.handles)
        if found is not None:
            logger.warning("%s", told_of_invalid(role, found, trainer.handle_invalid))
            history.note_invalid(role, found, further=one_pass and role == "training")
    seen = request.has_seen(state)
    if one_pass and not seen:
        state = replace(state, batch=request.batch)
    looped = trainer if not one_pass else replace(trainer, stop=MaxEpoch(state.epoch + (not seen)))
    if before is not None and before.schedule is not None:
        schedule = before.schedule
        schedule.after(schedule.at, state)
    else:
        schedule = model.schedule
        state = catch_up(schedule, state, history)
    if one_pass and not schedule.follows_validations:
        state = replace(state, validations=recent_validations(state.validations))
    manifest_model: Mapping[str, Any] = {}
    if site.rescues or trainer.checkpoint is not None:
        make = result_maker(trainer, model, samples, output)
        manifest_model = manifest_of_model(
            make(module=model.module, history=history), trainer.freeze, trainer.unfreeze
        )  # without a name, since the module is freed below
    periodic = periodic_tasks(
        looped, engine, validation, identity, manifest_model, state, history, one_pass
    )
    site.progress.describe(_facts(trainer, model, samples))
    model.drop_module()
    rescue = Rescue(looped, engine, identity, manifest_model, history, one_pass)
    asked = contextlib.nullcontext(site.interrupt) if site.interrupt else interruptible()
    kept = rescue if site.rescues else contextlib.nullcontext()
    with asked as interrupt, kept, contextlib.closing(site.progress):
        own = [*trainer.callbacks, *added_callbacks(trainer.callbacks)]
        callbacks: list[Callback] = [rescue, *own, *site.watches, site.progress]
        config = LoopConfig(
            stop=looped.stop,
            options=trainer.options,
            histograms=trainer.histograms,
            recorded=recorded or {},
        )
        state = train(
            looped, config, engine, schedule, periodic, callbacks, state, history, interrupt
        )
        for text in advice_of(trainer, slices, samples, history, site):
            site.progress.advise(text)
        kinds = wanted_weights(trainer, state)
        wanted = trainer.keep_optimizer_state or one_pass
        packed = packed_state(engine, lose_it=not one_pass) if wanted else None
        best = BEST in kinds and one_pass
        end = FitEnd(
            samples=samples,
            output=output,
            kinds=kinds,
            state=state,
            history=history,
            packed=packed,
            packed_best=tuple(engine.map_slices(PackSlice(), BEST)) if best else None,
            schedule=schedule if one_pass else None,
        )
        yield FinishedFit(trainer, model, engine, end, own)


def advice_of(
    trainer: TrainerSpec, slices: int, samples: SampleSet, history: History, site: Site
) -> Iterator[str]:
    """Yield what would make such a run faster, if it was long enough to tell."""
    if len(history) < ENOUGH_ITERATIONS or site.resources is None:
        return
    try:
        slots = slots_now(site.resources.context)
    except (Py4JError, AttributeError):  # the JVM, or the context in it, has gone by now
        return
    timings = {name: row["median"] for name, row in history.timings().items()}
    rows, replicas = sum(samples.counts), len(samples.counts)
    yield from advice(Spent(trainer, timings, rows, replicas, slices, slots))


def load_start(
    request: FitRequest,
    engine: Engine,
    identity: RunIdentity,
    resuming: ResumeCandidates | None,
    site: Site,
) -> tuple[TrainState, History]:
    """Load the first state into the engine; return where the run stands, and its history.

    A pass stands at the beginning of the data, even if a checkpoint was written in the middle of one.
    """
    trainer, before, anew = request.trainer, request.before, request.one_pass
    per_epoch = engine.plan.num_iterations
    restored = None if resuming is None else resuming.restore(engine, identity)
    if restored is not None:
        state = replace(restored.state, iterations_per_epoch=per_epoch)
        if state.has_seen(request.batch):
            return state, restored.history
        if request.batch is not None and request.batch == state.batch:  # was under way
            anew = restored.manifest.data != identity.data
            if anew:
                logger.warning(
                    "batch %d of the stream has other rows than when it was begun: those that were "
                    "trained on until iteration %d count twice. A source that can be replayed has the "
                    "same.",
                    request.batch,
                    state.iteration,
                )
        if anew or not restored.midway:
            state = begin_batch(state, per_epoch, each_an_epoch=anew)
        return state, restored.history

    def read(packed: tuple[bytes, ...]) -> ReadState:
        large = sum(map(len, packed)) > INLINE_BYTES and trainer.engine == "shuffle"
        resources = site.resources
        carried = ReadCarried(resources.broadcast(packed) if resources and large else packed)
        return WithoutAverage(carried) if trainer.ema is None else carried

    kept = request.kept if before is None else before.trained.optimizer_state
    engine.load(None if kept is None else read(kept.slices))
    if before is None:
        return begin_batch(first_state(trainer.options), per_epoch), History()
    if before.best is not None:
        engine.load(read(before.best), which=BEST)
    state = begin_batch(before.state, per_epoch, each_an_epoch=True)
    return state, before.trained.history.branch()


def run_identity(
    trainer: TrainerSpec, model: PreparedModel, handles: Sequence[SampleHandle]
) -> RunIdentity:
    """Return the identity of a run, as its checkpoints record it."""
    return RunIdentity(
        model=ModelIdentity.of(model.layout),
        data=DataIdentity.of(handles),
        constants={
            "replicas": len(handles),
            "batch_size": trainer.batch_size,
            "local_steps": trainer.options.local_steps,
            "consistency": consistency_text(describe(trainer.consistency_model)),
            "seed": trainer.seed,
            "sampling": describe(trainer.sampling),
        },
        optimizers=model.optimizers,
        options=trainer.options,
        frozen=frozen_digest(model.module),
        metric=trainer.validation.best if trainer.validation else None,
        compression=describe(
            trainer.consistency if trainer.options.keeps_own else trainer.compression
        ),
        config=describe_trainer(trainer),
    )


def periodic_tasks(
    trainer: TrainerSpec,
    engine: Engine,
    validation: ValidationSet | None,
    identity: RunIdentity,
    manifest_model: Mapping[str, Any],
    state: TrainState,
    history: History,
    one_pass: bool,
) -> list[PeriodicTask]:
    """Return the tasks that the loop runs after an iteration when they are due, in order."""
    tasks: list[PeriodicTask] = []
    if validation is not None and trainer.validation is not None:
        tasks.append(Validator(engine, trainer.validation, validation.scorer, history))
    if trainer.checkpoint is not None:
        if "unknown" in manifest_model and state.iteration == 0:
            logger.warning(
                "the checkpoints of this run can be resumed, but sparkdl.load cannot read them, "
                "and save() of the trained model will fail: %s",
                manifest_model["unknown"],
            )
        noting, background = None, None
        if isinstance(engine, RecoveringEngine):
            noting = functools.partial(_noting, identity, engine)
            if trainer.checkpoint.asynchronous:
                background = functools.partial(_in_background, engine)
        checkpointer = Checkpointer(
            trainer.checkpoint,
            engine,
            identity,
            history,
            noting,
            background,
            model=manifest_model,
            begun=state,
            endless=one_pass,
        )
        checkpointer.check()
        tasks.append(checkpointer)
    return tasks


def _noting(run: RunIdentity, engine: RecoveringEngine) -> Callable[[str, Manifest], None]:
    """Return a function that tells the engine of a committed checkpoint of the present state.

    The engine may then go back to that checkpoint.
    """
    return functools.partial(_note_checkpoint, run, engine, engine.done)


def _note_checkpoint(
    run: RunIdentity, engine: RecoveringEngine, done: int, uri: str, manifest: Manifest
) -> None:
    load = RestoredRun(run, uri, manifest, History()).load
    engine.checkpointed(done, manifest.iteration, load)


def _in_background(engine: RecoveringEngine, uses: StateWork) -> PendingStateWork:
    return engine.later(lambda gang: gang.in_background(uses))


def _facts(trainer: TrainerSpec, model: PreparedModel, samples: SampleSet) -> str:
    """Return the model, the rows, the replicas and the engine in words, for the log."""
    kind = type(model.module).__name__
    size = counted(sum(parameter.numel() for parameter in model.module.parameters()), "parameter")
    rows = counted(sum(handle.num_rows for handle in samples.handles), "row")
    replicas = counted(len(samples.counts), "replica")
    return f'{kind} of {size} on {rows}: {replicas}, engine="{trainer.engine}"'


@dataclass(frozen=True)
class LocalResult:
    """The end of a local fit."""

    weights: Mapping[str, torch.Tensor]  # flat vectors by kind
    history: History


@dataclass(frozen=True)
class LocalFit:
    """Fits by the local engine on samples that this process can map, for any trainer that reads the
    data alike.

    A fit has the bits of ``trainer.fit`` with ``engine="local"`` on the same samples.
    """

    training: SampleSet
    validation: SampleSet | None
    float_dtype: str

    def run(
        self,
        trainer: TrainerSpec,
        callbacks: Sequence[Callback],
        settings: Settings,
        slab: SlabConfig,
        threads: int,
    ) -> LocalResult:
        """Train with ``callbacks`` in place of the trainer's, whose checkpoint is not written.

        Nothing is written to ``slab``, which only names the run.
        """
        trainer = replace(trainer, callbacks=callbacks, checkpoint=None, keep_optimizer_state=False)
        model, request = self._prepared(trainer), FitRequest(trainer=trainer)
        site = Site(settings, slab, threads, interrupt=Interrupt(), rescues=False)
        with run_course(request, model, self.training, self.validation, None, site) as finished:
            weights = {kind: finished.engine.weights(kind) for kind in finished.end.kinds}
            return LocalResult(weights, finished.end.history)

    def trained(
        self,
        trainer: TrainerSpec,
        kinds: Sequence[str],
        weights: Callable[[str], torch.Tensor],
        history: History,
    ) -> TrainedModel:
        """Return the trained model of a fit that :meth:`run` made in another process."""
        trainer = as_read(trainer, self.training, self.validation)
        model = self._prepared(trainer)
        validation = validation_set(trainer, self.validation, model.float_dtype)
        output, _ = preflight(trainer, model, self.training, validation, False, care=False)
        return trained_model(trainer, model, self.training, output, kinds, weights, history)

    def _prepared(self, trainer: TrainerSpec) -> PreparedModel:
        model = prepare(trainer, None)
        if model.float_dtype != self.float_dtype:
            raise ModelError(
                f"the model is of {model.float_dtype}, and the samples were placed for one of "
                f"{self.float_dtype}: let all models have one floating dtype."
            )
        return model
