"""Checks of a forward pass: mini-batches of a single row, and writes to parameters."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.errors import ModelError
from sparkdl.model.loss import loss_of, masses_of
from sparkdl.model.options import TrainingOptions
from sparkdl.model.recipe import Recipe, frozen_digests
from sparkdl.model.signature import Signature
from sparkdl.parallel.pipeline import pass_sizes
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import to_tensors
from sparkdl.train.hints import shape_of, text_of

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

    Args:
        module: A private copy of the model.
        recipe: The model, the loss and their options.
        batch: Rows to try them on.
        plan: The mini-batches of an epoch.
        iterations: The number of iterations of the run, if it is known.
        parallel: The plan of how ranks share the work.

    Raises:
        ModelError: A mini-batch of the run would have one row, and this fails.
    """
    found = _refused(module, recipe, batch)
    if found is None:
        return
    what, reason, error = found
    policy, pipeline = recipe.policy, parallel.pipeline
    last, together = plan.num_iterations - 1, parallel.mesh.model_groups
    of_all = policy.sync_batchnorm and what == "model"  # the rows of all ranks count together
    if of_all:
        together = [[rank for group in together for rank in group]]
    for number in (*range(min(last, _SEARCHED_BATCHES)), last):
        rows_of = [stop - start for start, stop in plan.rows(number)]
        counts = [sum(rows_of[rank] for rank in group) for group in together]
        if pipeline is None:
            single = any(_has_single(rows, policy) for rows in counts)
        else:
            single = any(1 in sizes for sizes in pass_sizes(pipeline, counts, policy.accumulate))
        if single and (iterations is None or number < iterations):
            cut = "".join(
                f", {name}={getattr(policy, name)}"
                for name in ("local_steps", "accumulate")
                if getattr(policy, name) > 1
            )
            if pipeline is not None:
                cut += f", micro_batches={pipeline.micro_batches}"
            who = "the whole batch" if of_all else "a replica"
            raise ModelError(
                f"the {what} needs mini-batches of more than one row ({reason}), and in "
                f"iteration {number + 1} of each epoch {who} gets one: {plan.num_samples} "
                f"rows, batch_size={plan.batch_size // policy.local_steps}, "
                f"replicas={len(plan.counts)}{cut}. Choose another batch_size or fewer replicas"
                f"{', or cut less' if cut else ''}."
            ) from error


def _refused(module: nn.Module, recipe: Recipe, batch: Batch) -> tuple[str, str, Exception] | None:
    """Return what fails with one row ("model" or "loss"), why, and the error; None if neither fails."""
    inputs, targets = (
        to_tensors([array[:1] for array in arrays], torch.device("cpu"))
        for arrays in (batch.inputs, batch.targets)
    )
    module.train()
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those about shapes: the results are right
        try:
            returned = recipe.signature.call_for_loss(recipe.loss, module, inputs, targets)
            output = recipe.signature.for_loss(recipe.loss, returned)
        except Exception as error:
            return "model", text_of(error), error
        try:
            weights = torch.ones(1) if recipe.policy.weighted else None
            masses = masses_of(recipe.loss, targets)
            value, _ = loss_of(recipe.loss, output, targets, weights, masses)
            if value.requires_grad:
                value.backward()
        except Exception as error:
            return "loss", f"{text_of(error)}; the output of one is {shape_of(output)}", error
    return None


def _has_single(rows: int, policy: TrainingOptions) -> bool:
    """Return whether a replica's rows, cut into local steps and micro-batches, leave one row alone."""
    return any(
        1 in _cut(part, min(policy.accumulate, part))
        for part in _cut(rows, policy.local_steps)
        if part
    )


def _cut(rows: int, count: int) -> list[int]:
    """Return the sizes of ``count`` nearly equal parts of ``rows``."""
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def check_writes(module: nn.Module, signature: Signature, inputs: Sequence[np.ndarray]) -> None:
    """Raise an error if a forward pass writes to parameters that should not change.

    It must not write to frozen parameters, nor renormalize the rows of a trained table in place
    (``max_norm``).

    Args:
        module: A private copy of the model, whose weights are changed.
        signature: The way to call it.
        inputs: The arrays to call it with.

    Raises:
        ModelError: The forward pass writes to such a parameter.
    """
    for name, table in module.named_modules():
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or table.max_norm is None:
            continue
        if table.weight.requires_grad:
            raise ModelError(
                f'"{name}" has max_norm={table.max_norm:g}: with it torch writes to the weights of '
                "rows that are looked up, which each replica does for its own. Leave it out, and scale "
                "what is looked up in forward."
            )
    if all(parameter.requires_grad for parameter in module.parameters()):
        return
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.01)  # as an update does: else writing a copy of it goes unseen
    before = frozen_digests(module)
    module.train()
    try:
        with seeded(0):
            signature.call(module, to_tensors(inputs, torch.device("cpu")))
    except Exception:  # the model is known to accept these rows, but not with all weights
        return
    after = frozen_digests(module)
    for name, digest in before.items():
        if after.get(name, digest) != digest:
            raise ModelError(
                f'forward writes to "{name}", a parameter with requires_grad=False: these are taken '
                "for constants, and each worker would have its own. Make it a buffer "
                "(register_buffer), which is kept, averaged over the replicas, and part of the result."
            )
