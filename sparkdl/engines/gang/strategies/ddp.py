"""Gradients that torch sums: a live replica under DistributedDataParallel, weighted by share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.data.batches import Batch
from sparkdl.engines.gang.strategies.base import (
    SummedGradients,
    all_finite,
    can_be_summed,
    factors,
    first_not_finite,
)
from sparkdl.model.live_replica import LiveReplica
from sparkdl.parallel.base import DDP
from sparkdl.replica.compute import MiniBatch, Passed, forward_backward, take_gradients
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import ReplicaIteration
from sparkdl.slices.spec import SliceSpec

BUFFERS: str = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"  # up to torch 2.12
)
"""DDP's option to take buffers from rank 0 before each forward: here they are averaged after it."""


class WeightedSum:
    """What becomes of a bucket of gradients: times this rank's share, then summed over the ranks.

    DDP's own mean counts every rank alike, which is the mean over the global batch only where all have
    as many samples. ``dtype``: what shares are taken in, and ``wire`` what sums are, if it is another:
    gradients of lower precision are not rounded before they are summed.
    """

    def __init__(self, names: dict[int, str], dtype: torch.dtype, wire: torch.dtype | None) -> None:
        self._names, self._dtype, self._wire = names, dtype, wire or dtype
        self._share, self._found = 0.0, ""
        self._flags: list[tuple[str, torch.Tensor]] = []

    def begin(self, share: float) -> None:
        """An iteration begins; this rank's part of the global batch."""
        self._share, self._found, self._flags = share, "", []

    @property
    def not_finite(self) -> str:
        """The parameter whose gradient had an inf or a NaN on this rank, or empty."""
        if self._flags:  # on a GPU: it is waited for once, not at each bucket
            fine = torch.stack([flag for _, flag in self._flags]).tolist()
            names = (name for (name, _), right in zip(self._flags, fine, strict=True) if not right)
            self._found, self._flags = next(names, ""), []
        return self._found

    def sum(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP's communication hook does."""
        buffer = bucket.buffer()
        own = buffer.to(self._dtype)
        if not self._share:
            own.zero_()  # whatever a rank without samples made up
        elif self._share != 1.0:
            own.mul_(self._share)
        sent = own.to(self._wire)
        if self._share:
            self._look(bucket, sent)
        summed = dist.all_reduce(sent, async_op=True).get_future()

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            (found,) = future.value()
            return buffer if found is buffer else buffer.copy_(found)

        return summed.then(done)

    def _look(self, bucket: dist.GradBucket, sent: torch.Tensor) -> None:
        """``sent``: what travels of it, which may be too large for its dtype."""
        ranks, here = dist.get_world_size(), sent.device.type == "cpu"
        if here and (self._found or can_be_summed(sent, ranks)):
            return
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        for parameter, values in zip(bucket.parameters(), sent.split(sizes), strict=True):
            name = self._names[id(parameter)]
            if not here:
                self._flags.append((name, all_finite(values, ranks)))
            elif not can_be_summed(values, ranks):
                self._found = name
                return


AT_ONCE = 4 << 20
"""Bytes of gradients up to which one sum after backward is faster than buckets: measured, see
docs/internals/engine-notes.md."""


class FlatAllReduce(SummedGradients):
    """Summed after backward, in one piece: a model that would hardly fill a bucket."""

    _factor = 0.0

    @staticmethod
    def suits(live: LiveReplica, strategy: DDP) -> bool:
        """Whether it is a small model, and the user has not asked for smaller buckets, or for what only
        DistributedDataParallel does."""
        layout = live.flat.layout
        nbytes = layout.buffers_start * layout.dtype.itemsize
        return not strategy.static_graph and nbytes <= min(AT_ONCE, strategy.bucket_cap_mb * 2**20)

    def _pass(self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock) -> Passed:
        before, self._factor = factors(self._live, share)
        seed, scale = work.seed(), work.step.loss_scale
        return forward_backward(self._live, batch, seed, scale, clock, share=before, by_rows=True)

    def _not_finite(self) -> str:
        dense = self._gradients.dense
        flat = self._vector.filled(dense, self._factor)
        self._vector.count(dense if self._factor else [None] * len(dense))
        wire, ranks = self._live.recipe.policy.wire_dtype, dist.get_world_size()
        if can_be_summed(flat if wire is None else flat.to(wire), ranks):
            return ""
        return first_not_finite(self._live, self._gradients, self._factor, wire, ranks)

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        """Over the ranks."""
        flat = self._vector.sum(self._live.recipe.policy.wire_dtype)
        return flat, self._vector.absent


class BucketedDDP(SummedGradients):
    """Summed by DistributedDataParallel."""

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SliceSpec],
        rank: int,
        spare: Batch,
        strategy: DDP,
    ) -> None:
        super().__init__(live, plans, rank, spare)
        self._sum = distributed(live, self._spare, strategy)

    def _pass(self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock) -> Passed:
        before, after = factors(self._live, share)
        self._sum.begin(after)
        seed, scale = work.seed(), work.step.loss_scale
        return forward_backward(self._live, batch, seed, scale, clock, share=before, by_rows=True)

    def _not_finite(self) -> str:
        return self._sum.not_finite


def distributed(live: LiveReplica, spare: MiniBatch, strategy: DDP) -> WeightedSum:
    """Put ``live`` under DDP.

    ``spare``: a few rows, to see whether there are parameters that get no gradient: DDP must know.
    """
    before = live.flat.flat.clone()
    forward_backward(live, spare, 0, 1.0, Clock())
    unused = bool(take_gradients(live).absent) or strategy.find_unused_parameters
    live.flat.flat.copy_(before)
    live.flat.refresh()
    device = live.device
    wrapped = DistributedDataParallel(
        _module(live.call),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=unused and not strategy.static_graph,
        bucket_cap_mb=strategy.bucket_cap_mb,
        static_graph=strategy.static_graph,
        **{BUFFERS: False},  # type: ignore[arg-type]
    )
    # The reducer has its buckets; from here on only torch.compile reads it, to cut its graph where
    # buckets end, and refuses smaller ones than DDP's first is by default.
    wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, 2**20)
    names = {id(parameter): segment.name for segment, parameter in live.flat.parameters}
    weighted = WeightedSum(names, live.flat.layout.dtype, live.recipe.policy.wire_dtype)
    wrapped.register_comm_hook(weighted, lambda state, bucket: state.sum(bucket))
    live.call = wrapped
    live.apart = wrapped.no_sync
    return weighted


def _module(call: Any) -> nn.Module:
    assert isinstance(call, nn.Module)
    return call
