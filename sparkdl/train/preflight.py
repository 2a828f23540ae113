"""Checks before training: memory and ranks for the model, and the dry run on the driver."""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import SparkContext

from sparkdl.care.dry_run import Division, DryRun
from sparkdl.care.rules import problems_of_min_ranks
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import ParameterError, raise_all
from sparkdl.gang.slots import check_slots, too_few
from sparkdl.infer.outputs import Output
from sparkdl.parallel.plan import parallel_of
from sparkdl.process.memory import left_to_process
from sparkdl.train.engine_inputs import batch_spec
from sparkdl.train.prepare import PreparedModel, build_model
from sparkdl.train.spec import TrainerSpec

if TYPE_CHECKING:
    from sparkdl.model.flat import Layout


def preflight(
    trainer: TrainerSpec,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    endless: bool,
    care: bool = True,
) -> tuple[Output | None, bool]:
    """Try the model, the loss and the metrics on a few rows, in this process.

    Return the output for one sample (None: not a single tensor), and whether the loss returns
    ``(sum, count)``. ``endless``: ``stop`` has no effect. Without ``care`` there is one pass only.
    """
    plan = EpochPlan(samples.counts, trainer.batch_size * trainer.options.local_steps)
    limit = None if endless else trainer.stop.limit(plan.num_iterations)
    mesh = trainer.mesh if trainer.engine == "gang" else None
    tried = DryRun(
        model.module,
        replace(model.recipe, loss=copy.deepcopy(trainer.objective)),  # it may count its calls
        replace(batch_spec(trainer, samples, model.float_dtype), augment=trainer.augment),
        samples,
        Division(plan, limit, parallel_of(trainer.parts, mesh, len(samples.counts))),
        functools.partial(build_model, model.payload),
        validation,
    ).run(care)
    metrics = validation.scorer.higher_is_better if validation else {}
    model.schedule.check(limit, plan.num_iterations, metrics)
    return tried.output, tried.sums


def with_dimensions(
    validation: ValidationSet | None, output: Output | None
) -> ValidationSet | None:
    """Return the validation samples with a scorer that knows the dimensions of the model's output."""
    if validation is None or output is None or validation.scorer.apart:
        return validation
    return replace(validation, scorer=replace(validation.scorer, dimensions=output.dimensions))


logger = logging.getLogger("sparkdl")
SMALL_BYTES = 64 << 20
"""A model up to this size is assumed to fit."""


def check_sizes(trainer: TrainerSpec, layout: Layout) -> None:
    """Raise an error if the driver cannot collect the model, for which it needs this much at least."""
    if layout.nbytes <= SMALL_BYTES:
        return
    # The vector of the weights; the module takes the place of that of the preflight, which is freed.
    need, left = layout.nbytes, left_to_process()
    if trainer.keep_optimizer_state:
        need += layout.nbytes
    if need > left:
        raise ParameterError(
            f"the model has {_gb(layout.nbytes)} of weights, and to collect it after training, the "
            f"driver's Python needs {_gb(need)} on top of what it uses now, but can get only "
            f"{_gb(left)}. Give the driver's machine or container more memory, or freeze a part of "
            "the model."
        )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


def check_gang(
    trainer: TrainerSpec, model: PreparedModel, context: SparkContext, ranks: int
) -> None:
    """Raise an error if a gang of this many ranks cannot run."""
    check_mesh(trainer, model, ranks)
    profile, least = trainer.resource_profile, trainer.min_ranks
    slots = check_slots(context, ranks, profile=profile, min_slots=least)
    if slots < ranks:
        logger.warning("%s.", too_few(slots, ranks))


def check_mesh(trainer: TrainerSpec, model: PreparedModel, ranks: int) -> None:
    """Raise an error if this many ranks cannot share the work as the trainer says."""
    raise_all(ParameterError, list(problems_of_min_ranks(trainer.min_ranks, ranks)))
    parallel = parallel_of(trainer.parts, trainer.mesh, ranks)
    for part in parallel.parts.values():
        part.check_mesh(model.module, parallel.mesh)
