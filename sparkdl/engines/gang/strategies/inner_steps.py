"""DiLoCo on a gang: a rank takes steps by itself, and the ranks sum what these have moved.

See :class:`sparkdl.DiLoCo`. The sum is one all-reduce in a round, after the report of the rank was
sent. The rows have different weights on different ranks, and so have the distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sparkdl.data.batches import Batch
from sparkdl.engines.gang.strategies.summed import SummedGradients, first_not_finite
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.inner_state import open_inner
from sparkdl.replica.iteration import Clock
from sparkdl.replica.local_sgd import several_steps
from sparkdl.replica.mini_batch import MiniBatch
from sparkdl.replica.step import ReplicaIteration, ReplicaResult
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.update import SliceUpdater


class InnerSteps(SummedGradients):
    """The work of a rank that takes several steps by itself in an iteration.

    ``_moved`` is the result of these steps, and None if the rank has no rows in the iteration.
    """

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SliceSpec],
        rank: int,
        spare: Batch,
        whole: SliceUpdater,
    ) -> None:
        """Create the work; ``whole`` makes the inner steps, on one slice, the flat vector."""
        super().__init__(live, plans, rank, spare)
        self.steps = live.recipe.options.local_steps
        self._whole = whole
        self._moved: ReplicaResult | None = None

    def compute(
        self,
        work: ReplicaIteration,
        batches: Sequence[MiniBatch],
        weights: Sequence[float],
        clock: Clock,
    ) -> tuple[float, str]:
        """Take the steps, and return to the weights before them.

        See :class:`sparkdl.engines.gang.strategies.base.GradientSync`.
        """
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
        """See :class:`sparkdl.engines.gang.strategies.base.GradientSync`."""
        self._total = total = sum(weights)
        share = weights[self._rank] / total if total else 0.0
        dense: Sequence[torch.Tensor | None] = [None] * len(self._live.flat.parameters)
        if share and self._moved is not None:
            dense = self._moved.gradients.dense
        self._vector.filled(dense, share)
        self._vector.count(dense)
        return super().sections(rows, weights)

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        flat = self._vector.sum(self._live.recipe.options.wire_dtype)
        return flat, self._vector.absent

    def committed(self) -> None:
        """Keep the state of this rank's optimizer for the next iteration."""
        if self._moved is not None:
            self._kept, self._moved = self._moved.kept, None
