"""A gang strategy of a test, on the driver: it shows that a new one needs its two halves and a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.parallel.base import ParallelStrategy, check_dense
from sparkdl.slices.optimizer import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class AllGather(ParallelStrategy):
    """Data parallelism in which every rank gets all ranks' gradients and sums them itself.

    Attributes:
        descending: Begin the sum with the last rank.
    """

    word: ClassVar[str] = "all-gather"
    dimension: ClassVar[str] = "data"
    rank_half: ClassVar[str] = "all_gather_rank:AllGatherRank"
    descending: bool = False

    @property
    def shards_update(self) -> bool:
        return False

    def problems(self) -> Iterator[str]:
        if not isinstance(self.descending, bool):
            yield f"descending={self.descending}): give True or False."

    def problems_with(self, trainer: Any) -> Iterator[str]:
        if trainer.compression is not None:
            yield "compression does not go with all-gather."

    def check_model(
        self, module: nn.Module, layout: Layout, optimizer: OptimizerSpec, options: TrainingOptions
    ) -> None:
        check_dense(self.word, layout)
