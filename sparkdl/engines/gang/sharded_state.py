"""The state of a rank with a part of a split model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch.distributed as dist

from sparkdl.codec.packed import join_files
from sparkdl.engines.gang.rank_messages import exchange_bytes
from sparkdl.engines.gang.rank_state import (
    States,
    broadcast_parts,
    copies_of_weights,
    on_cpu,
    part_of,
)
from sparkdl.engines.gang.shards import (
    ShardRange,
    for_shards,
    for_slice,
    parts_of,
    state_from,
    unpacked,
)
from sparkdl.model.layout import Layout
from sparkdl.model.live_replica import LiveReplica
from sparkdl.parallel.mesh import Mesh
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.slices.slice_file import StoredSlice, reslice, to_bytes
from sparkdl.slices.spec import SliceSpec, slice_specs
from sparkdl.slices.state import SliceState


class Turned(Protocol):
    """A conversion between a rank's part as torch splits it and rows of every parameter.

    Code outside the strategy knows rows only. All ranks call the methods at the same time.
    """

    layout: Layout

    def by_rows(self, state: SliceState) -> SliceState:
        """Return this rank's rows, from the parts of all ranks."""

    def as_cut(self, state: SliceState) -> SliceState:
        """Return this rank's part, from the rows of all ranks."""


@dataclass(frozen=True)
class ShardSpec:
    """A replica of which a rank has a part."""

    live: LiveReplica
    whole: Layout
    mesh: Mesh
    spans: Callable[[int], list[ShardRange]]
    turned: Turned | None = None  # None: the part is rows already
    repeated: frozenset[int] = frozenset()
    update_group: Sequence[int] = ()  # each updates some of the same part; empty: all of it
    group: dist.ProcessGroup | None = None


class ShardedState:
    """The state of a model that is split as a :class:`ShardSpec` says.

    A rank owns its part, or the range of it that it updates, under its own rank number. For code
    outside the gang, rank n reads and writes slice n. If there are several copies of the split
    model, the first one provides the slices.
    """

    def __init__(self, cut: ShardSpec, run: RunSpec, rank: int) -> None:
        """Create the state, which is empty until :meth:`begin` or :meth:`place`."""
        self.live, self._rank, self._turned = cut.live, rank, cut.turned
        self.slices = slice_specs(cut.whole, run.slices, whole=run.whole_tensors)
        self._update_group, self._group = cut.update_group or (rank,), cut.group
        self._tells = cut.mesh.place(rank, "data") == 0
        self.first = self._tells or len(self._update_group) > 1
        plans = OpenRun.of(cut.live, replace(run, slices=len(self._update_group)))
        self._whole, self._cuts = plans.whole.plan, plans.slices
        owner = plans.owners[self._update_group.index(rank)]
        self._mine = owner.plan
        owner = replace(owner, plan=replace(owner.plan, index=rank))
        self.owners = {rank: owner}
        fragments = tuple(p for p in owner.plan.fragments if p.number not in cut.repeated)
        self.counted = {rank: replace(owner, plan=replace(owner.plan, fragments=fragments))}
        self._own = cut.live.flat.layout if cut.turned is None else cut.turned.layout
        self._spans = [cut.spans(r) for r in range(run.replicas)]
        self.states: States = {}
        self.best: States = {}

    def begin(self) -> None:
        """See :class:`RankState`, also for the methods below."""
        self.states = {self._rank: SliceState(self.live.flat.flat[part_of(self._mine)])}

    def place(self, slices: States) -> None:
        whole, flat = self._shards(slices), self.live.flat.flat
        flat.copy_(whole.weights)
        state = self._my(whole)
        arrays = {name: array.to(flat.device) for name, array in state.arrays.items()}
        weights = flat[part_of(self._mine)]
        self.states = {self._rank: SliceState(weights, arrays, state.held, state.others)}
        self.live.flat.refresh()

    def place_best(self, slices: States) -> None:
        self.best = {self._rank: self._my(self._shards(slices))}

    def keep_best(self) -> None:
        self.best = copies_of_weights(self.states)

    def share(self) -> None:
        if len(self._update_group) > 1:
            flat = self.live.flat.flat
            broadcast_parts(flat, self._cuts, self._update_group, self._group)
        self.live.flat.refresh()

    def as_slices(self, states: States) -> States:
        if not states:
            return {}
        spans, state = self._spans[self._rank], states[self._rank]
        if len(self._update_group) > 1:
            state = self._all_of(state)
        if self._turned is not None:
            state = self._turned.by_rows(state)
        spans = [span for span in spans if self._tells and not span.repeated]
        parts = list(parts_of(self._own, spans, on_cpu(state)))
        arriving = self._sent(lambda to: for_slice(spans, parts, self.slices[to]))
        return {self._rank: reslice(arriving, self.slices[self._rank], self._own.dtype)}

    def _my(self, whole: SliceState) -> SliceState:
        """Return the range that this rank updates, from the state of its part."""
        if len(self._update_group) == 1:
            return whole
        return reslice([_as_part(self._whole, whole)], self._mine, self._own.dtype)

    def _all_of(self, state: SliceState) -> SliceState:
        """Return the state of this rank's part, collected from the ranks that update it.

        If only the first copy of the model needs it, return ``state`` on the ranks of the others.
        """
        parcel, wanted = join_files([to_bytes(self._mine, on_cpu(state))]), self._update_group
        if self._turned is None:
            wanted = wanted[:1]
        arriving = list(self._sent(lambda to: parcel if to in wanted else bytearray()))
        return reslice(arriving, self._whole, self._own.dtype) if arriving else state

    def _shards(self, slices: States) -> SliceState:
        """Return this rank's shards, collected from the slices of all ranks."""
        plan, spans = self.slices[self._rank], self._spans
        part = _as_part(plan, slices[self._rank])
        arriving = self._sent(lambda to: for_shards(part, spans[to]))
        state = state_from(self._own, spans[self._rank], arriving, self._own.dtype)
        return state if self._turned is None else self._turned.as_cut(state)

    def _sent(self, parcel: Callable[[int], bytearray]) -> Iterator[StoredSlice]:
        """Send ``parcel(r)`` to each rank r in turn, and yield the parts that arrive."""
        size = len(self._spans)
        for distance in range(size):
            to, source = (self._rank + distance) % size, (self._rank - distance) % size
            yield from unpacked(exchange_bytes(parcel(to), to, source, self._rank))


def _as_part(plan: SliceSpec, state: SliceState) -> StoredSlice:
    return StoredSlice(plan.start, plan.stop, plan.trainable_length, state)
