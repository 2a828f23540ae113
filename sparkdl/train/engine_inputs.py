"""The inputs of an engine, made from a trainer and what a fit has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.data.batches import BatchSpec
from sparkdl.data.samples import SampleSet
from sparkdl.engines.registry import EngineInputs
from sparkdl.engines.resources import FitResources
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.gang.slots import cpus_of
from sparkdl.process.numerics import Numerics
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.train.prepare import PreparedModel

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def engine_inputs(
    trainer: Trainer,
    settings: Settings,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    resources: FitResources,
) -> EngineInputs:
    """Return the argument of :func:`sparkdl.engines.registry.build_engine`.

    Args:
        trainer: The user's trainer.
        settings: The session's settings.
        model: The recipe and what follows from it.
        samples: The training samples, in place.
        validation: The validation samples, or None.
        resources: What the fit owns in Spark.
    """
    profile = trainer.resource_profile if trainer.engine == "gang" else None
    run = run_spec(trainer, model, samples, resources.slab, cpus_of(resources.context, profile))
    return EngineInputs(
        run=run,
        samples=samples,
        validation=validation,
        recipe=model.recipe,
        payload=model.payload,
        module=model.module,
        layout=model.layout,
        built=model.built,
        batch_size=trainer.batch_size * trainer.local_steps,
        sums=model.sums,
        resources=resources,
        settings=settings,
        strategies=trainer.parts,
        mesh=trainer.mesh,
        resource_profile=trainer.resource_profile,
        min_ranks=trainer.min_ranks,
    )


def run_spec(
    trainer: Trainer, model: PreparedModel, samples: SampleSet, slab: SlabConfig, threads: int
) -> RunSpec:
    """Return the constants of a run.

    Args:
        trainer: The user's trainer.
        model: The recipe and what follows from it.
        samples: The training samples, in place.
        slab: The slabs of the run.
        threads: torch's threads in a task.
    """
    total, replicas = sum(samples.counts), len(samples.counts)
    compressed = trainer.compression is not None
    return RunSpec(
        slab,
        trainer.seed,
        replicas,
        _slices(trainer, model, replicas),
        assembly(trainer, samples, model.float_dtype),
        tuple(max(1, round(trainer.batch_size * rows / total)) for rows in samples.counts),
        threads,
        whole_tensors=not (model.optimizer.elementwise and model.optimizer.separate) or compressed,
        compressed=compressed,
        numerics=Numerics.here(),
    )


def assembly(trainer: Trainer, samples: SampleSet, float_dtype: str) -> BatchSpec:
    """Return how training rows become mini-batches, except for ``augment``, which is in the recipe.

    Args:
        trainer: The user's trainer.
        samples: The samples.
        float_dtype: The dtype of floating-point values.
    """
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
    ddp = trainer.parts.get("data")
    whole = ddp is not None and not ddp.shard_optimizer
    return replicas if model.optimizer.separate and not whole else 1
