"""Gossip on a gang: a rank has weights of its own, and averages them with those of its neighbours.

See :class:`sparkdl.Gossip`. While the ranks train, the flat vector of each holds its own weights, and
no rank knows their mean. Whoever is to read the state first has all ranks :meth:`GossipSync.settle`:
then the flat vectors hold the mean, until the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.gossip import DISTANCE, TOPOLOGIES, add_up, averaged_parts, mix
from sparkdl.engines.gang.model_group import sending_device
from sparkdl.engines.gang.strategies.base import GradientSync, RankPass
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.compute import forward_backward
from sparkdl.replica.local_sgd import (
    keep_replica,
    open_replica_state,
    problem_of_step,
    step_alone,
    without_rows,
)
from sparkdl.replica.step import Gradients, ReplicaIteration, take_gradients
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceState
from sparkdl.slices.update import SliceUpdater

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
