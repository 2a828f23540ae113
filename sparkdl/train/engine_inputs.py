"""The inputs of a trainer's engine, and the place where it runs."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyspark
import torch
from torch import nn

from sparkdl.codec.describe import describe_trainer, redact
from sparkdl.data.batches import BatchSpec
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import EngineInputs, ValidationSet
from sparkdl.engines.resources import FitResources
from sparkdl.errors import TrainingError, counted
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.engine import Engine
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.progress import Progress
from sparkdl.process.determinism import Numerics
from sparkdl.replica.iteration import Decisions
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings, __version__
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.slice_file import PackSlice
from sparkdl.spark.executors import cluster_facts
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.spec import TrainerSpec

ENGINES = {
    "local": "one process trains",
    "shuffle": "an iteration is Spark jobs; a lost executor costs seconds",
    "gang": "all ranks run at once, in one barrier stage",
}
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


def facts_of(
    trainer: TrainerSpec, site: Site, model: PreparedModel, samples: SampleSet
) -> dict[str, list[list[str]]]:
    """Return what a history keeps of a run in words, see :attr:`sparkdl.History.facts`."""
    counts, texts = samples.counts, describe_trainer(trainer)
    few, most = min(counts), max(counts)
    size = counted(sum(p.numel() for p in model.module.parameters()), "parameter")
    changed = trainer.changed()
    training = {
        "model": f"{type(model.module).__name__} of {size}",
        "loss": texts["loss" if trainer.step is None else "step"],
        "optimizer": texts["optimizer"],
        "schedule": texts["schedule"] if trainer.schedule else "none",
        "rows": f"{sum(counts):,}",
        "digest of the rows": f"{sum(h.checksum for h in samples.handles) % 2**64:016x}",
        "replicas": f"{len(counts):,}",
        "rows of a replica": f"{few:,}" if few == most else f"{few:,} to {most:,}",
        "rows of an iteration": f"{trainer.batch_size * trainer.options.local_steps:,}",
        "slices": f"{_slices(trainer, model, len(counts)):,}",
        "engine": f"{trainer.engine}: {ENGINES[trainer.engine]}",
        "why this engine": "Trainer(engine=...) says so" if "engine" in changed else "the default",
    }
    inputs = samples.num_features
    roles = ["feature"] * inputs + ["label"] * samples.num_labels + ["weight"]
    columns = [[f.name, role, str(f)] for f, role in zip(samples.fields, roles, strict=False)]
    return {
        "Training": [list(pair) for pair in training.items()],
        "Arguments": [list(pair) for pair in changed.items()],
        "Columns": [["column", "role", "values"], *columns],
        "Model": [["block", "module", "parameters", "trained", "shapes"], *_blocks(model.module)],
        "Environment": [list(pair) for pair in _environment(site)],
    }


MOST_BLOCKS = 40
"""The most rows of a table of a model's blocks."""


def _blocks(module: nn.Module) -> list[list[str]]:
    """Return a row for each block of a model, which is divided as far as there is room."""
    blocks = dict(module.named_children()) or {"": module}
    while True:
        room = MOST_BLOCKS - len(blocks)
        parts = {name: dict(block.named_children()) for name, block in blocks.items()}
        wide = [name for name, inner in parts.items() if 1 < len(inner) <= room]
        if not wide:
            break
        largest = max(wide, key=lambda name: sum(p.numel() for p in blocks[name].parameters()))
        inner = {f"{largest}.{name}": child for name, child in parts[largest].items()}
        blocks = dict(
            pair
            for name, block in blocks.items()
            for pair in (inner if name == largest else {name: block}).items()
        )
    rows = []
    for name, block in list(blocks.items())[:MOST_BLOCKS]:
        parameters = list(block.parameters())
        size = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        shapes = [" × ".join(map(str, p.shape)) for p in parameters]
        if len(shapes) > 5:
            shapes = [*shapes[:3], f"{shapes[3]} and {len(shapes) - 4} more"]
        rows.append([name, type(block).__name__, f"{size:,}", f"{trained:,}", ", ".join(shapes)])
    return rows


def _environment(site: Site) -> Iterator[tuple[str, str]]:
    """Yield the versions, the cluster and the devices of a run."""
    yield "sparkdl", __version__
    yield "Python", platform.python_version()
    yield "PySpark", pyspark.__version__
    yield "PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "platform", platform.platform()
    if site.resources is not None:
        yield from redact(dict(cluster_facts(site.resources.context))).items()
    yield "threads of a task", str(site.threads)
    yield "CPUs here", str(os.cpu_count())
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            yield f"GPU {number} here", torch.cuda.get_device_name(number)


def settings_of(trainer: TrainerSpec, replicas: int) -> dict[str, int]:
    """Return what a history keeps of a run's settings, see :attr:`sparkdl.History.settings`."""
    return {
        "seed": trainer.seed,
        "replicas": replicas,
        "batch_size": trainer.batch_size,
        "accumulate": trainer.accumulate,
    }
