"""The inputs of a trainer's engine, and the place where it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.data.batches import BatchSpec
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.registry import EngineInputs
from sparkdl.engines.resources import FitResources
from sparkdl.errors import TrainingError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.engine import Engine
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.progress import Progress
from sparkdl.process.determinism import Numerics
from sparkdl.replica.iteration import Decisions
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Site:
    """The process that runs the course of a fit, and what that has there."""

    settings: Settings
    slab: SlabConfig
    threads: int  # of a task
    progress: Progress = field(default_factory=Progress)
    resources: FitResources | None = None  # None: there is no SparkContext
    gang: StartableGroup | None = None  # the ranks, if they are there already
    interrupt: Interrupt | None = None  # None: signals to this process
    rescues: bool = True  # a model is kept whose result cannot be had
    watches: tuple[Callback, ...] = ()  # of the iterations, beside the user's callbacks


def engine_inputs(
    trainer: TrainerSpec,
    site: Site,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    sums: bool,
    recorded: Mapping[int, Decisions] | None = None,
) -> EngineInputs:
    """Return the argument of :func:`sparkdl.engines.registry.build_engine`.

    ``sums``: the loss returns (sum, count); ``recorded``: decisions to repeat, by iteration number.
    """
    return EngineInputs(
        run=run_spec(trainer, model, samples, site.slab, site.threads),
        samples=samples,
        validation=validation,
        recipe=model.recipe,
        payload=model.payload,
        module=model.module,
        layout=model.layout,
        built=model.built,
        batch_size=trainer.batch_size * trainer.options.local_steps,
        consistency=trainer.consistency_model,
        recorded=recorded,
        sums=sums,
        resources=site.resources,
        settings=site.settings,
        strategies=trainer.parts,
        mesh=trainer.mesh,
        resource_profile=trainer.resource_profile,
        min_ranks=trainer.min_ranks,
        gang=site.gang,
    )


def run_spec(
    trainer: TrainerSpec, model: PreparedModel, samples: SampleSet, slab: SlabConfig, threads: int
) -> RunSpec:
    """Return the constants of a run."""
    total, replicas = sum(samples.counts), len(samples.counts)
    compressed, optimizer = trainer.compression is not None, model.slice_optimizer
    return RunSpec(
        slab,
        trainer.seed,
        replicas,
        _slices(trainer, model, replicas),
        batch_spec(trainer, samples, model.float_dtype),
        tuple(max(1, round(trainer.batch_size * rows / total)) for rows in samples.counts),
        threads,
        whole_tensors=not (optimizer.elementwise and optimizer.separate) or compressed,
        keeps_tensors=compressed or trainer.options.keeps_own,
        numerics=Numerics.here(),
    )


def batch_spec(trainer: TrainerSpec, samples: SampleSet, float_dtype: str) -> BatchSpec:
    """Return how rows become mini-batches, except for ``augment``, which is in the recipe."""
    return BatchSpec(
        num_features=samples.num_features,
        num_labels=samples.num_labels,
        weighted=samples.weighted,
        inputs=trainer.keywords,
        bucketing=trainer.bucketing,
        float_dtype=float_dtype,
        seed=trainer.seed,
        draws=samples.draws,
    )


def _slices(trainer: TrainerSpec, model: PreparedModel, replicas: int) -> int:
    """Return N, the number of slices."""
    if trainer.slices is not None:
        return trainer.slices
    sharded = all(part.shards_update for part in trainer.parts.values())
    return replicas if model.slice_optimizer.separate and sharded else 1


def packed_state(engine: Engine, lose_it: bool) -> tuple[bytes, ...] | None:
    """Return the state of each slice, packed, or None if it cannot be brought to the driver.

    Raises :class:`sparkdl.TrainingError` instead of returning None unless ``lose_it``.
    """
    try:
        return tuple(engine.map_slices(PackSlice()))
    except TrainingError as error:
        if not lose_it:
            raise
        logger.warning(
            "the trained model has no optimizer state, because it could not be collected on the "
            "driver: %s",
            str(error).partition("\n")[0],
        )
        return None


def settings_of(trainer: TrainerSpec, replicas: int) -> dict[str, int]:
    """Return what a history keeps of a run's settings, see :attr:`sparkdl.History.settings`."""
    return {
        "seed": trainer.seed,
        "replicas": replicas,
        "batch_size": trainer.batch_size,
        "accumulate": trainer.accumulate,
    }
