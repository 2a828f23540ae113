"""Scoring the replicas' weights of version t on validation samples, in the replicas' places."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.data.assemble import Assembly, plain_batch
from sparkdl.data.partition import MappedPartition, open_partition
from sparkdl.infer.predictor import evaluating
from sparkdl.infer.scoring import Scorer
from sparkdl.replica.cache import LiveReplica
from sparkdl.step.job import Seat
from sparkdl.step.replica import to_mini_batch
from sparkdl.worker import settle_worker


def score_partition(
    live: LiveReplica,
    partition: MappedPartition,
    scorer: Scorer,
    assembly: Assembly,
    batch_size: int,
) -> list[Any]:
    """The scorer's states over all rows of a partition, in evaluation mode and full order."""
    states = scorer.start()
    dtype = live.recipe.policy.autocast_dtype
    device = live.flat.flat.device
    cast: Any = (
        contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    )
    for start in range(0, partition.num_rows, batch_size):
        rows = np.arange(start, min(start + batch_size, partition.num_rows))
        batch = to_mini_batch(plain_batch(assembly, partition, rows), live)
        with evaluating(live.flat.module) as module, cast:
            output = module(*batch.inputs)
        states = scorer.update(states, output, batch.targets, batch.weights)
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
            yield pickle.dumps((seat.index, states))
        settle_worker()
