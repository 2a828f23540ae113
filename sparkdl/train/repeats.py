"""Warnings if the same rows give something else the second time, or in a smaller mini-batch.

:mod:`sparkdl.train.plain_state` finds what the attributes of a model hold. What lies elsewhere (in a
class, a closure, a global variable, a generator of the user's own) shows only in the results.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.data.batches import Batch, BatchSpec, preview_batch
from sparkdl.data.ragged import Rows
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating, to_tensors
from sparkdl.train.plain_state import comparable
from sparkdl.train.row_losses import ROUNDING, ROUNDING_OF_16_BITS, leaves

logger = logging.getLogger("sparkdl")


def tell_of_hidden_state(module: nn.Module, recipe: Recipe, batch: Batch) -> None:
    """Warn if the output of a model, or of a step, depends on earlier passes."""
    found = []
    for _ in range(2):
        given = (batch.inputs, batch.targets)
        inputs, targets = ([t.clone() for t in to_tensors(arrays)] for arrays in given)
        with buffers_kept(module), seeded(recipe.seed):  # a forward may compute gradients
            output = recipe.signature.call_for_loss(recipe.loss, module, inputs, targets)
            found.append(comparable(output))
    if found[0] != found[1]:
        logger.warning(
            "the model gives another output when the same rows pass again with the same weights, "
            "buffers and seeds: it depends on something else, such as a count of calls in a class or "
            "a global variable, or a generator that is not seeded. Each process has its own, so "
            "engines and runs will differ. Keep counts in buffers (register_buffer), and draw from "
            "the global generators of torch, numpy or random."
        )


def tell_of_own_draws(how: BatchSpec, preview: Sequence[Rows], seed: int, batch: Batch) -> None:
    """Warn if ``augment``, which made ``batch`` with ``seed``, makes something else this time."""
    if how.augment is None:
        return
    with seeded(seed):
        again = preview_batch(how, preview, augment=True)
    if comparable(batch.inputs) != comparable(again.inputs):
        logger.warning(
            "augment returns something else for the same sample in the same epoch: it keeps something "
            "between calls, or draws from a generator of its own. Engines and runs will differ. Draw "
            "from the rng that it is called with, or from the global generators of torch, numpy or "
            "random, which are seeded for each sample."
        )


_ROWS = 6


def tell_of_mixed_rows(module: nn.Module, recipe: Recipe, batch: Batch) -> None:
    """Warn if the output for a row depends on other rows of its mini-batch, in evaluation mode.

    It does only if this changes at least half of the rows, and by more than rounding would in any
    dtype: in another mini-batch a model may choose another expert for a few rows. A model that
    draws random numbers, has weights of 16 bits, or cannot be compared, is passed over.
    """
    inputs = [tensor[:_ROWS] for tensor in to_tensors(batch.inputs)]
    rows = len(inputs[0])
    if rows < 2 or any(p.element_size() < 4 for p in module.parameters()):
        return

    def outputs(start: int, stop: int, seed: int = 0) -> list[torch.Tensor]:
        with evaluating(module), buffers_kept(module), seeded(seed):
            returned = recipe.signature.call(module, [tensor[start:stop] for tensor in inputs])
            found = [t for t in leaves(recipe.signature.output(returned)) if torch.is_tensor(t)]
        some = [t for t in found if t.dtype in ROUNDING and t.ndim and len(t) == stop - start]
        return [t.reshape(len(t), -1) for t in some if t.numel()]

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        least = ROUNDING_OF_16_BITS * torch.maximum(one.abs().max(), other.abs().max())
        return 2 * int(((one - other).abs().amax(1) > least).sum()) >= len(one)

    try:
        whole, again = outputs(0, rows), outputs(0, rows, seed=1)
        halves = zip(outputs(0, rows // 2), outputs(rows // 2, rows), strict=True)
        joined = [torch.cat(pair) for pair in halves]
        mixed = any(map(differ, whole, joined)) and not any(map(differ, whole, again))
    except Exception:  # it accepts no other number of rows, for example
        return
    if mixed:
        logger.warning(
            "the model's output for a row depends on the other rows of its mini-batch. Each replica, "
            "and with accumulate each micro-batch, has rows of its own, so the result is not that of "
            "one process: replicas=1 and accumulate=1 give that. If this is not intended, look for "
            "an operation over the first dimension in forward, such as .mean(0) or softmax(dim=0)."
        )
