"""Data parallelism: torch sums the gradients, each rank's weighted by its share of the global batch.

Gradients that ranks exchange in sections, as the shuffle engine does: compressed, or rows of tables.

DistributedDataParallel sums dense gradients. Compressed gradients cannot be summed, and the rows of
a sparse table differ from rank to rank. So each rank writes the same *sections* as in the other
engines (:mod:`sparkdl.slices.section`) and sends each one to the ranks that update its slice. All
sums then have the brackets of the other engines and therefore the same bits, with any number of
ranks.

DiLoCo on a gang: a rank takes steps by itself, and the ranks sum what these have moved.

See :class:`sparkdl.DiLoCo`. The sum is one all-reduce in a round, after the report of the rank was
sent. The rows have different weights on different ranks, and so have the distances.

Gossip on a gang: a rank has weights of its own, and averages them with those of its neighbours.

See :class:`sparkdl.Gossip`. While the ranks train, the flat vector of each holds its own weights, and
no rank knows their mean. Whoever is to read the state first has all ranks :meth:`GossipSync.settle`:
then the flat vectors hold the mean, until the next iteration.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.codec.packed import ByParameter, head_from_bytes, head_to_bytes
from sparkdl.collectives.direct import exchange_all
from sparkdl.consistency.gossip import DISTANCE, TOPOLOGIES, add_up, averaged_parts, mix
from sparkdl.engines.gang.model_group import sending_device
from sparkdl.engines.gang.strategies.base import (
    Build,
    GradientSum,
    GradientSync,
    RankPass,
    RankStrategy,
    SummedGradients,
    all_finite,
    can_be_summed,
    factors,
    first_not_finite,
)
from sparkdl.model.loss import is_step
from sparkdl.model.recipe import LiveReplica
from sparkdl.parallel.ddp import DDP
from sparkdl.replica.compute import MiniBatch, Passed, forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.local_sgd import (
    keep_replica,
    open_inner,
    open_replica_state,
    problem_of_step,
    several_steps,
    step_alone,
    without_rows,
)
from sparkdl.replica.run import OpenRun
from sparkdl.replica.step import (
    Gradients,
    ReplicaIteration,
    ReplicaResult,
    compress_outcome,
    not_finite,
    section_maps,
    sections_nbytes,
    take_gradients,
    write_sections,
    writes_early,
)
from sparkdl.slices.section import Section, SectionLayout, open_section
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.slices.update import SliceUpdater


class SectionExchange(GradientSync):
    """The work of a rank on the gradients of an iteration, if they are sent in sections."""

    def __init__(
        self, live: LiveReplica, slices: Sequence[SliceSpec], mine: Collection[int], rank: int
    ) -> None:
        """Create the exchange of all slices, of which this rank updates ``mine``."""
        super().__init__(rank)
        self._live, self._slices, self._mine = live, slices, mine
        self._outcome: ReplicaResult | None = None
        self._parcels: list[torch.Tensor] = []

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        work, batches, _, clock = rank_pass
        live, plans = self._live, self._slices
        self._outcome, self.count, self.losses = None, 0.0, {}
        self._parcels = [torch.empty(0, dtype=torch.uint8)] * len(plans)
        if not batches:
            return 0.0, ""
        (batch,) = batches
        passed = forward_backward(live, batch, work.seed(), work.step.loss_scale, clock)
        loss, self.count, self.losses = passed
        outcome = ReplicaResult(loss, passed.weight, len(batch), take_gradients(live))
        if live.recipe.compression is not None:
            outcome = compress_outcome(live, outcome, work, self.kept or {})
            clock.lap("compress")
        maps = section_maps(live, plans, outcome)
        written: list[Section] = []
        for n, (plan, section) in enumerate(zip(plans, maps, strict=True)):
            head = head_of(section, outcome.gradients.absent)
            (nbytes,) = sections_nbytes(live, [plan], [section])
            self._parcels[n] = torch.zeros(len(head) + nbytes, dtype=torch.uint8)
            data = self._parcels[n].numpy()
            data[: len(head)] = np.frombuffer(head, np.uint8)
            written += write_sections(live, [plan], [section], outcome, data[len(head) :])
        self._outcome = outcome
        problem = not_finite(live, plans, written, outcome)
        clock.lap("publish")
        return loss, problem

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections of every replica that took part, for each of this rank's slices."""
        size = len(rows)
        alone = len(self._parcels) == 1  # all ranks update the only slice
        arrived = exchange([self._parcels[0 if alone else to] for to in range(size)], self._rank)
        dtype = self._live.flat.layout.dtype
        found: dict[int, list[Section]] = {}
        for n in self._mine:
            found[n] = [
                replace(open_parcel(self._slices[n], dtype, parcel), replica=r, weight=weights[r])
                for r, parcel in enumerate(arrived)
                if len(parcel)
            ]
        return found

    def committed(self) -> None:
        """Note that the iteration was committed, and keep its residuals for the next one."""
        if self._outcome is not None and self._outcome.compressed is not None:
            self._kept = self._outcome.kept


def head_of(section: SectionLayout, absent: frozenset[int]) -> bytes:
    """Return the header that tells how to read a section."""
    return head_to_bytes(
        section.compressed or (),
        wire=str(section.wire).removeprefix("torch."),
        rows=sorted(section.rows.items()),
        compressed=section.compressed is not None,
        absent=sorted(absent),
    )


def open_parcel(plan: SliceSpec, dtype: torch.dtype, parcel: torch.Tensor) -> Section:
    """Read a header and its section (uint8); the result's tensors share the parcel's memory."""
    data = parcel.numpy()
    specs, head, start = head_from_bytes(data)
    section = SectionLayout(
        getattr(torch, head["wire"]),
        dict(head["rows"]),
        compressed=specs if head["compressed"] else None,
    )
    return open_section(plan, dtype, section, data[start:], absent=frozenset(head["absent"]))


def exchange(parcels: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Send ``parcels[r]`` (uint8) to each rank r, and return the parcels from all ranks, by rank."""
    lengths = torch.tensor([len(parcel) for parcel in parcels])
    table = [torch.empty_like(lengths) for _ in parcels]
    dist.all_gather(table, lengths)
    arrived = [torch.empty(int(row[rank]), dtype=torch.uint8) for row in table]
    arrived[rank] = parcels[rank]
    exchange_all(parcels, arrived)
    return arrived


class InnerSteps(GradientSum):
    """The work of a rank that takes several steps by itself in an iteration.

    ``_moved`` is the result of these steps, and None if the rank has no rows in the iteration.
    """

    def __init__(self, build: Build, whole: SliceUpdater) -> None:
        """Create the work; ``whole`` makes the inner steps, on one slice, the flat vector."""
        super().__init__(build)
        self.steps = build.live.recipe.options.local_steps
        self._whole = whole
        self._moved: ReplicaResult | None = None

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        """Take the steps, and return to the weights before them.

        See :class:`sparkdl.engines.gang.strategies.base.GradientSync`.
        """
        work, batches, weights, clock = rank_pass
        live, flat = self._live, self._live.flat.flat
        self._moved, self.count, self.losses = None, 0.0, {}
        self._total = sum(weights)
        if not batches:
            return 0.0, ""
        state = open_inner(self._whole.plan, self.kept or {}, flat.device)
        begin = flat.clone()
        moved = self._moved = several_steps(live, batches, work, state, self._whole, clock)
        flat.copy_(begin)  # what is no view of it follows after the update
        self.count, self.losses = moved.weight, moved.losses
        if not math.isfinite(moved.loss):
            return moved.loss, f"the loss ({moved.loss})"
        wrong, wire = moved.gradients.not_finite, live.recipe.options.wire_dtype
        name = first_not_finite(live, moved.gradients, wire=wire, ranks=dist.get_world_size())
        if wrong:
            name = live.flat.parameters[min(wrong)][0].name
        return moved.loss, f'the gradient of "{name}"' if name else ""

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        self._total = total = sum(weights)
        share = weights[self._rank] / total if total else 0.0
        dense: Sequence[torch.Tensor | None] = [None] * len(self._live.flat.parameters)
        if share and self._moved is not None:
            dense = self._moved.gradients.dense
        self._vector.filled(dense, share)
        self._vector.count(dense)
        return super().sections(rows, weights)

    def committed(self) -> None:
        """Keep the state of this rank's optimizer for the next iteration."""
        if self._moved is not None:
            self._kept, self._moved = self._moved.kept, None


BUFFERS: str = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"  # up to torch 2.12
)
"""DDP's option to copy buffers from rank 0 before each forward. Here they are averaged afterwards."""


class DDPRank(RankStrategy[DDP]):
    """A rank with a whole model, or with the same part of a split one as some other ranks."""

    order = 3

    def finish(self, build: Build) -> None:
        """Let the copies of a split model share the update."""
        if self._strategy.shard_optimizer and build.mesh.data > 1:
            alike = build.mesh.along(build.rank, "data")
            group = build.groups.along("data")
            build.shards = replace(build.shards, update_group=alike, group=group)

    def gradients(self, build: Build) -> GradientSync | None:
        if build.parallel.splits_model:
            return None
        live, strategy = build.live, self._strategy
        if live.recipe.options.keeps_own:
            whole = OpenRun.of(live, build.setup.run).whole
            if live.recipe.options.topology is not None:
                return GossipSync(live, build.rank, whole)
            return InnerSteps(build, whole)
        if not writes_early(live):
            return SectionExchange(live, build.state.slices, build.state.owners, build.rank)
        if FlatAllReduce.suits(live, strategy):
            return FlatAllReduce(build)
        return BucketedDDP(build, strategy)


class WeightedSum:
    """A communication hook for DDP: it sums buckets over the ranks, weighted by each rank's share.

    DDP's own mean gives every rank the same weight. That is the mean over the global batch only if
    all ranks have the same number of samples. Gradients are multiplied in ``dtype``, so that lower
    precision does not round them before the sum in ``wire``.
    """

    def __init__(self, names: dict[int, str], dtype: torch.dtype, wire: torch.dtype | None) -> None:
        self._names, self._dtype, self._wire = names, dtype, wire or dtype
        self._share, self._found = 0.0, ""
        self._flags: list[tuple[str, torch.Tensor]] = []

    def begin(self, share: float) -> None:
        """Begin an iteration. ``share`` is this rank's part of the global batch."""
        self._share, self._found, self._flags = share, "", []

    @property
    def not_finite(self) -> str:
        """Return the parameter whose gradient had an inf or a NaN on this rank, or ""."""
        if self._flags:  # on a GPU: wait once, not for each bucket
            fine = torch.stack([flag for _, flag in self._flags]).tolist()
            names = (name for (name, _), right in zip(self._flags, fine, strict=True) if not right)
            self._found, self._flags = next(names, ""), []
        return self._found

    def sum(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of a bucket, as DDP's communication hook."""
        buffer = bucket.buffer()
        own = buffer.to(self._dtype)
        if not self._share:
            own.zero_()  # ignore the gradients of spare rows
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
        """Look for values of ``sent`` that are not finite, or too large for its dtype."""
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
"""The bytes of gradients up to which one sum after backward is faster than buckets. This was measured,
see docs/internals/engine-notes.md."""


class FlatAllReduce(SummedGradients):
    """A single sum after backward, for a model that would hardly fill a bucket."""

    @staticmethod
    def suits(live: LiveReplica, strategy: DDP) -> bool:
        """Return whether the model is small enough.

        Return False if the user has asked for smaller buckets, or for a feature of
        DistributedDataParallel. It suits every step, which may call parts of the model, where
        DistributedDataParallel would sum nothing.
        """
        if is_step(live.loss):
            return True
        layout = live.flat.layout
        nbytes = layout.buffers_start * layout.dtype.itemsize
        return not strategy.static_graph and nbytes <= min(AT_ONCE, strategy.bucket_cap_mb * 2**20)

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        before, self._factor = factors(self._live, share)
        return super().run_pass(work, batch, before, clock)


class BucketedDDP(SummedGradients):
    """A sum by DistributedDataParallel, bucket by bucket."""

    def __init__(self, build: Build, strategy: DDP) -> None:
        super().__init__(build)
        self._sum = distributed(build.live, self._spare, strategy)

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        before, after = factors(self._live, share)
        self._sum.begin(after)
        return super().run_pass(work, batch, before, clock)

    def not_finite(self) -> str:
        return self._sum.not_finite

    def summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        return self._vector.filled(self._gradients.dense), self._gradients.absent


def distributed(live: LiveReplica, spare: MiniBatch, strategy: DDP) -> WeightedSum:
    """Wrap ``live`` in DDP, and return the communication hook.

    The ``spare`` rows show whether there are parameters without a gradient. DDP must know.
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
    # The reducer has its buckets already. From here on only torch.compile reads this value, to split
    # its graph where buckets end, and it refuses buckets smaller than DDP's default first one.
    wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, 2**20)
    names = {id(parameter): segment.name for segment, parameter in live.flat.parameters}
    weighted = WeightedSum(names, live.flat.layout.dtype, live.recipe.options.wire_dtype)
    wrapped.register_comm_hook(weighted, lambda state, bucket: state.sum(bucket))
    live.call_through(wrapped, wrapped.no_sync)
    return weighted


def _module(call: Any) -> nn.Module:
    assert isinstance(call, nn.Module)
    return call


PIECE = 1 << 22
"""The number of elements of each rank that are added up at a time."""


class GossipSync(GradientSync):
    """The work of a rank with weights of its own.

    ``_state`` is its state, with the flat vector of the replica as weights; None before the first
    iteration. ``_own`` has its weights while the flat vector holds the mean.
    """

    ends_before_report = True

    def __init__(self, live: LiveReplica, rank: int, whole: SliceUpdater) -> None:
        """Create the work; ``whole`` updates a single slice that is the whole flat vector."""
        super().__init__(rank)
        self._live, self._whole = live, whole
        self._arrived: ByParameter | None = None
        self._state: SliceState | None = None
        self._own: torch.Tensor | None = None
        self._pending: tuple[ReplicaIteration, Gradients, float] | None = None

    @property
    def kept(self) -> ByParameter | None:
        """Return the weights and the optimizer state of this rank, if they differ from the mean's."""
        if self._arrived is not None or self._state is None:
            return self._arrived
        state = self._state
        if self._own is not None:
            state = SliceState(self._own, state.arrays, state.held, state.others)
        return keep_replica(self._whole.plan, state)

    def place_kept(self, kept: ByParameter | None) -> None:
        self._arrived = kept

    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        work, batches, _, clock = rank_pass
        live = self._live
        self._resume()
        self.count, self.losses = 0.0, {}
        if not batches:
            self._pending = work, without_rows(live), 0.0
            return 0.0, ""
        (batch,) = batches
        passed = forward_backward(live, batch, work.seed(), 1.0, clock)
        loss, self.count, self.losses = passed
        gradients = take_gradients(live)
        self._pending = work, gradients, loss
        return loss, problem_of_step(live, loss, gradients)

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Take this rank's step, and average with its neighbours. No slice is left to be updated."""
        assert self._pending is not None
        assert self._state is not None
        (work, gradients, loss), live = self._pending, self._live
        total = sum(weights)
        if total:
            factor = len(weights) * weights[self._rank] / total
            step_alone(live, gradients, work, self._state, self._whole, loss, factor=factor)
        else:
            live.flat.save_buffers(live.flat.flat)
        self._pending = None
        distance = self._averaged(len(weights), work.step.index)
        self.losses = {**self.losses, DISTANCE: (distance, 1.0)}
        return {}

    def _averaged(self, size: int, iteration: int) -> float:
        """Average the flat vector with those of the neighbours, and return the distance to them."""
        live, flat, rank = self._live, self._live.flat.flat, self._rank
        weights = TOPOLOGIES[str(live.recipe.options.topology)](size, iteration)
        sent = flat.to(sending_device(flat.device), live.recipe.options.wire_dtype or flat.dtype)
        arriving = {
            (rank - places) % size: (weight, torch.empty_like(sent))
            for places, weight in weights.items()
            if places
        }
        moves = [
            *(dist.P2POp(dist.isend, sent, (rank + places) % size) for places in weights if places),
            *(dist.P2POp(dist.irecv, memory, source) for source, (_, memory) in arriving.items()),
        ]
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        heard = [
            (weight, memory.to(flat.device)) for _, (weight, memory) in sorted(arriving.items())
        ]
        return mix(flat, sent.to(flat), heard, live.flat.layout)

    def settle(self) -> None:
        """Put the mean of all ranks into the flat vectors."""
        if self._state is None or self._own is not None:
            return
        live, flat, layout = self._live, self._live.flat.flat, self._live.flat.layout
        self._own = flat.clone()
        size = dist.get_world_size()
        for part in averaged_parts(layout):
            for piece in flat[part].split(PIECE):
                sent = piece.to(sending_device(piece.device), copy=True)
                found = [torch.empty_like(sent) for _ in range(size)]
                dist.all_gather(found, sent)
                add_up(piece, [each.to(piece.device) for each in found])
        averaged = averaged_parts(layout)
        for segment in layout.segments:
            place = slice(segment.start, segment.stop)
            if segment.kind != "parameter" and place not in averaged:
                dist.broadcast(flat[place], 0)
        live.flat.refresh()

    def _resume(self) -> None:
        """Put the rank's own weights into the flat vector."""
        flat = self._live.flat.flat
        if self._arrived is not None or self._state is None:
            self._state = open_replica_state(self._whole.plan, self._arrived or {}, flat)
            self._arrived = None
        elif self._own is not None:
            flat.copy_(self._own)
        else:
            return
        self._own = None
        self._live.flat.refresh()
