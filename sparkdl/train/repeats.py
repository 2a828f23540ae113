"""Warnings if the same rows give something else the second time, with the same weights and seeds.

:mod:`sparkdl.train.plain_state` finds what the attributes of a model hold. What lies elsewhere (in a
class, a closure, a global variable, a generator of the user's own) shows only in the results.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from sparkdl.data.batches import Batch, BatchSpec, preview_batch
from sparkdl.data.ragged import Rows
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept
from sparkdl.replica.mini_batch import to_tensors
from sparkdl.train.plain_state import comparable

logger = logging.getLogger("sparkdl")


def tell_of_hidden_state(module: nn.Module, recipe: Recipe, batch: Batch) -> None:
    """Warn if the output of a model, or of a step, depends on earlier passes.

    Args:
        module: A private copy of the model, which accepts the rows.
        recipe: The model, the loss and their options.
        batch: Some rows.
    """
    inputs, targets = to_tensors(batch.inputs), to_tensors(batch.targets)
    module.train()
    found = []
    for _ in range(2):
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
    """Warn if ``augment`` makes something else of the same rows the second time.

    Args:
        how: Says how rows become the arrays of a mini-batch.
        preview: Some rows.
        seed: The seed of the run.
        batch: What ``augment`` made of them with that seed the first time.
    """
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
