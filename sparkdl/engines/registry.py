"""The engine of a fit, from what the trainer says and what is known of model and samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparkdl.data.batches import preview_batch
from sparkdl.data.ragged import Ragged
from sparkdl.data.samples import SampleSet
from sparkdl.engines.gang.engine import GangEngine
from sparkdl.engines.local import LocalEngine
from sparkdl.engines.recovery import Recovering
from sparkdl.engines.resources import Resources
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.gang.profile import cpus_of
from sparkdl.loop.engine import Lasting, ValidationSet
from sparkdl.model.loss import Loss, OfClasses
from sparkdl.parallel.pipeline import with_split
from sparkdl.parallel.plan import parallel_of
from sparkdl.process.determinism import seeded
from sparkdl.process.numerics import Numerics
from sparkdl.replica.compute import to_tensors
from sparkdl.replica.run import Run
from sparkdl.settings import Settings
from sparkdl.spark.frames import is_local
from sparkdl.train.place_samples import assembly

if TYPE_CHECKING:
    from sparkdl.train.prepare import Prepared
    from sparkdl.train.trainer import Trainer


def build_engine(
    trainer: Trainer,
    settings: Settings,
    model: Prepared,
    samples: SampleSet,
    validation: ValidationSet | None,
    replicas: int,
    resources: Resources,
) -> Lasting:
    """One that has no state yet, see :meth:`sparkdl.loop.engine.Engine.start`."""
    context = resources.context
    total = sum(samples.counts)
    batch_size = trainer.batch_size * trainer.local_steps
    made = Run(
        resources.slab,
        trainer.seed,
        replicas,
        _slices(trainer, model, replicas),
        assembly(trainer, samples, model.float_dtype),
        tuple(max(1, round(trainer.batch_size * rows / total)) for rows in samples.counts),
        cpus_of(context, trainer.resource_profile if trainer.engine == "gang" else None),
        whole_tensors=not (model.optimizer.elementwise and model.optimizer.separate)
        or trainer.compression is not None,
        compressed=trainer.compression is not None,
        numerics=Numerics.here(),
    )
    if trainer.engine == "local":
        return LocalEngine(samples, validation, made, model.payload, batch_size)
    snapshots = None if is_local(context) else settings.snapshot_seconds
    if trainer.engine == "gang":
        how = replace(made.assembly, augment=trainer.augment)
        with seeded(trainer.seed):
            spare = preview_batch(how, samples.preview, augment=True)
        parallel = parallel_of(trainer.parts, trainer.mesh, replicas)
        if parallel.pipeline is not None:
            inputs = to_tensors(spare.inputs, torch.device("cpu"))
            ranks, policy = parallel.mesh.pipe, trainer.policy
            cut = with_split(parallel.pipeline, model.module, inputs, ranks, policy)
            parallel = replace(parallel, parts={**parallel.parts, "pipe": cut})
        gang = GangEngine(
            samples,
            validation,
            model.layout,
            made,
            model.payload,
            model.built,
            spare,
            batch_size,
            resources,
            settings.timeout,
            parallel,
            model.recipe.policy.weighted or _labels_differ(model.recipe.loss, samples),
            model.sums,
            trainer.resource_profile,
            trainer.min_ranks,
        )
        return Recovering(gang, snapshots)
    shuffle = ShuffleEngine(
        samples,
        model.layout,
        made,
        model.payload,
        trainer.policy,
        model.built,
        batch_size,
        resources,
        settings.stages,
    )
    return Recovering(shuffle, snapshots)


def _labels_differ(loss: Loss, samples: SampleSet) -> bool:
    """Whether ``loss`` may take more of one label than of another."""
    how = OfClasses.of(loss)
    if how is None or not how.averages or samples.num_labels != 1:
        return False
    label = samples.preview[
        samples.num_features
    ]  # has the smallest and the largest of all integers
    if isinstance(label, Ragged) or label.ndim > 1 or how.weight is not None:
        return label.dtype.kind != "f"
    if label.dtype.kind == "i":
        return bool(label.min() <= how.ignored <= label.max())
    return label.dtype.kind == "u"


def _slices(trainer: Trainer, model: Prepared, replicas: int) -> int:
    if trainer.slices is not None:
        return trainer.slices
    ddp = trainer.parts.get("data")
    whole = ddp is not None and not ddp.shard_optimizer
    return replicas if model.optimizer.separate and not whole else 1
