"""The work of one replica in one iteration, from rows to its sections. No Spark.

All engines use it, and score the weights on validation samples here.

[Note: gradients leave early] A replica claims its slab before backward, and an autograd hook passes
on each dense gradient as soon as it is complete. The gradient is written into its place in the
sections of the slices, rounded to the wire dtype, checked for inf and NaN, and released. So it is
still in the cache when it is read, its memory is reused for the next layer's gradient, and no
replica ever has all gradients in memory. The size of sections with rows of sparse tables or with
optimizer state is known only after backward, and compression needs the whole gradient: such
replicas write everything afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter, Tensors, copy_packed, specs_of
from sparkdl.data.batches import Batch, BatchSpec, fields_to_batch, training_rows, visit_order
from sparkdl.data.epoch import derive_seed
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.data.prefetch import AHEAD
from sparkdl.data.ragged import Rows
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.flat import local
from sparkdl.model.loss import masses_of
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.compute import (
    Losses,
    MiniBatch,
    evaluating,
    forward_backward,
    to_tensors,
    weigh,
)
from sparkdl.replica.iteration import (
    ALL_PARTS,
    Clock,
    EarlyStop,
    IterationRows,
    PassedParts,
    ReplicaReport,
)
from sparkdl.slices.section import (
    GradBucket,
    Section,
    SectionLayout,
    SparseRows,
    compress,
    cut_rows,
    first_not_finite,
    open_section,
    section_nbytes,
    sums_up,
    write_gradients,
)
from sparkdl.slices.spec import SliceSpec


@dataclass(frozen=True)
class Gradients:
    """The gradients of a replica."""

    dense: list[torch.Tensor | None]  # None: there is none, or it is elsewhere
    tables: dict[int, SparseRows]
    written: frozenset[int] = frozenset()  # the parameters whose gradients are in sections
    not_finite: frozenset[int] | None = None  # None: not checked yet

    @property
    def absent(self) -> frozenset[int]:
        elsewhere = self.written | self.tables.keys()
        return frozenset(n for n, g in enumerate(self.dense) if g is None and n not in elsewhere)


@torch.no_grad()
def take_gradients(replica: LiveReplica) -> Gradients:
    """Take the gradients that backward left in the parameters' ``grad``, which is cleared."""
    dense: list[torch.Tensor | None] = []
    tables: dict[int, SparseRows] = {}
    for number, (segment, parameter) in enumerate(replica.flat.parameters):
        gradient = None if parameter.grad is None else local(parameter.grad)
        if gradient is None:
            dense.append(None)
        elif segment.sparse:
            dense.append(None)
            tables[number] = _rows(gradient)
        else:
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
    replica.clear_gradients()
    return Gradients(dense, tables)


def _rows(gradient: torch.Tensor) -> SparseRows:
    """Return the touched rows of a table's gradient (ascending) and their values, on the CPU."""
    if not gradient.is_sparse:  # the table is used densely elsewhere in the model too
        return torch.arange(len(gradient)), gradient.cpu()
    gradient = gradient.coalesce()
    return gradient.indices()[0].cpu(), gradient.values().cpu()


CHUNK = 1 << 17
"""The number of elements that are copied and checked at a time, so that they stay in the core's
cache."""
CHECK_FROM = 1 << 20
"""The smallest size of a flat vector, in elements, for which gradients are checked one by one. For
a smaller one whole sections are checked at the end, which takes fewer calls."""


def writes_early(live: LiveReplica) -> bool:
    """Return whether the sizes of this replica's sections are known before backward."""
    recipe = live.recipe
    tables = any(segment.sparse for segment in live.flat.layout.segments)
    steps = recipe.options.steps_on_replicas
    return not steps and recipe.compression is None and not tables


class GradientWriter:
    """A function object that writes gradients into the sections of all slices.

    See [Note: gradients leave early]. ``out`` is uint8, slice after slice.
    """

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SliceSpec],
        maps: Sequence[SectionLayout],
        out: np.ndarray,
    ) -> None:
        layout = live.flat.layout
        self._checks = layout.size >= CHECK_FROM
        self._written: set[int] = set()
        self._not_finite: set[int] = set()
        self._places: list[list[tuple[int, torch.Tensor]]] = [[] for _ in live.flat.parameters]
        begin = 0
        for plan, section in zip(plans, maps, strict=True):
            end = begin + section_nbytes(plan, layout.dtype, section)
            gradient = open_section(plan, layout.dtype, section, out[begin:end]).gradient
            for fragment in plan.parameters:
                offset = plan.start + fragment.start - layout.segments[fragment.number].start
                self._places[fragment.number].append(
                    (offset, gradient[fragment.start : fragment.stop])
                )
            begin = end

    @torch.no_grad()
    def __call__(self, number: int, gradient: torch.Tensor) -> None:
        """Write the gradient of parameter ``number``, or add it if there is one already."""
        values = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
        for offset, place in self._places[number]:
            source = values[offset : offset + len(place)]
            if number in self._written:  # reentrant checkpoints go backward more than once
                source = source.to(place) + place
            if self._checks:
                self._copy_and_check(number, source, place)
            else:
                place.copy_(source)
        self._written.add(number)

    def _copy_and_check(self, number: int, source: torch.Tensor, place: torch.Tensor) -> None:
        for part, values in zip(place.split(CHUNK), source.split(CHUNK), strict=True):
            part.copy_(values)
            if not sums_up(part) and not torch.isfinite(part).all():
                self._not_finite.add(number)

    def finish(self, rest: Gradients) -> Gradients:
        """Write the dense gradients that are still with the parameters, and return the gradients of
        the whole pass."""
        for number, gradient in enumerate(rest.dense):
            if gradient is not None:
                self(number, gradient)
        return replace(
            rest,
            dense=[None] * len(rest.dense),
            written=frozenset(self._written),
            not_finite=frozenset(self._not_finite) if self._checks else None,
        )


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

    def report(
        self, replica: int, clock: Clock, not_finite: str = "", **rest: Any
    ) -> ReplicaReport:
        """Return the report of ``replica``, with ``rest`` of its fields."""
        named = {"node_id": "", "losses": self.losses, "passed": self.passed, **rest}
        return ReplicaReport(
            replica,
            self.count,
            self.weight,
            self.loss,
            seconds=clock.seconds,
            not_finite=not_finite,
            **named,
        )


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
        plain = fields_to_batch(batch_spec, partition.gather(rows))  # not augmented
        batch = to_mini_batch(plain, live, training=False)
        with evaluating(live.flat.module) as module, cast:
            signature = live.recipe.signature
            output = signature.call_for_loss(scorer.loss, module, batch.inputs, batch.targets)
            states = scorer.update(states, output, batch.targets, batch.weights, len(batch))
    return states


def section_maps(
    live: LiveReplica, plans: Sequence[SliceSpec], outcome: ReplicaResult
) -> list[SectionLayout]:
    """Return the layout of each slice's section for this outcome."""
    wire = live.recipe.options.wire_dtype or live.flat.layout.dtype
    tables, compressed = outcome.gradients.tables, outcome.compressed
    arrays = {name: str(a.dtype).removeprefix("torch.") for name, a in outcome.arrays.items()}
    maps = []
    for plan in plans:
        fragments = [one for one in plan.tables if one.number in tables]
        rows = {one.number: len(cut_rows(one, tables[one.number])[0]) for one in fragments}
        specs = None
        if compressed is not None:
            numbers = [p.number for p in plan.parameters if p.number in compressed]
            specs = specs_of({number: compressed[number] for number in numbers})
        maps.append(SectionLayout(wire, rows, arrays, specs))
    return maps


def sections_nbytes(
    live: LiveReplica, plans: Sequence[SliceSpec], maps: Sequence[SectionLayout]
) -> list[int]:
    """Return the number of bytes of each slice's section."""
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
    """Write the sections into ``out``, uint8, except for gradients that are in them already."""
    layout = live.flat.layout
    buffers = live.flat.buffers()  # ignored without a weight
    sections, place = [], 0
    for plan, section, nbytes in zip(plans, maps, sections_nbytes(live, plans, maps), strict=True):
        opened = open_section(
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
            opened,
            outcome.gradients.written,
        )
        if opened.compressed is not None and outcome.compressed is not None:
            copy_packed(opened.compressed, outcome.compressed)
        start = plan.start + plan.buffers_start - layout.buffers_start
        opened.buffers.copy_(buffers[start : start + len(opened.buffers)])
        for name, array in outcome.arrays.items():
            opened.arrays[name].copy_(array[plan.start : plan.start + plan.trainable_length])
        sections.append(opened)
        place += nbytes
    return sections


def not_finite(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    sections: Sequence[Section],
    outcome: ReplicaResult,
) -> str:
    """Return the name of a value in the sections that is inf or NaN, or an empty string."""
    if not np.isfinite(outcome.loss):
        return f"the loss ({outcome.loss})"
    known = outcome.gradients.not_finite
    if known is None:
        found = (first_not_finite(p, s) for p, s in zip(plans, sections, strict=True))
        number = next((n for n in found if n is not None), None)
    else:
        number = min(known, default=None)
    return "" if number is None else f'the gradient of "{live.flat.layout.segments[number].name}"'
