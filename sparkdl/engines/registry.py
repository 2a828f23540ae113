"""The engines by name, and the inputs that each is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.consistency.base import Consistency
from sparkdl.data.batches import preview_batch
from sparkdl.data.ragged import Ragged
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.local.engine import local_engine
from sparkdl.engines.recovery import RecoveringEngine
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.engines.shuffle.groups import GroupEngine
from sparkdl.engines.shuffle.messages import ShuffleSpec
from sparkdl.errors import StateLostError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.loop.engine import TrainingEngine
from sparkdl.model.flat import Layout
from sparkdl.model.loss import ClassLoss, Loss
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.base import ParallelStrategy
from sparkdl.parallel.plan import parallel_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compare import Description
from sparkdl.replica.compute import to_tensors
from sparkdl.replica.iteration import Decisions
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings
from sparkdl.spark.frames import is_local


@dataclass(frozen=True, kw_only=True)
class EngineInputs:
    """The inputs that a fit prepares for building an engine."""

    run: RunSpec
    samples: SampleSet
    validation: ValidationSet | None
    recipe: Recipe
    payload: bytes
    module: nn.Module
    layout: Layout
    built: Description
    batch_size: int  # rows of an iteration, local steps included
    consistency: Consistency
    recorded: Mapping[int, Decisions] | None  # to repeat, by number of the iteration
    sums: bool
    resources: FitResources | None  # None inside a gang that one of its ranks leads
    settings: Settings
    strategies: Mapping[str, ParallelStrategy]
    mesh: Mapping[str, int] | None
    resource_profile: Any
    min_ranks: int | None  # the fewest tasks of a gang; None: one per rank
    gang: StartableGroup | None = None

    @property
    def snapshot_seconds(self) -> float | None:
        """Return the seconds between snapshots; None if there are to be none.

        In local mode no executor can be lost, and in a gang that a rank leads a lost rank ends all of
        them. In a replay a snapshot would end versions that the history has read.
        """
        if self.resources is None or self.recorded is not None or is_local(self.resources.context):
            return None
        return self.settings.snapshot_seconds


def build_engine(name: str, inputs: EngineInputs) -> TrainingEngine:
    """Build the engine called ``name``, which has no state yet.

    Its state is set by :meth:`sparkdl.loop.engine.Engine.load`.
    """
    return ENGINES[name](inputs)


def _local(inputs: EngineInputs) -> TrainingEngine:
    return local_engine(
        inputs.samples,
        inputs.run,
        inputs.payload,
        inputs.batch_size,
        inputs.validation,
        inputs.consistency,
        inputs.recorded,
    )


def _shuffle(inputs: EngineInputs) -> TrainingEngine:
    assert inputs.resources is not None
    spec = ShuffleSpec(
        samples=inputs.samples,
        layout=inputs.layout,
        run=inputs.run,
        recipe=inputs.payload,
        options=inputs.recipe.options,
        built=inputs.built,
        resources=inputs.resources,
    )
    engine: ShuffleEngine
    model = inputs.consistency
    if isinstance(model, Asynchronous):
        engine = GroupEngine(spec, inputs.batch_size, model, inputs.validation, inputs.recorded)
    else:
        engine = ShuffleEngine(
            spec, inputs.batch_size, inputs.settings.stages, inputs.validation, model
        )
    return RecoveringEngine(engine, inputs.snapshot_seconds)


def _gang(inputs: EngineInputs) -> TrainingEngine:
    from sparkdl.engines.gang.engine import GangEngine  # imports what other engines do not need

    run, samples, recipe = inputs.run, inputs.samples, inputs.recipe
    how = replace(run.batch_spec, augment=recipe.augment)
    with seeded(run.seed):
        spare = preview_batch(how, samples.preview, augment=True)
    rows = to_tensors(spare.inputs)
    parallel = parallel_of(inputs.strategies, inputs.mesh, run.replicas)
    parallel = parallel.planned(inputs.module, rows, recipe.options)
    gang, place_again = (inputs.gang, _stay) if inputs.gang else _gang_of_rdds(inputs)
    engine = GangEngine(
        gang,
        place_again,
        samples,
        inputs.validation,
        inputs.layout,
        run,
        inputs.payload,
        inputs.built,
        spare,
        inputs.batch_size,
        parallel,
        recipe.options.weighted or _labels_differ(recipe.loss, samples),
        inputs.sums,
    )
    return RecoveringEngine(engine, inputs.snapshot_seconds)


def _gang_of_rdds(inputs: EngineInputs) -> tuple[StartableGroup, Callable[[int], None]]:
    from sparkdl.engines.gang.engine import gang_of_rdds

    assert inputs.resources is not None
    found = [inputs.samples, *([] if inputs.validation is None else [inputs.validation.samples])]
    rdds = [samples.rdd for samples in found if samples.rdd is not None]
    return gang_of_rdds(
        inputs.resources,
        f"{inputs.run.slab.name}-gang",
        rdds,
        inputs.settings.timeout,
        inputs.resource_profile,
        inputs.min_ranks,
    )


def _stay(number: int) -> None:
    """Raise an error: a rank that has written its samples itself finds them."""
    raise StateLostError("the samples of a rank are no longer on its node.")


ENGINES: Mapping[str, Callable[[EngineInputs], TrainingEngine]] = {
    "shuffle": _shuffle,
    "gang": _gang,
    "local": _local,
}


def _labels_differ(loss: Loss, samples: SampleSet) -> bool:
    """Return whether ``loss`` may weigh labels unequally, so that replicas' shares differ."""
    how = ClassLoss.of(loss)
    if how is None or not how.averages or samples.num_labels != 1:
        return False
    # For integers, the preview holds the smallest and the largest value of all samples.
    label = samples.preview[samples.num_features]
    if isinstance(label, Ragged) or label.ndim > 1 or how.weight is not None:
        return label.dtype.kind != "f"
    if label.dtype.kind == "i":
        return bool(label.min() <= how.ignored <= label.max())
    return label.dtype.kind == "u"
