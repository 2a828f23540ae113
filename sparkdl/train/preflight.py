"""The preflight: trials of model, loss, metrics and schedule on the driver before any task trains."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sparkdl.data.batches import input_fields, preview_batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.samples import SampleSet
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.errors import ParameterError
from sparkdl.infer.output import Output
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.fsdp import check_all_used
from sparkdl.parallel.pipeline import check_one_length
from sparkdl.parallel.plan import parallel_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import to_tensors
from sparkdl.train.averaging_checks import gives_sums, is_averaged, needs_more_rows
from sparkdl.train.forward_checks import check_single_rows, check_writes
from sparkdl.train.place_samples import assembly
from sparkdl.train.plain_state import PlainState
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.probe import check_scorer, try_model
from sparkdl.train.recipes import build_model
from sparkdl.train.trainer import Trainer


def preflight(
    trainer: Trainer,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    endless: bool,
) -> tuple[Output | None, bool]:
    """Try the model, the loss and the metrics on a few rows, in this process.

    Args:
        trainer: The user's trainer.
        model: The prepared model.
        samples: The training samples.
        validation: The validation samples, or None.
        endless: True if ``stop`` has no effect, as in ``partial_fit``.

    Returns:
        The model's output for one sample (None if it is not a single tensor), and whether the loss
        returns ``(sum, count)``.

    Raises:
        UserError: Something fails on the rows.
    """
    if trainer.bucketing is not None and not any(field.ragged for field in samples.fields):
        raise ParameterError(
            f"bucketing={trainer.bucketing} brings samples of like length together, and all samples of "
            'this data have one length: declare the column that varies, columns={"...": '
            "sparkdl.Sequence()}, or leave bucketing out."
        )
    how = replace(assembly(trainer, samples, model.float_dtype), augment=trainer.augment)
    with seeded(trainer.seed):
        tried = batch = preview_batch(how, samples.preview, augment=True)
    recipe = replace(model.recipe, loss=copy.deepcopy(trainer.loss))  # the loss may count its calls
    labels = slice(samples.num_features, samples.num_features + samples.num_labels)
    inputs_are, labels_are = input_fields(how, samples.fields), samples.fields[labels]
    run = functools.partial(try_model, model.module, recipe, batch, inputs_are, labels_are)
    state = PlainState(model.module, recipe.loss)
    output = run()
    state.check(run)
    state.check_made(
        functools.partial(_first_row_only, recipe, batch.inputs),
        functools.partial(build_model, model.payload),
    )
    plan = EpochPlan(samples.counts, trainer.batch_size * trainer.local_steps)
    limit = None if endless else trainer.stop.limit(plan.num_iterations)
    for dimension, part in trainer.parts.items():
        if dimension != "data":
            check_all_used(part.word, model.module)
    mesh = trainer.mesh if trainer.engine == "gang" else None
    parallel = parallel_of(trainer.parts, mesh, len(samples.counts))
    for part in (parallel.pipeline, parallel.tensor):
        if part is not None:
            check_one_length(part.word, samples.fields)
    check_single_rows(model.module, recipe, batch, plan, limit, parallel)
    averaged = is_averaged(parallel, samples.counts, trainer.accumulate)
    looked_at = samples.preview
    if needs_more_rows(recipe.loss) and len(samples.more[0]) > len(samples.preview[0]):
        looked_at = samples.more
        with seeded(trainer.seed):
            batch = preview_batch(how, looked_at, augment=True)
    sums = gives_sums(model.module, recipe, batch, looked_at[labels], averaged)
    metrics = list(validation.scorer.higher_is_better) if validation else []
    model.schedule.check(limit, plan.num_iterations, metrics)
    if validation is not None:
        check_scorer(model.module, recipe.signature, validation)
    check_writes(model.module, recipe.signature, tried.inputs)
    model.module.zero_grad()  # gradients take as much memory as the model
    return output, sums


def with_dimensions(
    validation: ValidationSet | None, output: Output | None
) -> ValidationSet | None:
    """Return the validation samples with a scorer that knows the dimensions of the model's output."""
    if validation is None or output is None or validation.scorer.apart:
        return validation
    return replace(validation, scorer=replace(validation.scorer, dimensions=output.dimensions))


def _first_row_only(recipe: Recipe, inputs: Sequence[np.ndarray], module: nn.Module) -> None:
    """Run forward on a batch of the same size in which every row is the first one."""
    rows = np.zeros(len(inputs[0]), np.int64)
    tensors = to_tensors([array[rows] for array in inputs], torch.device("cpu"))
    module.train()
    with torch.no_grad(), seeded(recipe.seed), contextlib.suppress(Exception):
        recipe.signature.bound(module)(*tensors)
