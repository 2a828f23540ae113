"""The order of a fit, from a request to a trained model, in a classic session."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from sparkdl.checkpoint.manifest import ModelIdentity
from sparkdl.engines.resources import FitResources
from sparkdl.errors import SessionError
from sparkdl.gang.slots import cpus_of
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.interrupt import interruptible
from sparkdl.loop.progress import Progress, progress_of
from sparkdl.planner.follow import ScheduleShare, compare
from sparkdl.planner.plan import Plan
from sparkdl.planner.probe import Cluster
from sparkdl.session import SessionFacts
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.executors import waiting_for_locality, warming_up
from sparkdl.spark.failures import reading_explained
from sparkdl.train.chosen import Planner, decided
from sparkdl.train.course import check_replay, run_course
from sparkdl.train.engine_inputs import Site
from sparkdl.train.placed_samples import PlacedSamples, check_validation_data, data_of, replicas_of
from sparkdl.train.preflight import check_gang, check_sizes
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import CarriedRun, FitRequest, PassSeries
from sparkdl.train.spec import TrainerSpec

CONNECTED = "sparkdl.connect.fit:run"
"""The counterpart of :func:`run` for a session of Spark Connect; its room lies above this one."""


def fit(data: Any, request: FitRequest, **settings: Any) -> CarriedRun:
    """Train as asked, in a session of either kind, of which some ``settings`` are other ones here."""
    return _fit(data, request, SessionFacts.of(data_of(data), "fit", **settings))


def plan(trainer: Any, data: Any, *, trials: bool = False, cluster: Cluster | None = None) -> Plan:
    """Predict what an iteration of a fit takes in each way to run it, and rank these.

    Only the ways that leave the mathematics as it is are ranked: the engine; the replicas where the
    trainer does not say how many; a gang's strategy where that is "ddp" or "auto", its mesh and
    micro-batches. The model is measured on a few rows and the session on a tiny model, for some
    seconds; nothing else is trained. What a session costs is kept for the next plan
    (``spark.sparkdl.plan.cache``), and so is what fits then took.

    Args:
        trainer: The trainer.
        data: The data, as for ``Trainer.fit``.
        trials: Run the best three for 30 iterations each, and rank them by that.
        cluster: Machines that are not here, for which the same is computed and not run.

    Returns:
        The plan: ``print`` it, or call ``plan.trainer.fit(data)``.

    Raises:
        UserError: The data, the model or a parameter cannot work.
    """
    facts = SessionFacts.of(data_of(data), "plan")
    if facts.context is None:
        raise SessionError(
            'a Spark Connect session trains with engine="gang" alone, so there is nothing to plan: '
            "call sparkdl.plan in a classic session."
        )
    return Planner(trainer, data, facts, run).whole_plan(trials, cluster)


def fit_pass(passes: PassSeries, data: Any, request: FitRequest) -> TrainedModel:
    """Make one pass over the data; see :meth:`sparkdl.Trainer.partial_fit`."""
    facts = SessionFacts.of(data, "partial_fit")
    if passes.last is not None:
        if request.has_seen(passes.last.state):
            return passes.last.trained
        with reading_explained():
            empty = data.isEmpty()
        if empty:
            return passes.last.trained
        request = replace(request, resume=None)
    request = replace(request, before=passes.begin(), one_pass=True)
    return passes.end(_fit(data, request, facts))


def _fit(data: Any, request: FitRequest, facts: SessionFacts) -> CarriedRun:
    request = decided(data, request, facts, run)
    if facts.context is None:
        connected: Callable[[Any, FitRequest, SessionFacts], CarriedRun] = resolve_name(CONNECTED)
        return connected(data, request, facts)
    check_replay(request.trainer, request.replay)
    with warming_up(facts.context):
        return run(data, request, facts)


def run(data: Any, request: FitRequest, facts: SessionFacts) -> CarriedRun:
    """Train in a classic session, and return the result and the state in which the run ended."""
    progress = progress_of(facts.settings.progress, "", time.monotonic(), request.one_pass)
    # before the first iteration an interrupt ends the fit at once; from then on run_course has its own
    with contextlib.closing(progress), interruptible(ready=lambda: False):
        return _run(data, request, facts, progress)


def built(
    trainer: TrainerSpec, request: FitRequest, facts: SessionFacts, progress: Progress
) -> PreparedModel:
    """Return the model of a fit; what it begins with must fit it."""
    check_validation_data(trainer, facts)
    progress.doing("building the model")
    model = prepare(trainer, request.start)
    progress.doing("starting workers")
    if request.kept is not None:
        request.kept.check(ModelIdentity.of(model.layout), model.optimizers)
    return model


def _run(data: Any, request: FitRequest, facts: SessionFacts, progress: Progress) -> CarriedRun:
    trainer = request.trainer
    placed = data if isinstance(data, PlacedSamples) else None
    context, settings = facts.context, facts.settings
    model = built(trainer, request, facts, progress)
    resuming = request.checkpoints()
    directory, beside = settings.slab_dir, ""
    if placed is not None:
        placed.check(trainer, model.float_dtype)
        replicas, directory, beside = placed.replicas, placed.slab.directory, placed.slab.name
    else:
        checkpointed = None if resuming is None else resuming.replicas
        replicas = replicas_of(trainer, facts, trainer.number_of_replicas or checkpointed)
    check_sizes(trainer, model.layout)
    slab = SlabConfig.new(directory, context.applicationId, beside)
    profile = trainer.resource_profile if trainer.engine == "gang" else None
    if trainer.engine == "gang":
        check_gang(trainer, model, context, replicas)
    threads = cpus_of(context, profile)
    shows = settings.progress != "false" and request.plan is None
    watched = shows and trainer.engine == "shuffle"
    watches = (ScheduleShare(trainer, facts, replicas),) if watched else ()
    with waiting_for_locality(context), FitResources(context, slab, settings.timeout) as resources:
        if placed is None:
            progress.doing("reading rows", resources.rows_read)
            placed = PlacedSamples.within(resources, trainer, data, replicas, model.float_dtype)
        site = Site(settings, slab, threads, progress, resources, watches=watches)
        samples, validation = placed.training, placed.validation
        with run_course(request, model, samples, validation, resuming, site) as finished:
            carried = finished.carried()
        compare(trainer, model.layout, facts, replicas, carried.trained.history)
        return carried
