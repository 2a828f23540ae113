"""The work of one replica in one iteration, from rows to its sections. No Spark.

Both engines use it: in the tasks of the forward-backward job, and in the local engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from sparkdl.codec.packed import ByParameter, Tensors
from sparkdl.data.batches import Batch, BatchSpec, fields_to_batch, training_rows, visit_order
from sparkdl.data.epoch import derive_seed
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.data.prefetch import AHEAD
from sparkdl.data.ragged import Rows
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import masses_of
from sparkdl.replica.compute import Losses, forward_backward
from sparkdl.replica.early_stop import EarlyStop
from sparkdl.replica.gradient_writer import GradientWriter
from sparkdl.replica.gradients import Gradients, take_gradients
from sparkdl.replica.iteration import ALL_PARTS, Clock, IterationRows, PassedParts
from sparkdl.replica.mini_batch import MiniBatch, to_tensors, weigh
from sparkdl.slices.compression import GradBucket, compress


@dataclass(frozen=True)
class ReplicaIteration:
    """One replica's part of one iteration: rows [start, stop) of its order of the epoch."""

    step: IterationRows
    replica: int
    batch_spec: BatchSpec
    share: int

    @property
    def rows(self) -> tuple[int, int]:
        return self.step.rows[self.replica]

    def mini_batches(
        self, live: LiveReplica, partition: MappedPartition, count: int = 1
    ) -> list[Batch]:
        """Read the rows, and return ``count`` nearly equal mini-batches, without empty ones."""
        start, stop = self.rows
        batch_spec = replace(self.batch_spec, augment=live.recipe.augment)
        epoch, replica = self.step.epoch, self.replica
        order = visit_order(batch_spec, partition, epoch, replica, self.share)

        def prepare(low: int, high: int) -> list[Rows]:
            return training_rows(batch_spec, partition, order[low:high], epoch, replica)

        who, position = (partition.name, replica), (batch_spec, epoch, self.share)
        fields = AHEAD.take(who, position, start, stop, len(order), prepare)
        cuts = [(stop - start) * j // count for j in range(count + 1)]
        return [
            fields_to_batch(batch_spec, [rows[low:high] for rows in fields])
            for low, high in itertools.pairwise(cuts)
            if high > low
        ]

    def seed(self, local_step: int = 0, purpose: str = "forward") -> int:
        """Return the seed of random draws in forward, or in an "update" that the replica makes
        itself."""
        position = (self.step.index, self.replica) + ((local_step,) if local_step else ())
        return derive_seed(self.batch_spec.seed, purpose, *position)


@dataclass(frozen=True)
class ReplicaResult:
    """The result of a replica's work."""

    loss: float = 0.0
    weight: float = 0.0
    count: int = 0
    gradients: Gradients = field(default_factory=lambda: Gradients([], {}))
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)  # after local steps
    others: bytes = b""  # after local steps: all other optimizer state, packed
    compressed: ByParameter | None = None
    kept: ByParameter = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)
    passed: PassedParts = ALL_PARTS


def to_mini_batch(
    batch: Batch, live: LiveReplica, training: bool = True, masses: bool = True
) -> MiniBatch:
    """Return a batch as tensors on the replica's device, with the weight of each sample.

    Class weights and masses apply only in ``training``.
    """
    device, taken = live.device, None
    targets = to_tensors(batch.targets, device)
    weights = None if batch.weights is None else to_tensors([batch.weights], device)[0]
    if training:
        weights = weigh(targets, weights, live.recipe.options)
    if training and masses:
        here = targets if device.type == "cpu" else to_tensors(batch.targets)
        taken = masses_of(live.recipe.loss, here)
    inputs = to_tensors(batch.inputs, device)
    return MiniBatch(inputs, targets, weights, taken, batch.lengths)


def one_gradient(
    live: LiveReplica,
    batch: Batch,
    work: ReplicaIteration,
    clock: Clock,
    writer: GradientWriter | None = None,
) -> ReplicaResult:
    """Run forward and backward over the mini-batch."""
    mini_batch = to_mini_batch(batch, live)
    limit, stops = work.step.limit, None
    if limit is not None:
        stops = EarlyStop(limit, work.replica, clock, live.device)
    passed = forward_backward(
        live, mini_batch, work.seed(), work.step.loss_scale, clock, writer, stops=stops
    )
    gradients = take_gradients(live)
    if writer is not None:
        gradients = writer.finish(gradients)
    done = ALL_PARTS if stops is None else stops.passed
    return ReplicaResult(
        passed.loss,
        passed.weight,
        len(mini_batch) - done.missed,
        gradients,
        losses=passed.losses,
        passed=done,
    )


def compress_outcome(
    live: LiveReplica, outcome: ReplicaResult, work: ReplicaIteration, kept: ByParameter
) -> ReplicaResult:
    """Return ``outcome`` with its dense gradients compressed.

    Parameters without a gradient keep the state that they had.
    """
    assert live.recipe.compression is not None
    layout = live.flat.layout
    wire = live.recipe.options.wire_dtype or layout.dtype
    compressed: dict[int, Tensors] = {}
    keeps = dict(kept)
    for number, gradient in enumerate(outcome.gradients.dense):
        if gradient is None:
            continue
        position = work.step.index, work.replica, number
        bucket = GradBucket(
            name=layout.segments[number].name,
            gradient=gradient.to(layout.dtype).contiguous(),
            state={n: t.to(gradient.device) for n, t in kept.get(number, {}).items()},
            iteration=work.step.index,
            seed=derive_seed(work.batch_spec.seed, "compression", *position),
        )
        compressed[number], keeps[number] = compress(live.recipe.compression, bucket, wire)
    return replace(outcome, compressed=compressed, kept=keeps)
