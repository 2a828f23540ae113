"""The common part of all strategies in which torch sums the gradients of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives import direct
from sparkdl.engines.gang.model_group import ModelGroup
from sparkdl.engines.gang.rank_messages import gathered_counts
from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankPass
from sparkdl.model.flat import Layout
from sparkdl.model.loss import is_step
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.compute import (
    MiniBatch,
    Passed,
    Spare,
    forward_backward,
    idle,
    padding_pass,
    passes_together,
)
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import Gradients, ReplicaIteration, take_gradients, to_mini_batch
from sparkdl.slices.section import NOTHING, SPARE, Section, sums_up


class GradientVector:
    """A vector of the dense gradients, each at the position of its parameter in the flat vector.

    Its memory is allocated once, and the gaps between gradients are zero. Behind the gradients
    there is a count for each parameter: the number of ranks that had a gradient for it, if
    :meth:`count` is used.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        count, size = sum(s.kind == "parameter" for s in layout.segments), layout.buffers_start
        self._memory = torch.zeros(size + count, dtype=layout.dtype, device=device)
        self.vector, self._counts = self._memory[:size], self._memory[size:]
        self._places = [
            self.vector[s.start : s.stop].view(s.shape)
            for s in layout.segments
            if s.kind == "parameter"
        ]

    def filled(self, dense: Sequence[torch.Tensor | None], factor: float = 1.0) -> torch.Tensor:
        """Fill the vector with gradients, by parameter number, times ``factor``.

        Where there is no gradient, the vector is zero.
        """
        for place, gradient in zip(self._places, dense, strict=True):
            if gradient is None or not factor:  # ignore the gradients of spare rows
                place.zero_()
            elif factor == 1.0:
                place.copy_(gradient)
            else:
                torch.mul(gradient.to(place.dtype), factor, out=place)
        return self.vector

    def count(self, dense: Sequence[torch.Tensor | None]) -> None:
        """Record which gradients exist, for the next sum."""
        self._counts.copy_(torch.tensor([float(gradient is not None) for gradient in dense]))

    def sum(self, wire: torch.dtype | None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum over the ranks of ``group``, in the dtype ``wire``."""
        memory = self._memory
        sent = memory if wire in (None, memory.dtype) else memory.to(wire)
        direct.all_reduce(sent, group)
        if sent is not memory:
            memory.copy_(sent)
        return self.vector

    @property
    def absent(self) -> frozenset[int]:
        """Return the parameters for which no rank had a gradient."""
        return frozenset(n for n, count in enumerate(self._counts.tolist()) if not count)


class GradientSum(GradientSync):
    """The work of a rank on the gradients of an iteration, if torch sums them."""

    _model_group: ModelGroup | None = None
    """The model-parallel group of this rank, if it has one."""
    _group: dist.ProcessGroup | None = None
    """The ranks over which gradients are summed after the pass; None: all."""
    _sums = True
    """False if the pass leaves gradients that are sums already."""
    _factor = 1.0
    """The factor for the gradients after the pass. 0: ignore them, they are those of spare rows."""

    def __init__(self, build: Build, copies: bool = False) -> None:
        """Create the gradient vector and prepare the spare rows.

        A rank without rows takes part in the sums with these, with a weight of 0. ``copies`` says
        that gradients are summed over the copies of a split model.
        """
        if copies:
            self._group = build.groups.along("data")
            self._sums = self._group is not None
        super().__init__(build.rank)
        live = self._live = build.live
        self._plans = build.plans
        rows = to_mini_batch(build.spare, live, training=False)
        self._spare = Spare(rows.inputs, rows.targets)
        self._vector = GradientVector(live.flat.layout, live.flat.flat.device)
        self._gradients, self._total = Gradients([], {}), 0.0

    def _counted(self, count: float, weights: Sequence[float], own: float) -> None:
        """Set the count of this rank from ``count``, which the pass found for all rows of its group.

        ``own`` is the weight of these rows, of which each rank gets its share.
        """
        self._total = sum(weights)
        self.count = count * (weights[self._rank] / own) if own else 0.0

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections from which each of this rank's slices is updated, by slice index.

        The first replica's section has the sum of all gradients. Each section has the buffers of
        its replica.
        """
        layout = self._live.flat.layout
        flat, absent = self.summed()
        found, known = sum(weights), self._total
        if found and found != known:  # see [Note: sums are divided twice]
            flat.mul_(known / found)
        if any(weights):
            buffers = self._buffers(len(weights))
        else:  # no rows have weight, so the effect of spare rows on the buffers is dropped
            buffers = [self._live.flat.flat[layout.buffers_start :]] * len(weights)
            absent = frozenset(range(len(self._live.flat.parameters)))
        self._gradients = Gradients([], {})
        taking_part = [r for r, (start, stop) in enumerate(rows) if stop > start]
        groups = [] if self._model_group is None else self._model_group.all
        repeats = {r for group in groups for r in [r for r in group if weights[r]][1:]}
        sections: dict[int, list[Section]] = {}
        for plan in self._plans:
            low = plan.start + plan.buffers_start - layout.buffers_start
            high = plan.stop - layout.buffers_start
            whole = flat[plan.start : plan.start + plan.dense_length]
            sections[plan.index] = [
                Section(
                    r,
                    weights[r],
                    whole if r == taking_part[0] else whole[:0],
                    buffers[r][low : max(low, high)],
                    absent,
                    kind=SPARE if r == taking_part[0] else NOTHING,
                    repeats=r in repeats,
                )
                for r in taking_part
            ]
        return sections

    def not_finite(self) -> str:
        """Return the name of a parameter whose gradient on this rank cannot be summed, or "".

        This puts the gradients into the vector.
        """
        if not self._factor:
            self._gradients = Gradients([None] * len(self._live.flat.parameters), {})
        dense, wire, ranks = self._gradients.dense, None, 1
        flat = self._vector.filled(dense, self._factor)
        if self._sums:
            self._vector.count(dense)
            wire, ranks = self._live.recipe.options.wire_dtype, dist.get_world_size(self._group)
        if can_be_summed(flat if wire is None else flat.to(wire), ranks):
            return ""
        return first_not_finite(self._live, self._gradients, self._factor, wire, ranks)

    def summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """Return the summed gradients in one vector, and the parameters without one.

        The gradients that are kept separately may be freed by this.
        """
        if not self._sums:
            return self._vector.vector, self._gradients.absent
        flat = self._vector.sum(self._live.recipe.options.wire_dtype, self._group)
        return flat, self._vector.absent

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """Return the buffers of every rank, as they lie at the end of a flat vector."""
        layout = self._live.flat.layout
        if layout.buffers_start == layout.size:
            return [self._vector.vector[:0]] * size
        own = self._live.flat.buffers()
        found = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(found, own)
        return found


class SummedGradients(GradientSum):
    """The sum of the gradients of one pass."""

    _gathers = False
    """True if all ranks must call the model equally often."""

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        work, batches, weights, clock = rank_pass
        own, total, tells = weights[self._rank], sum(weights), bool(weights[self._rank])
        batch = batches[0] if batches else None
        if self._model_group is not None and len(self._model_group.ranks) > 1:
            batch = self._model_group.together(work, weights, batch)
            work, own = self._model_group.as_one(work), self._model_group.weight(weights)
            clock.lap("data")
        self._factor = float(bool(own))
        rows = batch if own else self._in_statistics(batch, total)
        batch = rows or self._spare
        steps = is_step(self._live.loss)
        with (
            padding_pass(rows is None),
            passes_together(steps and self._live.recipe.options.accumulate == 1),
        ):
            loss, count, losses = self.run_pass(work, batch, own / total if total else 0.0, clock)
        self._counted(count, weights, own)
        part = weights[self._rank] / own if own else 0.0
        self.losses = {name: (s * part, c * part) for name, (s, c) in losses.items() if tells}
        self._gradients = take_gradients(self._live)
        if tells and not math.isfinite(loss):
            return loss, f"the loss ({loss})"
        name = self.not_finite()
        return loss if tells else 0.0, f'the gradient of "{name}"' if name else ""

    def _in_statistics(self, batch: MiniBatch | None, total: float) -> MiniBatch | None:
        """Return rows that have no weight, and count in a batch norm over all ranks like any others."""
        if batch is None or not total or not self._live.recipe.options.sync_batchnorm:
            return None
        return Spare(batch.inputs, batch.targets)

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        """Run forward and backward, with the loss multiplied by ``share``."""
        seed, scale, live = work.seed(), work.step.loss_scale, self._live
        return forward_backward(live, batch, seed, scale, clock, None, share, parts, by_rows=True)

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        if self._model_group is None:
            return score()
        counts = gathered_counts(batches)
        most = self._model_group.most(counts) if self._gathers else 0
        return self._model_group.scored(counts, score, most, outputs)


def factors(live: LiveReplica, share: float) -> tuple[float, float]:
    """Return the factors for the loss before backward and for the gradients after it.

    Together they give the gradients a rank's ``share``. The loss gets it if gradients are exchanged
    within the pass, as in batch norm over the ranks, or where a step has the rows of all ranks. Then
    rows without weight have gradients too, through the statistics.
    """
    if live.recipe.options.sync_batchnorm or is_step(live.loss):
        return share, 0.0 if idle() else 1.0
    return 1.0, share


def first_not_finite(
    live: LiveReplica,
    gradients: Gradients,
    factor: float = 1.0,
    wire: torch.dtype | None = None,
    ranks: int = 1,
) -> str:
    """Return the first parameter on this rank whose gradient cannot be summed, or "".

    See :func:`can_be_summed`.
    """
    for (segment, _), gradient in zip(live.flat.parameters, gradients.dense, strict=True):
        if gradient is None:
            continue
        sent = gradient.to(live.flat.layout.dtype)
        sent = sent if factor == 1.0 else sent * factor
        if not can_be_summed(sent if wire is None else sent.to(wire), ranks):
            return segment.name
    return ""


def can_be_summed(sent: torch.Tensor, ranks: int) -> bool:
    """Return whether the values that a rank sends, and their sum over ``ranks``, are finite.

    This assumes that the other ranks send no larger values. Sums in float16 overflow at 65,504.
    """
    return sums_up(_most(sent, ranks)) or bool(all_finite(sent, ranks))


def all_finite(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the same as :func:`can_be_summed`, as a boolean tensor on the device of ``sent``."""
    return torch.isfinite(_most(sent, ranks)).all()


def _most(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    return sent * ranks if sent.dtype == torch.float16 else sent
