"""The preflight: trials of model, loss, metrics and schedule on the driver before any task trains."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sparkdl.data.batches import Batch, input_fields, preview_batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import ModelError, ParameterError
from sparkdl.infer.outputs import Output
from sparkdl.model.loss import ALONE, PerReplica, is_own_loss, is_step, loss_of, masses_of
from sparkdl.model.recipe import Recipe, bytes_of
from sparkdl.parallel.plan import ParallelPlan, parallel_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, to_tensors
from sparkdl.train.averaging_checks import gives_sums, have_copies, is_averaged, rows_for_loss
from sparkdl.train.engine_inputs import batch_spec
from sparkdl.train.hints import check_labels, shape_of, text_of
from sparkdl.train.plain_state import PlainState
from sparkdl.train.prepare import PreparedModel, build_model
from sparkdl.train.probe import check_scorer, try_model
from sparkdl.train.repeats import tell_of_hidden_state, tell_of_mixed_rows, tell_of_own_draws
from sparkdl.train.spec import TrainerSpec
from sparkdl.train.undeclared_buffers import UndeclaredBuffers


def preflight(
    trainer: TrainerSpec,
    model: PreparedModel,
    samples: SampleSet,
    validation: ValidationSet | None,
    endless: bool,
) -> tuple[Output | None, bool]:
    """Try the model, the loss and the metrics on a few rows, in this process.

    Return the output for one sample (None: not a single tensor), and whether the loss returns
    ``(sum, count)``. ``endless``: ``stop`` has no effect.
    """
    if trainer.bucketing is not None and not any(field.ragged for field in samples.fields):
        raise ParameterError(
            f"bucketing={trainer.bucketing} groups samples of similar length, but all samples of "
            "this data have the same length: declare the column that varies in length, "
            'columns={"...": sparkdl.Sequence()}, or leave bucketing out.'
        )
    check_labels(trainer.objective, samples)
    if validation is not None:
        check_labels(trainer.objective, validation.samples, "validation data: ")
    how = replace(batch_spec(trainer, samples, model.float_dtype), augment=trainer.augment)
    with seeded(trainer.seed):
        tried = batch = preview_batch(how, samples.preview, augment=True)
    tell_of_own_draws(how, samples.preview, trainer.seed, batch)
    loss = copy.deepcopy(trainer.objective)  # it may count its calls
    recipe = replace(model.recipe, loss=loss)
    labels = slice(samples.num_features, samples.num_features + samples.num_labels)
    inputs_are, labels_are = input_fields(how, samples.fields), samples.fields[labels]
    before = parameter_sums(model.module)
    run = functools.partial(try_model, model.module, recipe, batch, inputs_are, labels_are)
    state, buffers = PlainState(model.module, recipe.loss), UndeclaredBuffers(model.module, recipe)
    output = run()
    state.check(run)
    state.check_made(
        run,
        functools.partial(_first_row_only, recipe, batch.inputs),
        functools.partial(build_model, model.payload),
    )
    tell_of_hidden_state(model.module, recipe, batch)
    plan = EpochPlan(samples.counts, trainer.batch_size * trainer.options.local_steps)
    limit = None if endless else trainer.stop.limit(plan.num_iterations)
    mesh = trainer.mesh if trainer.engine == "gang" else None
    parallel = parallel_of(trainer.parts, mesh, len(samples.counts))
    for part in parallel.parts.values():
        part.check_rows(model.module, samples.fields)
    check_single_rows(model.module, recipe, batch, plan, limit, parallel)
    if have_copies(parallel, samples.counts):
        buffers.tell(tried)
    averaged = is_averaged(parallel, samples.counts, trainer.accumulate)
    looked_at = rows_for_loss(recipe.loss, samples.preview, samples.more)
    if looked_at is not samples.preview:
        with seeded(trainer.seed):
            batch = preview_batch(how, looked_at, augment=True)
    sums = gives_sums(model.module, recipe, batch, looked_at[labels], averaged)
    if averaged:
        check_frequencies(model.module)
        if not (isinstance(recipe.loss, PerReplica) or is_own_loss(recipe.loss)):
            tell_of_mixed_rows(model.module, recipe, batch)
    metrics = validation.scorer.higher_is_better if validation else {}
    model.schedule.check(limit, plan.num_iterations, metrics)
    if validation is not None:
        check_scorer(model.module, recipe.signature, validation)
    check_writes(model.module, recipe, tried, before)
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
    tensors = to_tensors([array[rows] for array in inputs])
    with torch.no_grad(), seeded(recipe.seed), contextlib.suppress(Exception):
        recipe.signature.bound(module)(*tensors)


_SEARCHED_BATCHES = 1000


def check_single_rows(
    module: nn.Module,
    recipe: Recipe,
    batch: Batch,
    plan: EpochPlan,
    iterations: int | None,
    parallel: ParallelPlan,
) -> None:
    """Raise an error if a mini-batch would have one row, and the model or the loss needs more.

    Batch norm needs more, and so does a loss whose input went through ``.squeeze()``.
    """
    found = _refused(module, recipe, batch)
    if found is None:
        return
    what, reason, error = found
    options = recipe.options
    last, together = plan.num_iterations - 1, parallel.mesh.model_groups
    of_all = options.sync_batchnorm and what == "model"  # the rows of all ranks count together
    if of_all:
        together = [[rank for group in together for rank in group]]
    for number in (*range(min(last, _SEARCHED_BATCHES)), last):
        rows_of = [stop - start for start, stop in plan.rows(number)]
        counts = [sum(rows_of[rank] for rank in group) for group in together]
        steps = (part for rows in counts for part in _cut(rows, options.local_steps))
        single = any(1 in parallel.pass_sizes(part, options.accumulate) for part in steps)
        if single and (iterations is None or number < iterations):
            steps_name = "inner_steps" if options.outer else "local_steps"
            cuts = {steps_name: options.local_steps, "accumulate": options.accumulate}
            cut = "".join(f", {name}={parts}" for name, parts in cuts.items() if parts > 1)
            if parallel.micro_batches > 1:
                cut += f", micro_batches={parallel.micro_batches}"
            who = "the whole batch" if of_all else "a replica"
            raise ModelError(
                f"the {what} needs mini-batches of more than one row ({reason}), and in "
                f"iteration {number + 1} of each epoch {who} gets one: {plan.num_samples} "
                f"rows, batch_size={plan.batch_size // options.local_steps}, "
                f"replicas={len(plan.counts)}{cut}. Choose another batch_size or fewer replicas"
                f"{', or cut less' if cut else ''}."
            ) from error


def _refused(module: nn.Module, recipe: Recipe, batch: Batch) -> tuple[str, str, Exception] | None:
    """Return what fails with one row ("model" or "loss"), why, and the error; None if neither fails."""
    several = to_tensors(batch.inputs), to_tensors(batch.targets)
    one = MiniBatch(*several, lengths=batch.lengths).rows(slice(1))
    inputs, targets = one.inputs, one.targets
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those about shapes: the results are right
        try:
            returned = recipe.signature.call_for_loss(recipe.loss, module, inputs, targets)
            output = recipe.signature.for_loss(recipe.loss, returned)
        except Exception as error:
            return "model", text_of(error), error
        try:
            weights = torch.ones(1) if recipe.options.weighted else None
            masses = masses_of(recipe.loss, targets)
            value, _ = loss_of(recipe.loss, output, targets, weights, masses)
            if value.requires_grad:
                value.backward()
        except Exception as error:
            return "loss", f"{text_of(error)}; the output of one is {shape_of(output)}", error
    return None


def _cut(rows: int, count: int) -> list[int]:
    """Return the sizes of ``count`` nearly equal parts of ``rows``."""
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def check_frequencies(module: nn.Module) -> None:
    """Raise :class:`ModelError` if a trained table divides gradients by counts in a mini-batch."""
    for name, table in module.named_modules():
        counts = isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.scale_grad_by_freq
        if counts and table.weight.requires_grad:
            raise ModelError(
                f'"{name}" has scale_grad_by_freq=True: torch then divides by how often a row occurs '
                "in a mini-batch, and each replica or micro-batch would count its own. Leave it "
                "out, or train with replicas=1 and accumulate=1."
            )


def check_writes(module: nn.Module, recipe: Recipe, batch: Batch, before: dict[str, int]) -> None:
    """Warn of a forward pass that writes to trained parameters.

    Raise ModelError if a step writes to parameters, a pass to frozen ones, or a lookup to a trained
    table (``max_norm``). This changes the weights of ``module``.
    """
    for name, table in module.named_modules():
        norm = table.max_norm if isinstance(table, nn.Embedding | nn.EmbeddingBag) else None
        if norm is not None and table.weight.requires_grad:
            raise ModelError(
                f'"{name}" has max_norm={norm:g}: torch then changes the weights of the '
                "rows that are looked up, and each replica would change its own copy. Leave it "
                "out, and scale the embeddings in forward."
            )
    step = is_step(recipe.loss)
    written = _compare(module, before, step)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.01)  # as an update does: else writing a copy of it goes unseen
                if step:  # an optimizer inside of it meets gradients in training
                    parameter.grad = torch.ones_like(parameter)
    before = parameter_sums(module)
    inputs, targets = to_tensors(batch.inputs), to_tensors(batch.targets)
    with seeded(0), contextlib.suppress(Exception):  # it need not work with all weights
        recipe.signature.call_for_loss(recipe.loss, module, inputs, targets)
    for name in [*written, *_compare(module, before, step)][:1]:
        logging.getLogger("sparkdl").warning(
            'forward writes to "%s", a trained parameter: each replica writes to a copy, and updates '
            "are made to the weights as they were. Let forward compute what it needs from it "
            "(torch.nn.utils.parametrize), or let the step of your own optimizer class write.",
            name,
        )


def parameter_sums(module: nn.Module) -> dict[str, int]:
    """Return a checksum of each parameter, by name."""
    return {name: zlib.adler32(bytes_of(p)) for name, p in module.named_parameters()}


def _compare(module: nn.Module, before: dict[str, int], step: bool) -> list[str]:
    """Return the names of trained parameters with other sums. Raise ModelError for all others."""
    now = parameter_sums(module)
    changed = [name for name in now if now[name] != before.get(name, now[name])]
    for name in changed:
        if step:
            raise ModelError(f'step changes "{name}", and updates belong to the engine. {ALONE}')
        if not module.get_parameter(name).requires_grad:
            raise ModelError(
                f'forward writes to "{name}", a parameter with requires_grad=False: such '
                "parameters are treated as constants, and each worker would change its own copy. "
                "Make it a buffer (register_buffer): replicas agree on buffers, which are saved "
                "with the model."
            )
    return changed
