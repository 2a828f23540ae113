"""Gradients of all ranks, summed: what every strategy of a gang that lets torch do so has in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.codec.packed import ByParameter
from sparkdl.collectives import direct as one_round
from sparkdl.data.batches import Batch
from sparkdl.engines.gang.model_group import ModelGroup
from sparkdl.model.flat import Layout
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import Gradients, MiniBatch, Passed, Spare, take_gradients
from sparkdl.replica.iteration import Clock
from sparkdl.replica.padding_pass import padding_pass
from sparkdl.replica.step import ReplicaIteration, to_mini_batch
from sparkdl.slices.section import NOTHING, SPARE, Section, sums_up
from sparkdl.slices.spec import SliceSpec


class GradientVector:
    """The dense gradients in one vector, each where its parameter is in the flat vector, in memory that
    stays: the gaps between them are zero. Behind them, for each parameter, how many ranks had one,
    where they are counted."""

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
        """With these times ``factor``, by parameter number; zero where there is none."""
        for place, gradient in zip(self._places, dense, strict=True):
            if gradient is None or not factor:  # whatever a rank without samples made up
                place.zero_()
            elif factor == 1.0:
                place.copy_(gradient)
            else:
                torch.mul(gradient.to(place.dtype), factor, out=place)
        return self.vector

    def count(self, dense: Sequence[torch.Tensor | None]) -> None:
        """Note which of these are there, for the sum."""
        self._counts.copy_(torch.tensor([float(gradient is not None) for gradient in dense]))

    def sum(self, wire: torch.dtype | None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Over the ranks of ``group``, in ``wire``."""
        memory = self._memory
        sent = memory if wire in (None, memory.dtype) else memory.to(wire)
        one_round.all_reduce(sent, group)
        if sent is not memory:
            memory.copy_(sent)
        return self.vector

    @property
    def absent(self) -> frozenset[int]:
        """The parameters of which no rank had a gradient."""
        return frozenset(n for n, count in enumerate(self._counts.tolist()) if not count)


class GradientSync:
    """What rank ``rank`` does for the gradients of an iteration.

    ``needs_all_losses``: whether an update needs to know every rank's loss, or that it is finite:
    then a rank must know that of its own samples. ``kept``: what a hook left out of the gradients
    so far, by parameter number; None where nothing is. ``count``: what the rank's rows of the last
    pass count for, which of a loss that returns ``(sum, count)`` is known only then.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.needs_all_losses, self.count = rank, True, 0.0
        self.kept: ByParameter | None = None

    @property
    def loss_rank(self) -> int:
        """The rank that knows the loss of this one's samples."""
        return self._rank

    def scored(self, batches: int, score: Callable[[], Any]) -> Any:
        """What ``score`` makes of this rank's ``batches`` of the validation's samples."""
        return score()


class SummedGradients(GradientSync):
    """What a rank does for the gradients of an iteration, where torch sums them. ``_counts``: whether
    the last rows that went through here count for something."""

    _model_group: ModelGroup | None = None
    """The ranks with which this one brings its rows together, if there are any."""

    def __init__(
        self, live: LiveReplica, plans: Sequence[SliceSpec], rank: int, spare: Batch
    ) -> None:
        """``plans``: of what this rank updates. ``spare``: a few rows, for iterations in which it has
        none: it takes part in the sums all the same, with nothing."""
        super().__init__(rank)
        self._live, self._plans = live, plans
        rows = to_mini_batch(spare, live, training=False)
        self._spare = Spare(rows.inputs, rows.targets)
        self._vector = GradientVector(live.flat.layout, live.flat.flat.device)
        self._gradients, self._counts, self._total = Gradients([], {}), False, 0.0

    def compute(
        self,
        work: ReplicaIteration,
        batch: MiniBatch | None,
        weights: Sequence[float],
        clock: Clock,
    ) -> tuple[float, str]:
        """The loss, and what is not finite, if anything. ``weights``: what each rank's mini-batch
        counts for."""
        own, total, tells = weights[self._rank], sum(weights), bool(weights[self._rank])
        if self._model_group is not None and len(self._model_group.ranks) > 1:
            batch = self._model_group.together(work, weights, batch)
            work, own = self._model_group.as_one(work), self._model_group.weight(weights)
            clock.lap("data")
        self._counts = bool(own)
        batch = batch if own and batch is not None else self._spare
        with padding_pass(not own):
            loss, count = self._pass(work, batch, own / total if total else 0.0, clock)
        self._counted(count, weights, own)
        self._gradients = take_gradients(self._live)
        if tells and not math.isfinite(loss):
            return loss, f"the loss ({loss})"
        name = self._not_finite()
        return loss if tells else 0.0, f'the gradient of "{name}"' if name else ""

    def _counted(self, count: float, weights: Sequence[float], own: float) -> None:
        """Note what ``own``, of rows that this rank has together with others, turned out to count for:
        each rank its part."""
        self._total = sum(weights)
        self.count = count * (weights[self._rank] / own) if own else 0.0

    def _pass(self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock) -> Passed:
        """Forward and backward; the gradients are summed, each rank's times its share."""
        raise NotImplementedError

    def _not_finite(self) -> str:
        """The parameter whose gradient had an inf or a NaN, or empty."""
        raise NotImplementedError

    def contributions(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """For each of this rank's plans, by its index, what its update is made of: the sum of all
        gradients as the first replica's, and the buffers of each. ``weights``: what each rank's rows
        count for, as they turned out."""
        layout = self._live.flat.layout
        flat, absent = self._summed()
        found, known = sum(weights), self._total
        if found and found != known:  # see [Note: sums are divided twice]
            flat.mul_(known / found)
        if any(weights):
            buffers = self._buffers(len(weights))
        else:  # nothing counts: what spare rows did to the buffers does not either
            buffers = [self._live.flat.flat[layout.buffers_start :]] * len(weights)
            absent = frozenset(range(len(self._live.flat.parameters)))
        self._gradients = Gradients([], {})
        taking_part = [r for r, (start, stop) in enumerate(rows) if stop > start]
        contributions: dict[int, list[Section]] = {}
        for plan in self._plans:
            low = plan.start + plan.buffers_start - layout.buffers_start
            high = plan.stop - layout.buffers_start
            whole = flat[plan.start : plan.start + plan.dense_length]
            contributions[plan.index] = [
                Section(
                    r,
                    weights[r],
                    whole if r == taking_part[0] else whole[:0],
                    buffers[r][low : max(low, high)],
                    absent,
                    kind=SPARE if r == taking_part[0] else NOTHING,
                )
                for r in taking_part
            ]
        return contributions

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """The gradients, end to end, and which there are none of; what is kept of them may go."""
        return self._vector.filled(self._gradients.dense), self._gradients.absent

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """Every rank's buffers, as the end of a flat vector."""
        layout = self._live.flat.layout
        if layout.buffers_start == layout.size:
            return [self._vector.vector[:0]] * size
        own = self._live.flat.buffers()
        found = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(found, own)
        return found

    def committed(self) -> None:
        """The iteration counts. Nothing is kept for the next."""


class CopySync(SummedGradients):
    """Of a model that is cut over ranks: over the copies of it."""

    _alike: dist.ProcessGroup | None = None
    """The ranks with the same part."""

    def _not_finite(self) -> str:
        """On this rank, before the sum."""
        if not self._counts:  # whatever the spare rows made up
            self._gradients = Gradients([None] * len(self._live.flat.parameters), {})
        dense, wire, ranks = self._gradients.dense, None, 1
        flat = self._vector.filled(dense)
        if self._alike is not None:
            self._vector.count(dense)
            wire, ranks = self._live.recipe.policy.wire_dtype, dist.get_world_size(self._alike)
        if can_be_summed(flat if wire is None else flat.to(wire), ranks):
            return ""
        return first_not_finite(self._live, self._gradients, wire=wire, ranks=ranks)

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        if self._alike is None:
            return self._vector.vector, self._gradients.absent
        flat = self._vector.sum(self._live.recipe.policy.wire_dtype, self._alike)
        return flat, self._vector.absent


def factors(live: LiveReplica, share: float) -> tuple[float, float]:
    """What the loss is multiplied by before backward, and the gradients after it, so that they have a
    rank's ``share``. Where they cross in the pass, as in batch norm over the ranks, losses have it."""
    if live.recipe.policy.sync_batchnorm:
        return share, 1.0 if share else 0.0
    return 1.0, share


def gathered(numbers: Sequence[float]) -> list[list[float]]:
    """Some numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [row.tolist() for row in found]


def gathered_counts(count: int) -> list[int]:
    """How many of something every rank has."""
    return [int(found) for (found,) in gathered([count])]


def first_not_finite(
    live: LiveReplica,
    gradients: Gradients,
    factor: float = 1.0,
    wire: torch.dtype | None = None,
    ranks: int = 1,
) -> str:
    """The first parameter here whose gradient, times ``factor`` and in the dtype ``wire``, cannot be
    summed over ``ranks``, see :func:`can_be_summed`, or empty."""
    for (segment, _), gradient in zip(live.flat.parameters, gradients.dense, strict=True):
        if gradient is None:
            continue
        sent = gradient.to(live.flat.layout.dtype)
        sent = sent if factor == 1.0 else sent * factor
        if not can_be_summed(sent if wire is None else sent.to(wire), ranks):
            return segment.name
    return ""


def can_be_summed(sent: torch.Tensor, ranks: int) -> bool:
    """Whether what a rank sends is finite, and so is the sum over ``ranks`` where others send no larger
    values: sums that are made in float16 end at 65,504."""
    return sums_up(_most(sent, ranks)) or bool(all_finite(sent, ranks))


def all_finite(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    """Likewise, where it lies: a tensor of one boolean."""
    return torch.isfinite(_most(sent, ranks)).all()


def _most(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    return sent * ranks if sent.dtype == torch.float16 else sent
