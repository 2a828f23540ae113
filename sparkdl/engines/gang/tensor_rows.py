"""Conversion between parameters as torch splits them, by rows or columns or both, and rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sparkdl.engines.gang.rank_messages import gathered_values
from sparkdl.engines.gang.shards import RowsOf, layout_of_rows
from sparkdl.model.layout import Layout
from sparkdl.model.live_replica import LiveReplica
from sparkdl.slices.state import SliceState


class RowLayout:
    """A conversion between a rank's parts of parameters and rows, one whole parameter at a time.

    It implements :class:`sparkdl.engines.gang.sharded_state.Turned`.
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
        """See :class:`sparkdl.engines.gang.sharded_state.Turned`."""

        def rows(number: int, part: torch.Tensor) -> torch.Tensor:
            low, high = self._rows(self._whole.segments[number].shape[0])
            return self._all_of(number, part, self._cuts[number])[low:high]

        return self._turned(state, self._own, self.layout, rows)

    def as_cut(self, state: SliceState) -> SliceState:
        """See :class:`sparkdl.engines.gang.sharded_state.Turned`."""
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
