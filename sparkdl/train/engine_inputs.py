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
from sparkdl.train.prepare import PreparedModel

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def engine_inputs(
    trainer: Trainer,
    settings: Settings,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    replicas: int,
    resources: FitResources,
) -> EngineInputs:
    """Return the argument of :func:`sparkdl.engines.registry.build_engine`.

    Args:
        trainer: The user's trainer.
        settings: The session's settings.
        model: The recipe and what follows from it.
        samples: The training samples, in place.
        validation: The validation samples, or None.
        replicas: M, the number of replicas or ranks.
        resources: What the fit owns in Spark.
    """
    total = sum(samples.counts)
    compressed = trainer.compression is not None
    run = RunSpec(
        resources.slab,
        trainer.seed,
        replicas,
        _slices(trainer, model, replicas),
        assembly(trainer, samples, model.float_dtype),
        tuple(max(1, round(trainer.batch_size * rows / total)) for rows in samples.counts),
        cpus_of(resources.context, trainer.resource_profile if trainer.engine == "gang" else None),
        whole_tensors=not (model.optimizer.elementwise and model.optimizer.separate) or compressed,
        compressed=compressed,
        numerics=Numerics.here(),
    )
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
    sharded = all(part.shards_update for part in trainer.parts.values())
    return replicas if model.optimizer.separate and sharded else 1
