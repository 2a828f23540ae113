"""The work of one replica in one iteration, from rows to its sections. No Spark.

Both engines use it: in the tasks of the forward-backward job, and in the local engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter, Tensors, TensorSpec, copy_packed, specs_of
from sparkdl.data.batches import Batch, BatchSpec, fields_to_batch, training_rows, visit_order
from sparkdl.data.epoch import derive_seed
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.data.prefetch import AHEAD
from sparkdl.data.ragged import Rows
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import masses_of
from sparkdl.replica.compute import (
    Gradients,
    Losses,
    MiniBatch,
    forward_backward,
    take_gradients,
    to_tensors,
    weigh,
)
from sparkdl.replica.gradient_writer import GradientWriter
from sparkdl.replica.iteration import Clock, IterationRows
from sparkdl.slices.compression import GradBucket, compress
from sparkdl.slices.section import (
    Section,
    SectionLayout,
    cut_rows,
    first_not_finite,
    open_section,
    section_nbytes,
    write_gradients,
)
from sparkdl.slices.spec import SliceSpec


@dataclass(frozen=True)
class ReplicaIteration:
    """One replica's part of one iteration: rows [start, stop) of its order of the epoch."""

    step: IterationRows
    replica: int
    assembly: BatchSpec
    share: int

    @property
    def rows(self) -> tuple[int, int]:
        return self.step.rows[self.replica]

    def mini_batches(
        self, live: LiveReplica, partition: MappedPartition, count: int = 1
    ) -> list[Batch]:
        """Read the rows, and return them as mini-batches.

        Args:
            live: The replica.
            partition: The replica's samples.
            count: The number of mini-batches, which have nearly equal size. Empty ones are omitted.
        """
        start, stop = self.rows
        assembly = replace(self.assembly, augment=live.recipe.augment)
        epoch, replica = self.step.epoch, self.replica
        order = visit_order(assembly, partition, epoch, replica, self.share)

        def prepare(low: int, high: int) -> list[Rows]:
            return training_rows(assembly, partition, order[low:high], epoch, replica)

        who, position = (partition.name, replica), (assembly, epoch, self.share)
        fields = AHEAD.take(who, position, start, stop, len(order), prepare)
        cuts = [(stop - start) * j // count for j in range(count + 1)]
        return [
            fields_to_batch(assembly, [rows[low:high] for rows in fields])
            for low, high in itertools.pairwise(cuts)
            if high > low
        ]

    def seed(self, local_step: int = 0, purpose: str = "forward") -> int:
        """Return the seed of random draws in forward, or in an "update" that the replica makes
        itself."""
        position = (self.step.index, self.replica) + ((local_step,) if local_step else ())
        return derive_seed(self.assembly.seed, purpose, *position)


@dataclass
class ReplicaResult:
    """The result of a replica's work.

    Attributes:
        loss: The mean loss.
        weight: The weight in the average over the replicas.
        count: The number of samples.
        gradients: The gradients.
        arrays: After local steps, the element-wise optimizer state.
        others: After local steps, all other optimizer state, packed.
        compressed: The tensors that a hook sends in place of the dense gradients, by parameter
            number.
        kept: The tensors that the replica keeps of them, by parameter number.
        losses: Sum and count of each named loss of a step.
    """

    loss: float = 0.0
    weight: float = 0.0
    count: int = 0
    gradients: Gradients = field(default_factory=lambda: Gradients([], {}))
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    others: bytes = b""
    compressed: ByParameter | None = None
    kept: ByParameter = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)


def to_mini_batch(
    batch: Batch, live: LiveReplica, training: bool = True, masses: bool = True
) -> MiniBatch:
    """Return a batch as tensors on the replica's device, with the weight of each sample.

    Args:
        batch: The batch.
        live: The replica.
        training: Whether class weights and masses apply.
        masses: Whether masses are computed in training, see :func:`sparkdl.model.loss.masses_of`.
    """
    device, taken = live.device, None
    targets = to_tensors(batch.targets, device)
    weights = None if batch.weights is None else to_tensors([batch.weights], device)[0]
    if training:
        weights = weigh(targets, weights, live.recipe.policy)
    if training and masses:
        here = targets if device.type == "cpu" else to_tensors(batch.targets, torch.device("cpu"))
        taken = masses_of(live.recipe.loss, here)
    return MiniBatch(to_tensors(batch.inputs, device), targets, weights, taken)


def one_gradient(
    live: LiveReplica,
    batch: Batch,
    work: ReplicaIteration,
    clock: Clock,
    writer: GradientWriter | None = None,
) -> ReplicaResult:
    """Run forward and backward over the mini-batch.

    Args:
        live: The replica.
        batch: The mini-batch.
        work: The replica's part of the iteration.
        clock: The clock for the seconds of each activity.
        writer: Takes the dense gradients, if there is one.
    """
    mini_batch = to_mini_batch(batch, live)
    passed = forward_backward(live, mini_batch, work.seed(), work.step.loss_scale, clock, writer)
    gradients = take_gradients(live)
    if writer is not None:
        gradients = writer.finish(gradients)
    return ReplicaResult(
        passed.loss, passed.weight, len(mini_batch), gradients, losses=passed.losses
    )


def section_maps(
    live: LiveReplica, plans: Sequence[SliceSpec], outcome: ReplicaResult
) -> list[SectionLayout]:
    """Return the layout of each slice's section for this outcome.

    Args:
        live: The replica.
        plans: All slices.
        outcome: The replica's result.
    """
    wire = live.recipe.policy.wire_dtype or live.flat.layout.dtype
    arrays = {
        name: str(array.dtype).removeprefix("torch.") for name, array in outcome.arrays.items()
    }
    return [
        SectionLayout(
            wire,
            {
                piece.number: len(cut_rows(piece, outcome.gradients.tables[piece.number])[0])
                for piece in plan.tables
                if piece.number in outcome.gradients.tables
            },
            arrays,
            _specs(plan, outcome),
        )
        for plan in plans
    ]


def _specs(plan: SliceSpec, outcome: ReplicaResult) -> tuple[TensorSpec, ...] | None:
    """Return the specs of the compressed gradients of a slice."""
    if outcome.compressed is None:
        return None
    numbers = [p.number for p in plan.parameters if p.number in outcome.compressed]
    return specs_of({number: outcome.compressed[number] for number in numbers})


def sections_nbytes(
    live: LiveReplica, plans: Sequence[SliceSpec], maps: Sequence[SectionLayout]
) -> list[int]:
    """Return the number of bytes of each slice's section.

    Args:
        live: The replica.
        plans: All slices.
        maps: The layouts of :func:`section_maps`.
    """
    dtype = live.flat.layout.dtype
    return [section_nbytes(plan, dtype, section) for plan, section in zip(plans, maps, strict=True)]


@torch.no_grad()
def write_sections(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    maps: Sequence[SectionLayout],
    outcome: ReplicaResult,
    out: np.ndarray,
) -> list[Section]:
    """Write the replica's sections, except for gradients that are in them already.

    Args:
        live: The replica.
        plans: All slices.
        maps: The layouts of :func:`section_maps`.
        outcome: The replica's result.
        out: Memory for the sections, uint8, slice after slice.
    """
    layout = live.flat.layout
    buffers = live.flat.buffers()
    if not outcome.weight:  # it may have run forward before it knew that nothing counts
        buffers = live.flat.flat[layout.buffers_start :]
    sections, place = [], 0
    for plan, section, nbytes in zip(plans, maps, sections_nbytes(live, plans, maps), strict=True):
        contribution = open_section(
            plan,
            layout.dtype,
            section,
            out[place : place + nbytes],
            weight=outcome.weight,
            absent=outcome.gradients.absent,
        )
        write_gradients(
            layout,
            plan,
            outcome.gradients.dense,
            outcome.gradients.tables,
            contribution,
            outcome.gradients.written,
        )
        if contribution.compressed is not None and outcome.compressed is not None:
            copy_packed(contribution.compressed, outcome.compressed)
        start = plan.start + plan.buffers_start - layout.buffers_start
        contribution.buffers.copy_(buffers[start : start + len(contribution.buffers)])
        for name, array in outcome.arrays.items():
            contribution.arrays[name].copy_(array[plan.start : plan.start + plan.trainable_length])
        sections.append(contribution)
        place += nbytes
    return sections


def not_finite(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    sections: Sequence[Section],
    outcome: ReplicaResult,
) -> str:
    """Return the name of a value in the sections that is inf or NaN, or an empty string.

    Args:
        live: The replica.
        plans: All slices.
        sections: The sections as they are sent.
        outcome: The replica's result.
    """
    if not np.isfinite(outcome.loss):
        return f"the loss ({outcome.loss})"
    known = outcome.gradients.not_finite
    if known is None:
        found = (first_not_finite(p, s) for p, s in zip(plans, sections, strict=True))
        number = next((n for n in found if n is not None), None)
    else:
        number = min(known, default=None)
    return "" if number is None else f'the gradient of "{live.flat.layout.segments[number].name}"'


def compress_outcome(
    live: LiveReplica, outcome: ReplicaResult, work: ReplicaIteration, kept: ByParameter
) -> ReplicaResult:
    """Return ``outcome`` with its dense gradients compressed.

    Parameters without a gradient keep the state that they had.

    Args:
        live: The replica.
        outcome: The replica's result.
        work: The replica's part of the iteration.
        kept: The tensors that the replica kept in its last iteration.
    """
    assert live.recipe.compression is not None
    layout = live.flat.layout
    wire = live.recipe.policy.wire_dtype or layout.dtype
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
            seed=derive_seed(work.assembly.seed, "compression", *position),
        )
        compressed[number], keeps[number] = compress(live.recipe.compression, bucket, wire)
    return replace(outcome, compressed=compressed, kept=keeps)
