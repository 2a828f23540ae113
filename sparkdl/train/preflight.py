"""The dry run of a trainer's model on the driver before any task trains."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

from sparkdl.care.dry_run import Division, DryRun
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import ParameterError
from sparkdl.infer.outputs import Output
from sparkdl.parallel.plan import parallel_of
from sparkdl.train.engine_inputs import batch_spec
from sparkdl.train.prepare import PreparedModel, build_model
from sparkdl.train.spec import TrainerSpec


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
    if trainer.bucketing is not None and not any(field.ragged for field in samples.fields):
        raise ParameterError(
            f"bucketing={trainer.bucketing} groups samples of similar length, but all samples of "
            "this data have the same length: declare the column that varies in length, "
            'columns={"...": sparkdl.Sequence()}, or leave bucketing out.'
        )
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
