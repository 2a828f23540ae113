"""Weights that a model's forward writes to: what would be lost, or differ from replica to replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from sparkdl.errors import ModelError
from sparkdl.model.recipe import frozen_digests
from sparkdl.model.signature import Signature
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import to_tensors


def check_writes(module: nn.Module, signature: Signature, inputs: Sequence[np.ndarray]) -> None:
    """Raise :class:`sparkdl.ModelError` for a forward pass that writes to parameters which do not
    train, or that norms the rows of a table in place.

    ``inputs``: what ``module`` is called with, a private copy, whose weights are others afterwards.
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
                parameter.add_(0.01)  # as after an update: else a copy of them stays what it is
    before = frozen_digests(module)
    module.train()
    try:
        with seeded(0):
            signature.call(module, to_tensors(inputs, torch.device("cpu")))
    except Exception:  # it takes these rows, which is known, but not with all weights
        return
    after = frozen_digests(module)
    for name, digest in before.items():
        if after.get(name, digest) != digest:
            raise ModelError(
                f'forward writes to "{name}", a parameter with requires_grad=False: these are taken '
                "for constants, and each worker would have its own. Make it a buffer "
                "(register_buffer), which is kept, averaged over the replicas, and part of the result."
            )
