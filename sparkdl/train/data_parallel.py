"""Gradients that torch sums: a live replica under DistributedDataParallel, weighted by share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.clock import Clock
from sparkdl.data.assemble import Batch
from sparkdl.replica.flat import Layout
from sparkdl.replica.live import LiveReplica
from sparkdl.step.compute import Gradients, MiniBatch, forward_backward, take_gradients
from sparkdl.step.replica import Work, to_mini_batch
from sparkdl.sync.contribution import NOTHING, SPARE, Contribution, sums_up
from sparkdl.sync.plan import SlicePlan
from sparkdl.train.batchnorm import keeping_company
from sparkdl.train.strategy import DDP

BUFFERS: str = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"  # up to torch 2.12
)
"""DDP's option to take buffers from rank 0 before each forward: here they are averaged after it."""


class WeightedSum:
    """What becomes of a bucket of gradients: times this rank's share, then summed over the ranks.

    DDP's own mean counts every rank alike, which is the mean over the global batch only where all have
    as many samples. ``wire``: the dtype to sum in, where it is not that of the gradients.
    """

    def __init__(self, names: dict[int, str], wire: torch.dtype | None) -> None:
        self._names, self._wire = names, wire
        self._share = 0.0
        self.not_finite = ""
        """The parameter whose gradient had an inf or a NaN on this rank, or empty."""

    def begin(self, share: float) -> None:
        """An iteration begins; this rank's part of the global batch."""
        self._share, self.not_finite = share, ""

    def sum(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP's communication hook does."""
        buffer = bucket.buffer()
        if not self._share:
            buffer.zero_()  # whatever a rank without samples made up
        else:
            self._look(bucket)
            if self._share != 1.0:
                buffer.mul_(self._share)
        sent = buffer if self._wire in (None, buffer.dtype) else buffer.to(self._wire)
        summed = dist.all_reduce(sent, async_op=True).get_future()

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            (found,) = future.value()
            return buffer if found is buffer else buffer.copy_(found)

        return summed.then(done)

    def _look(self, bucket: dist.GradBucket) -> None:
        if self.not_finite or sums_up(bucket.buffer()):
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not torch.isfinite(gradient).all():
                self.not_finite = self._names[id(parameter)]
                return


class GradientVector:
    """The dense gradients in one vector, each where its parameter is in the flat vector, in memory that
    stays: the gaps between them are zero. Behind them, for each parameter, how many ranks had one,
    where they are counted."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        count, size = sum(s.kind == "parameter" for s in layout.segments), layout.buffers_start
        self._memory = torch.zeros(size + count, dtype=layout.dtype, device=device)
        self.vector, self._counts = self._memory[:size], self._memory[size:]

    def filled(self, dense: Sequence[torch.Tensor | None], factor: float = 1.0) -> torch.Tensor:
        """With these times ``factor``, by parameter number; zero where there is none."""
        for segment, gradient in zip(self._layout.segments, dense, strict=False):
            place = self.vector[segment.start : segment.stop].view(segment.shape)
            if gradient is None or not factor:  # whatever a rank without samples made up
                place.zero_()
            elif factor == 1.0:
                place.copy_(gradient)
            else:
                torch.mul(gradient, factor, out=place)
        return self.vector

    def count(self, dense: Sequence[torch.Tensor | None]) -> None:
        """Note which of these are there, for the sum."""
        self._counts.copy_(torch.tensor([float(gradient is not None) for gradient in dense]))

    def sum(self, wire: torch.dtype | None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Over the ranks of ``group``, in ``wire``."""
        memory = self._memory
        sent = memory if wire in (None, memory.dtype) else memory.to(wire)
        dist.all_reduce(sent, group=group)
        if sent is not memory:
            memory.copy_(sent)
        return self.vector

    @property
    def absent(self) -> frozenset[int]:
        """The parameters of which no rank had a gradient."""
        return frozenset(n for n, count in enumerate(self._counts.tolist()) if not count)


class Summed:
    """What a rank does for the gradients of an iteration, where torch sums them."""

    def __init__(
        self, live: LiveReplica, plans: Sequence[SlicePlan], rank: int, spare: Batch
    ) -> None:
        """``plans``: of what this rank updates. ``spare``: a few rows, for iterations in which it has
        none: it takes part in the sums all the same, with nothing."""
        self._live, self._plans, self._rank = live, plans, rank
        self._spare = replace(to_mini_batch(spare, live, classes=False), weights=None)
        self._vector = GradientVector(live.flat.layout, live.flat.flat.device)
        self._gradients = Gradients([], {})

    def compute(
        self, work: Work, batch: MiniBatch | None, weights: Sequence[float], clock: Clock
    ) -> tuple[float, str]:
        """The loss, and what is not finite, if anything. ``weights``: what each rank's mini-batch
        counts for."""
        own, total = weights[self._rank], sum(weights)
        batch = batch if own and batch is not None else self._spare
        with keeping_company(not own):
            loss = self._pass(work, batch, own / total if total else 0.0, clock)
        self._gradients = take_gradients(self._live)
        if own and not math.isfinite(loss):
            return loss, f"the loss ({loss})"
        name = self._not_finite()
        return loss if own else 0.0, f'the gradient of "{name}"' if name else ""

    def _pass(self, work: Work, batch: MiniBatch, share: float, clock: Clock) -> float:
        """Forward and backward; the gradients are summed, each rank's times its share."""
        raise NotImplementedError

    def _not_finite(self) -> str:
        """The parameter whose gradient had an inf or a NaN, or empty."""
        raise NotImplementedError

    def scored(self, batches: int, score: Callable[[], Any]) -> Any:
        """What ``score`` makes of this rank's ``batches`` of the validation's samples."""
        return score()

    def contributions(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Contribution]]:
        """For each of this rank's plans, by its index, what its update is made of: the sum of all
        gradients as the first replica's, and the buffers of each."""
        layout, buffers = self._live.flat.layout, self._buffers(len(weights))
        flat, absent = self._summed()
        self._gradients = Gradients([], {})
        taking_part = [r for r, (start, stop) in enumerate(rows) if stop > start]
        found: dict[int, list[Contribution]] = {}
        for plan in self._plans:
            low = plan.start + plan.buffers_start - layout.buffers_start
            high = plan.stop - layout.buffers_start
            whole = flat[plan.start : plan.start + plan.dense_length]
            found[plan.index] = [
                Contribution(
                    r,
                    weights[r],
                    whole if r == taking_part[0] else whole[:0],
                    buffers[r][low : max(low, high)],
                    absent,
                    kind=SPARE if r == taking_part[0] else NOTHING,
                )
                for r in taking_part
            ]
        return found

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """The gradients, end to end, and which there are none of; what is kept of them may go."""
        return self._vector.filled(self._gradients.dense), self._gradients.absent

    def _buffers(self, size: int) -> list[torch.Tensor]:
        """Every rank's buffers, as the end of a flat vector."""
        own = self._live.flat.buffers()
        found = [torch.empty_like(own) for _ in range(size)]
        if len(own):
            dist.all_gather(found, own)
        return found

    def committed(self) -> None:
        """The iteration counts. Nothing is kept for the next."""


def factors(live: LiveReplica, share: float) -> tuple[float, float]:
    """What the loss is multiplied by before backward, and the gradients after it, so that they have a
    rank's ``share``. Where they cross in the pass, as in batch norm over the ranks, losses have it."""
    if live.recipe.policy.sync_batchnorm:
        return share, 1.0 if share else 0.0
    return 1.0, share


AT_ONCE = 4 << 20
"""Bytes of gradients up to which one sum after backward is faster than buckets: measured, see
docs/performance.md."""


class AtOnce(Summed):
    """Summed after backward, in one piece: a model that would hardly fill a bucket."""

    _factor = 0.0

    @staticmethod
    def suits(live: LiveReplica, strategy: DDP) -> bool:
        """Whether it is a small model, and the user has not asked for smaller buckets, or for what only
        DistributedDataParallel does."""
        layout = live.flat.layout
        nbytes = layout.buffers_start * layout.dtype.itemsize
        return not strategy.static_graph and nbytes <= min(AT_ONCE, strategy.bucket_cap_mb * 2**20)

    def _pass(self, work: Work, batch: MiniBatch, share: float, clock: Clock) -> float:
        before, self._factor = factors(self._live, share)
        seed, scale = work.seed(), work.step.loss_scale
        return forward_backward(self._live, batch, seed, scale, clock, share=before)

    def _not_finite(self) -> str:
        dense = self._gradients.dense
        flat = self._vector.filled(dense, self._factor)
        self._vector.count(dense if self._factor else [None] * len(dense))
        return "" if sums_up(flat) else first_not_finite(self._live, self._gradients)

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """Over the ranks."""
        flat = self._vector.sum(self._live.recipe.policy.wire_dtype)
        return flat, self._vector.absent


class DataParallel(Summed):
    """Summed by DistributedDataParallel."""

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SlicePlan],
        rank: int,
        spare: Batch,
        strategy: DDP,
    ) -> None:
        super().__init__(live, plans, rank, spare)
        self._sum = distributed(live, self._spare, strategy)

    def _pass(self, work: Work, batch: MiniBatch, share: float, clock: Clock) -> float:
        before, after = factors(self._live, share)
        self._sum.begin(after)
        seed, scale = work.seed(), work.step.loss_scale
        return forward_backward(self._live, batch, seed, scale, clock, share=before)

    def _not_finite(self) -> str:
        return self._sum.not_finite


def distributed(live: LiveReplica, spare: MiniBatch, strategy: DDP) -> WeightedSum:
    """Put ``live`` under DDP.

    ``spare``: a few rows, to see whether there are parameters that get no gradient: DDP must know.
    """
    before = live.flat.flat.clone()
    forward_backward(live, spare, 0, 1.0, Clock())
    unused = bool(take_gradients(live).absent)
    live.flat.flat.copy_(before)
    live.flat.refresh()
    device = live.flat.flat.device
    wrapped = DistributedDataParallel(
        _module(live.call),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=unused and not strategy.static_graph,
        bucket_cap_mb=strategy.bucket_cap_mb,
        static_graph=strategy.static_graph,
        **{BUFFERS: False},  # type: ignore[arg-type]
    )
    names = {id(parameter): segment.name for segment, parameter in live.flat.parameters}
    weighted = WeightedSum(names, live.recipe.policy.wire_dtype)
    wrapped.register_comm_hook(weighted, lambda state, bucket: state.sum(bucket))
    live.call = wrapped
    live.apart = wrapped.no_sync
    return weighted


def gathered(numbers: Sequence[float]) -> list[list[float]]:
    """Some numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [row.tolist() for row in found]


def first_not_finite(live: LiveReplica, gradients: Gradients) -> str:
    """The first parameter here whose gradient has an inf or a NaN, or empty."""
    for (segment, _), gradient in zip(live.flat.parameters, gradients.dense, strict=True):
        if gradient is None or sums_up(gradient):
            continue
        if not torch.isfinite(gradient).all():
            return segment.name
    return ""


def _module(call: Any) -> nn.Module:
    assert isinstance(call, nn.Module)
    return call
