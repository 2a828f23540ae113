"""A gang strategy of a test, on the ranks: see ``all_gather``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from all_gather import AllGather

from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy
from sparkdl.engines.gang.strategies.summed import SummedGradients
from sparkdl.replica.compute import MiniBatch, Passed, forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import ReplicaIteration


class AllGatherRank(RankStrategy[AllGather]):
    def gradients(self, build: Build) -> GradientSync:
        found = AllGatherSync(build)
        found.descending = self._strategy.descending
        return found


class AllGatherSync(SummedGradients):
    """A sum in the order of the ranks. The loss is weighted by this rank's share, before backward."""

    descending = False

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock
    ) -> Passed:
        seed, scale = work.seed(), work.step.loss_scale
        return forward_backward(self._live, batch, seed, scale, clock, share=share, by_rows=True)

    def not_finite(self) -> str:
        fine = self._vector.filled(self._gradients.dense).isfinite().all()
        return "" if fine else "some parameter"

    def summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        own = self._vector.vector
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        total = torch.zeros_like(own)
        for gradients in reversed(ranks) if self.descending else ranks:
            total += gradients
        return total, frozenset()
