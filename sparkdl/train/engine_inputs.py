"""The engine of a trainer: its inputs, the state that it begins with, and its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from sparkdl.checkpoint.manifest import RunIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.data.batches import BatchSpec
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.registry import EngineInputs
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.placement import INLINE_BYTES
from sparkdl.errors import TrainingError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.infer.saved import StoredState
from sparkdl.loop.advance import first_state
from sparkdl.loop.engine import BEST, Engine, ReadState
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.process.determinism import Numerics
from sparkdl.replica.iteration import Decisions
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice, ReadCarried, WithoutAverage
from sparkdl.train.carried import CarriedRun, begin_batch
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def engine_inputs(
    trainer: Trainer,
    settings: Settings,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    slab: SlabConfig,
    threads: int,
    resources: FitResources | None,
    gang: StartableGroup | None = None,
    recorded: Mapping[int, Decisions] | None = None,
) -> EngineInputs:
    """Return the argument of :func:`sparkdl.engines.registry.build_engine`.

    ``gang``: the ranks, if they exist already; ``recorded``: decisions to repeat, by iteration
    number.
    """
    run = run_spec(trainer, model, samples, slab, threads)
    return EngineInputs(
        run=run,
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
        sums=model.sums,
        resources=resources,
        settings=settings,
        strategies=trainer.parts,
        mesh=trainer.mesh,
        resource_profile=trainer.resource_profile,
        min_ranks=trainer.min_ranks,
        gang=gang,
    )


def run_spec(
    trainer: Trainer, model: PreparedModel, samples: SampleSet, slab: SlabConfig, threads: int
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


def batch_spec(trainer: Trainer, samples: SampleSet, float_dtype: str) -> BatchSpec:
    """Return how rows become mini-batches, except for ``augment``, which is in the recipe."""
    return BatchSpec(
        num_features=samples.num_features,
        num_labels=samples.num_labels,
        weighted=samples.weighted,
        inputs=trainer.keywords,
        bucketing=trainer.bucketing,
        float_dtype=float_dtype,
        seed=trainer.seed,
    )


def _slices(trainer: Trainer, model: PreparedModel, replicas: int) -> int:
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


def load_start(
    trainer: Trainer,
    engine: Engine,
    identity: RunIdentity,
    resuming: ResumeCandidates | None,
    kept: StoredState | None,
    carried: CarriedRun | None,
    resources: FitResources | None,
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
        carried = ReadCarried(resources.broadcast(packed) if resources and large else packed)
        return WithoutAverage(carried) if trainer.ema is None else carried

    if carried is not None:
        kept = carried.trained.optimizer_state
    engine.load(None if kept is None else read(kept.slices))
    if carried is not None and carried.best is not None:
        engine.load(read(carried.best), which=BEST)
    if carried is not None:
        state = begin_batch(carried.state, per_epoch, each_an_epoch=True)
        return state, carried.trained.history.branch()
    return begin_batch(first_state(trainer.options), per_epoch), History()


def settings_of(trainer: Trainer, replicas: int) -> dict[str, int]:
    """Return what a history keeps of a run's settings, see :attr:`sparkdl.History.settings`."""
    return {
        "seed": trainer.seed,
        "replicas": replicas,
        "batch_size": trainer.batch_size,
        "accumulate": trainer.accumulate,
    }
