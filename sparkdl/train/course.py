"""The course of a fit: what comes between the placement of its samples and its result.

It needs no Spark: it runs on the driver, in rank 0 of a gang that has no driver, or in a task.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
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
from sparkdl.loop.engine import (
    AVERAGE,
    BEST,
    CURRENT,
    Engine,
    PendingStateWork,
    ReadState,
    StateWork,
)
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
from sparkdl.train.result import FinishedFit, FitEnd, Rescue, result_maker
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")
REPEATED = 1e-3
"""The relative difference of losses that rounding on another kind of processor may make."""


def check_replay(trainer: TrainerSpec, replay: History | None) -> None:
    """Check that a run can repeat what was decided on the iterations of a history."""
    if replay is not None:
        _raise_first(_problems_of_replay(trainer, replay))


def check_replayed(replay: History | None, plan: EpochPlan, settings: Mapping[str, int]) -> None:
    """Check that a history is that of a run with such data and settings, as far as it tells."""
    if replay is not None:
        _raise_first(_problems_of_data(replay, plan))
        _raise_first(_problems_of_settings(replay, settings))


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ParameterError(f"replay: {problem}")


def _problems_of_replay(trainer: TrainerSpec, replay: History) -> Iterator[str]:
    model, options, recorded = trainer.consistency_model, trainer.options, replay.decisions
    if bool(replay.commits) != isinstance(model, Asynchronous):
        found = "the order of asynchronous steps" if replay.commits else "no order of steps"
        yield f"the history has {found}: train with the consistency= of the recorded run."
    if isinstance(model, Asynchronous) and (groups := model.groups or trainer.number_of_replicas):
        for number, decisions in recorded.items():
            model.check_recorded(number, decisions, groups)
    micro_batches, inner_steps = replay.micro_batches, replay.inner_steps
    counts = [*micro_batches.values(), *inner_steps.values()]
    if micro_batches and options.steps_on_replicas:
        yield (
            "the history has replicas that left out micro-batches, which replicas with steps of their "
            "own do not: train with the consistency= and local_steps= of the recorded run."
        )
    if inner_steps and not options.outer:
        yield (
            "the history has replicas that left out steps of their own, which only those of DiLoCo do: "
            "train with the consistency= of the recorded run."
        )
    if counts and (replicas := trainer.number_of_replicas) is not None:
        check_replicas(max(map(len, counts)), replicas)
    if counts and trainer.engine == "gang":
        what = "micro-batches" if micro_batches else "steps of their own"
        yield (
            f"the history has replicas that left out {what}, which the ranks of a gang cannot: use "
            'engine="shuffle" or "local".'
        )
    for what, name, there, here in (
        ("micro-batches", "accumulate", micro_batches, trainer.accumulate),
        ("steps of their own", "inner_steps", inner_steps, model.inner_steps),
    ):
        if there and (most := max(map(max, counts))) > here:
            yield (
                f"the history has replicas with {most} {what}, and this trainer has {name}={here}: "
                "train with that of the recorded run."
            )
    if (oldest := largest_staleness(recorded)) >= model.keep:
        yield (
            f"the history has gradients that are {oldest} versions old, and this trainer keeps "
            f"{model.keep}: train with consistency=sparkdl.StaleSynchronous(staleness={oldest})."
        )
    yield from _problems_of_settings(replay, {"seed": trainer.seed})


def _problems_of_settings(replay: History, settings: Mapping[str, int]) -> Iterator[str]:
    """Yield the settings with which the decisions would be repeated on other numbers or rows."""
    recorded = replay.settings
    for name, here in settings.items():
        if recorded.get(name, here) != here:
            yield (
                f"the history was recorded with {name}={recorded[name]}, and this trainer has "
                f"{name}={here}, so the bits would differ: train with {name}={recorded[name]}."
            )


def _problems_of_data(replay: History, plan: EpochPlan) -> Iterator[str]:
    first = next(iter(replay), None)
    if first is None or first["iteration"] != 1:
        return
    epochs, iterations = replay.epochs(), plan.num_iterations
    found, batch = epochs[0]["iterations"], min(plan.batch_size, plan.num_samples)
    if found > iterations or (len(epochs) > 1 and found < iterations):
        yield (
            f"an epoch of the history has {found:,} iterations, and one of this run has "
            f"{iterations:,}: train with the data and batch_size= of the recorded run."
        )
    left_out = replay.micro_batches or replay.inner_steps
    if not replay.commits and not left_out and first["samples"] != batch:
        yield (
            f"the history has {first['samples']:,} samples in an iteration, and this run has "
            f"{batch:,}: train with the batch_size= of the recorded run."
        )


class RepeatedLosses(Callback):
    """A warning, once, where a loss is not the one that the replayed history has."""

    def __init__(self, replay: History) -> None:
        self._losses = {record["iteration"]: record["loss"] for record in replay}

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        there, here = self._losses.get(state.iteration, state.loss), state.loss
        if not math.isclose(there, here, rel_tol=REPEATED) and there == there:
            logger.warning(
                "replay: the loss of iteration %d is %.6g, and the history has %.6g: decisions are "
                "repeated, and the bits are not, since the data, the model, the optimizer or another "
                "field of the trainer is not that of the recorded run.",
                *(state.iteration, here, there),
            )
            self._losses = {}


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
    check_replayed(request.replay, engine.plan, settings)
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
    rescue = Rescue(looped, engine, identity, manifest_model, history, one_pass)
    periodic = periodic_tasks(rescue, validation, state)
    rows, replicas = counted(sum(samples.counts), "row"), counted(len(samples.counts), "replica")
    kind = dict(facts["Training"])["model"]
    site.progress.describe(f'{kind} on {rows}: {replicas}, engine="{trainer.engine}"')
    model.drop_module()
    asked = contextlib.nullcontext(site.interrupt) if site.interrupt else interruptible()
    kept = rescue if site.rescues else contextlib.nullcontext()
    with asked as interrupt, kept, contextlib.closing(site.progress):
        own = [*trainer.callbacks, *added_callbacks(trainer.callbacks)]
        callbacks: list[Callback] = [rescue, *own, *site.watches, site.progress]
        if request.replay is not None:
            callbacks.append(RepeatedLosses(request.replay))
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
        held = {CURRENT: True, AVERAGE: trainer.ema is not None, BEST: state.best is not None}
        kinds = [kind for kind, there in held.items() if there]
        wanted = trainer.keep_optimizer_state or one_pass
        packed = packed_state(engine, lose_it=not one_pass) if wanted else None
        best = tuple(engine.map_slices(PackSlice(), BEST)) if held[BEST] and one_pass else None
        carried = schedule if one_pass else None
        end = FitEnd(samples, output, kinds, history, state, packed, best, carried)
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
    run: Rescue, validation: ValidationSet | None, state: TrainState
) -> list[PeriodicTask]:
    """Return the tasks that the loop runs after an iteration when they are due, in order."""
    trainer, engine, tasks = run.trainer, run.engine, list[PeriodicTask]()
    if validation is not None and trainer.validation is not None:
        tasks.append(Validator(engine, trainer.validation, validation.scorer, run.history))
    if trainer.checkpoint is not None:
        if "unknown" in run.manifest_model and state.iteration == 0:
            logger.warning(
                "the checkpoints of this run can be resumed, but sparkdl.load cannot read them, "
                "and save() of the trained model will fail: %s",
                run.manifest_model["unknown"],
            )
        noting, background = None, None
        if isinstance(engine, RecoveringEngine):
            noting = functools.partial(_noting, run.identity, engine)
            if trainer.checkpoint.asynchronous:
                background = functools.partial(_in_background, engine)
        checkpointer = run.checkpointer(trainer.checkpoint, state, noting, background)
        checkpointer.check()
        tasks.append(checkpointer)
    return tasks


def _in_background(engine: RecoveringEngine, uses: StateWork) -> PendingStateWork:
    return engine.later(lambda gang: gang.in_background(uses))


def _noting(run: RunIdentity, engine: RecoveringEngine) -> Callable[[str, Manifest], None]:
    """Return a function that tells the engine of a committed checkpoint of the present state, to
    which it may then go back."""
    done = engine.done

    def note(uri: str, manifest: Manifest) -> None:
        load = RestoredRun(run, uri, manifest, History()).load
        engine.checkpointed(done, manifest.iteration, load)

    return note


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
        return (
            FitEnd(self.training, output, kinds, history).carried(trainer, model, weights).trained
        )

    def _prepared(self, trainer: TrainerSpec) -> PreparedModel:
        model = prepare(trainer, None)
        if model.float_dtype != self.float_dtype:
            raise ModelError(
                f"the model is of {model.float_dtype}, and the samples were placed for one of "
                f"{self.float_dtype}: let all models have one floating dtype."
            )
        return model
