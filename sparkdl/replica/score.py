"""Scoring the replicas' weights of version t on validation samples, in the replicas' places."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyspark import cloudpickle

from sparkdl.data.batches import Assembly, plain_batch
from sparkdl.data.partition_reader import MappedPartition, open_partition
from sparkdl.engines.shuffle.replica_context import Seat
from sparkdl.infer.shipped_module import evaluating
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.model_loss import called
from sparkdl.replica.step import to_mini_batch
from sparkdl.spark.worker import settle_worker


def score_partition(
    live: LiveReplica,
    partition: MappedPartition,
    scorer: Scorer,
    assembly: Assembly,
    batch_size: int,
) -> list[Any]:
    """The scorer's states over all rows of a partition, in evaluation mode and full order."""
    states, device = scorer.start(), live.device
    dtype, scorer = live.recipe.policy.autocast_dtype, scorer.on(device)
    cast: Any = (
        contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    )
    for start in range(0, len(partition.order), batch_size):
        rows = np.arange(start, min(start + batch_size, len(partition.order)))
        batch = to_mini_batch(plain_batch(assembly, partition, rows), live, training=False)
        with evaluating(live.flat.module) as module, cast:
            call = live.recipe.signature.bound(module)
            output = called(scorer.loss, call, batch.inputs, batch.targets)
            states = scorer.update(states, output, batch.targets, batch.weights, len(batch))
    return states


@dataclass(frozen=True)
class Score:
    """Body at a seat whose samples are the validation's: one frame, the pickled states (or a fault)."""

    scorer: Scorer
    assembly: Assembly
    batch_size: int

    def __call__(self, seat: Seat) -> Iterator[bytes]:
        fault = seat.fault()
        if fault is not None:
            yield pickle.dumps((seat.index, fault))
        elif seat.samples.num_rows:
            partition = open_partition(seat.samples)
            states = score_partition(
                seat.replica(), partition, self.scorer, self.assembly, self.batch_size
            )
            yield cloudpickle.dumps((seat.index, states))  # a user's metric may be of __main__
        settle_worker()
