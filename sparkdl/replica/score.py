"""Scoring the weights of version t on validation samples, where the replicas are."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from sparkdl.data.batches import BatchSpec, plain_batch
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import evaluating
from sparkdl.replica.step import to_mini_batch


def score_partition(
    live: LiveReplica,
    partition: MappedPartition,
    scorer: Scorer,
    batch_spec: BatchSpec,
    batch_size: int,
) -> list[Any]:
    """Return the scorer's states over all rows of a partition, in evaluation mode and in order."""
    states, device = scorer.start(), live.device
    dtype, scorer = live.recipe.options.autocast_dtype, scorer.on(device)
    cast: Any = (
        contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    )
    for start in range(0, len(partition.order), batch_size):
        rows = np.arange(start, min(start + batch_size, len(partition.order)))
        batch = to_mini_batch(plain_batch(batch_spec, partition, rows), live, training=False)
        with evaluating(live.flat.module) as module, cast:
            signature = live.recipe.signature
            output = signature.call_for_loss(scorer.loss, module, batch.inputs, batch.targets)
            states = scorer.update(states, output, batch.targets, batch.weights, len(batch))
    return states
