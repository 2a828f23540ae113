"""Conversion between shards and slices.

Under ``fully_shard``, rank r holds the r-th part of the rows of *each* parameter, but for those that
are a single number, which every rank has. Checkpoints,
snapshots and results consist of *slices*: contiguous ranges of the flat vector, which any other
number of ranks, strategy or engine can read. Both are sets of intervals of the flat vector, so
converting between them means cutting intervals and sending the pieces. This module is pure torch.

The state of a rank with a part of a split model.

Conversion between parameters as torch splits them, by rows or columns or both, and rows.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sparkdl.codec.packed import ALIGNMENT, join_files, split_files
from sparkdl.engines.gang.rank_messages import exchange_bytes, gathered_values
from sparkdl.engines.gang.rank_state import RankState, States, broadcast_parts, on_cpu, part_of
from sparkdl.errors import DamagedCheckpoint
from sparkdl.model.flat import Layout, TensorRange
from sparkdl.model.recipe import LiveReplica
from sparkdl.parallel.base import Mesh
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.slices.slice_file import StoredSlice, reslice, to_bytes, unpack
from sparkdl.slices.spec import Fragment, SliceSpec, SliceState, slice_specs


@dataclass(frozen=True)
class ShardRange:
    """A range [start, stop) of the flat vector: part of a parameter and padding, or all buffers."""

    number: int | None  # of the parameter; None: the buffers
    start: int
    stop: int
    length: int  # without the padding; 0 for the buffers
    repeated: bool = False

    @property
    def known(self) -> int:
        """Return the number of elements that are not padding."""
        return self.stop - self.start if self.number is None else self.length


def _plan(start: int, stop: int, trainable: int) -> SliceSpec:
    """Return an interval as a slice of its own."""
    fragments = (Fragment(0, "parameter", 0, trainable),) if trainable else ()
    return SliceSpec(0, start, stop, fragments)


def rows_of(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the rows [first, last) that a rank has, as ``torch.chunk`` splits a parameter."""
    each = math.ceil(rows / ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


RowsOf: TypeAlias = Callable[[int], tuple[int, int]]
"""A function from the number of rows of a parameter to the rows [first, last) that a rank has."""


def nested_shards(cuts: Sequence[tuple[int, int]]) -> RowsOf:
    """Return the rows of the r-th of n ranks, for a pair (n, r) of each split, outermost first."""

    def rows(count: int) -> tuple[int, int]:
        first, last = 0, count
        for ranks, rank in cuts:
            low, high = rows_of(last - first, ranks, rank)
            first, last = first + low, first + high
        return first, last

    return rows


def layout_of_rows(layout: Layout, rows: RowsOf, numbers: Collection[int]) -> Layout:
    """Return the layout of a rank's rows of the parameters ``numbers``, and of all buffers."""
    segments, position, step = [], 0, ALIGNMENT // layout.dtype.itemsize
    for number, segment in enumerate(layout.segments):
        if segment.kind == "parameter":
            low, high = _rows_of(segment, rows) if number in numbers else (0, 0)
            shape = (high - low, *segment.shape[1:]) if segment.shape or low == high else ()
            segment = replace(segment, start=position, length=math.prod(shape), shape=shape)
        else:
            segment = replace(segment, start=position)
        segments.append(segment)
        position += math.ceil(segment.length / step) * step
    return Layout(tuple(segments), layout.dtype, position)


def spans_of(layout: Layout, rows: RowsOf, numbers: Collection[int]) -> list[ShardRange]:
    """Return the ranges of the flat vector that a rank has, in ascending order."""
    found = []
    for number, (segment, end) in enumerate(zip(layout.segments, layout.ends, strict=True)):
        if segment.kind != "parameter" or not segment.length or number not in numbers:
            continue
        width = math.prod(segment.shape[1:])
        low, high = (segment.start + row * width for row in _rows_of(segment, rows))
        repeated = not segment.shape and rows(1) == (1, 1)
        if low < high:
            stop = end if high == segment.stop else high
            found.append(ShardRange(number, low, stop, high - low, repeated))
    return [*found, *_buffers_of(layout)]


def _rows_of(segment: TensorRange, rows: RowsOf) -> tuple[int, int]:
    """Return the rows of a parameter that a rank has. A single number is one row, which all have."""
    return rows(segment.shape[0]) if segment.shape else (0, 1)


def _buffers_of(layout: Layout) -> list[ShardRange]:
    if layout.buffers_start == layout.size:
        return []
    return [ShardRange(None, layout.buffers_start, layout.size, 0)]


def parts_of(own: Layout, spans: Sequence[ShardRange], state: SliceState) -> Iterator[StoredSlice]:
    """Yield a rank's state, one span after another."""
    for span in spans:
        start = _place(own, span)
        weights = state.weights[start : start + span.known]
        if span.known < span.stop - span.start:
            weights = torch.cat([weights, weights.new_zeros(span.stop - span.start - span.known)])
        arrays = {
            name: array[start : start + span.length] if span.length else array[:0]
            for name, array in state.arrays.items()
        }
        yield StoredSlice(
            span.start, span.stop, span.length, _kept(span.number, weights, arrays, state)
        )


def state_from(
    own: Layout, spans: Sequence[ShardRange], parts: Iterable[StoredSlice], dtype: torch.dtype
) -> SliceState:
    """Assemble a rank's state from parts, each of which lies in one of its spans.

    Each part is freed before the next is taken. Elements outside of all spans are zero. Parts that
    do not cover the spans exactly raise DamagedCheckpoint.
    """
    state = SliceState(torch.zeros(own.size, dtype=dtype))
    trainable = own.parameters_stop
    starts = [span.start for span in spans]
    covered, first = [0] * len(spans), dict.fromkeys(range(len(spans)), math.inf)
    for part in parts:
        k = bisect.bisect_right(starts, part.start) - 1
        span, place = spans[k], _place(own, spans[k]) + part.start - spans[k].start
        known = max(0, min(part.stop, span.start + span.known) - part.start)
        state.weights[place : place + known] = part.state.weights[:known]
        for name, array in part.state.arrays.items():
            if name not in state.arrays:
                state.arrays[name] = torch.zeros(trainable, dtype=array.dtype)
            state.arrays[name][place : place + known] = array[:known]
        covered[k] += part.stop - part.start
        if part.start < first[k]:  # values for the whole parameter come from its earliest part
            first[k] = part.start
            state.held.update(part.state.held)
            state.others.update(part.state.others)
    for span, length in zip(spans, covered, strict=True):
        if length != span.stop - span.start:
            raise DamagedCheckpoint(
                f"elements {span.start} to {span.stop} of the state did not come exactly once"
            )
    return state


def _place(own: Layout, span: ShardRange) -> int:
    return own.buffers_start if span.number is None else own.segments[span.number].start


def cut(part: StoredSlice, start: int, stop: int, number: int | None) -> StoredSlice | None:
    """Return the part of a stored slice that lies in a range, or None.

    It includes the state of parameter ``number`` that belongs to no single element.
    """
    low, high = max(part.start, start), min(part.stop, stop)
    if low >= high:
        return None
    first, length = low - part.start, max(0, min(high, part.start + part.trainable_length) - low)
    arrays = {name: array[first : first + length] for name, array in part.state.arrays.items()}
    weights = part.state.weights[first : first + high - low]
    return StoredSlice(low, high, length, _kept(number, weights, arrays, part.state))


def _kept(
    number: int | None, weights: torch.Tensor, arrays: dict[str, torch.Tensor], state: SliceState
) -> SliceState:
    """Return a state with the other values that ``state`` has for one parameter."""
    if number is None or number not in state.others:
        return SliceState(weights, arrays)
    held, others = {number: state.held[number]}, {number: state.others[number]}
    return SliceState(weights, arrays, held, others)


def for_slice(
    spans: Sequence[ShardRange], parts: Sequence[StoredSlice], plan: SliceSpec
) -> bytearray:
    """Pack the pieces that a rank sends to the owner of a slice."""
    return _packed(
        cut(part, plan.start, plan.stop, span.number)
        for span, part in zip(spans, parts, strict=True)
    )


def for_shards(part: StoredSlice, spans: Sequence[ShardRange]) -> bytearray:
    """Pack the pieces that the owner of a slice sends to a rank with these spans."""
    return _packed(cut(part, span.start, span.stop, span.number) for span in spans)


def _packed(parts: Iterable[StoredSlice | None]) -> bytearray:
    """Pack parts as safetensors files, each preceded by its length."""
    return join_files(
        to_bytes(_plan(part.start, part.stop, part.trainable_length), part.state)
        for part in parts
        if part is not None
    )


def unpacked(data: memoryview) -> Iterator[StoredSlice]:
    """Yield the parts that a rank was sent."""
    return map(unpack, split_files(data))


@dataclass(frozen=True)
class ShardSpec:
    """A replica of which a rank has a part."""

    live: LiveReplica
    whole: Layout
    mesh: Mesh
    spans: Callable[[int], list[ShardRange]]
    turned: RowLayout | None = None  # None: the part is rows already
    repeated: frozenset[int] = frozenset()
    update_group: Sequence[int] = ()  # each updates some of the same part; empty: all of it
    group: dist.ProcessGroup | None = None


class ShardedState(RankState):
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


class RowLayout:
    """A conversion between a rank's parts of parameters as torch splits them, and rows.

    Code outside the strategy knows rows only. One whole parameter is converted at a time. All ranks
    call the methods at the same time.
    """

    def __init__(
        self,
        live: LiveReplica,
        whole: Layout,
        mesh: DeviceMesh,
        rows: RowsOf,
        numbers: Collection[int],
    ) -> None:
        self.layout = layout_of_rows(whole, rows, numbers)
        self._numbers = sorted(n for n in numbers if n < len(live.flat.parameters))
        self._whole, self._own, self._mesh, self._rows = whole, live.flat.layout, mesh, rows
        self._cuts = [
            (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            for _, p in live.flat.parameters
        ]

    def by_rows(self, state: SliceState) -> SliceState:
        """Return this rank's rows, from the parts of all ranks."""

        def rows(number: int, part: torch.Tensor) -> torch.Tensor:
            low, high = self._rows(self._whole.segments[number].shape[0])
            return self._all_of(number, part, self._cuts[number])[low:high]

        return self._turned(state, self._own, self.layout, rows)

    def as_cut(self, state: SliceState) -> SliceState:
        """Return this rank's part, from the rows of all ranks."""
        by_row = self._mesh, [Shard(0)] * self._mesh.ndim

        def part(number: int, rows: torch.Tensor) -> torch.Tensor:
            found = self._all_of(number, rows.to(self._mesh.device_type), by_row)
            cut = self._cuts[number]
            if cut is None:
                return found
            mesh, placements = cut
            known = DTensor.from_local(found, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return known.redistribute(placements=placements).to_local()

        return self._turned(state, self.layout, self._own, part)

    def _all_of(self, number: int, part: torch.Tensor, cut: Any) -> torch.Tensor:
        """Return the whole parameter, from the parts of all ranks."""
        if cut is None:
            return part
        mesh, placements = cut
        shape = torch.Size(self._whole.segments[number].shape)
        stride = torch.empty(shape, device="meta").stride()
        known = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return known.full_tensor()

    def _turned(self, state: SliceState, source: Layout, target: Layout, turn: Any) -> SliceState:
        """Convert ``state`` from layout ``source`` to layout ``target``."""
        known = self._agreed(state, source)
        stop = target.parameters_stop
        weights = torch.zeros(target.size, dtype=state.weights.dtype)
        weights[target.buffers_start :] = state.weights[source.buffers_start :]
        arrays = {n: torch.zeros(stop, dtype=a.dtype) for n, a in known.arrays.items()}
        pairs = [(known.weights, weights)] + [(a, arrays[n]) for n, a in known.arrays.items()]
        with _quietly():
            for number in self._numbers:
                old, new = source.segments[number], target.segments[number]
                for before, after in pairs:
                    part = before[old.start : old.stop].view(old.shape)
                    if self._whole.segments[number].shape:  # a single number is on every rank
                        part = turn(number, part)
                    after[new.start : new.stop].view(new.shape).copy_(part)
        return SliceState(weights, arrays, known.held, known.others)

    def _agreed(self, state: SliceState, layout: Layout) -> SliceState:
        """Return the state with the arrays and other values that any of the ranks has.

        A rank without rows of a parameter has no optimizer state for it.
        """
        dtypes = {n: str(a.dtype).removeprefix("torch.") for n, a in state.arrays.items()}
        found: list[Any] = [(dtypes, state.held, state.others)]
        for dimension in range(self._mesh.ndim):
            group, device = self._mesh.get_group(dimension), torch.device(self._mesh.device_type)
            found = [known for many in gathered_values(found, group, device) for known in many]
        arrays, held, others = dict(state.arrays), dict(state.held), dict(state.others)
        length = layout.parameters_stop
        for dtypes, its, its_others in found:
            for name, dtype in dtypes.items():
                if name not in arrays:
                    empty = torch.zeros(length, dtype=getattr(torch, dtype))
                    arrays[name] = empty.to(state.weights.device)
            held, others = {**its, **held}, {**its_others, **others}
        return SliceState(state.weights, dict(sorted(arrays.items())), held, others)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's hints about redundant communication for tensors that are split twice."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
