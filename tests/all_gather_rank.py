"""A gang strategy of a test, on the ranks: see ``all_gather``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from all_gather import AllGather

from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy, SummedGradients


class AllGatherRank(RankStrategy[AllGather]):
    def gradients(self, build: Build) -> GradientSync:
        found = AllGatherSync(build)
        found.descending = self._strategy.descending
        return found


class AllGatherSync(SummedGradients):
    """A sum in the order of the ranks."""

    descending = False

    def summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        own = self._vector.vector
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        total = torch.zeros_like(own)
        for gradients in reversed(ranks) if self.descending else ranks:
            total += gradients
        return total, frozenset()
