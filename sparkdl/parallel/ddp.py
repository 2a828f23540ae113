"""Data parallelism: every rank has the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from sparkdl.errors import ParameterError, known_arguments, shown
from sparkdl.parallel.base import Mesh, ParallelStrategy
from sparkdl.plain import is_number, make_plain


@known_arguments
@dataclass(frozen=True, kw_only=True)
class DDP(ParallelStrategy):
    """Data parallelism: every rank has the whole model.

    Torch's ``DistributedDataParallel`` sums the gradients, bucket by bucket while backward still
    runs (Li et al., 2020).

    Attributes:
        bucket_cap_mb: The size of a bucket, in MiB. Smaller buckets are sent earlier, larger ones
            more efficiently. If a model has up to 4 MiB of gradients, or ``bucket_cap_mb`` if that
            is less, they are summed at once after backward, without ``DistributedDataParallel``,
            unless ``static_graph`` is set.
        static_graph: Promises that every pass uses the same parameters in the same way, so that
            torch looks for unused ones only once. It cannot be combined with ``accumulate``.
        find_unused_parameters: Allows passes to use different parameters, as with layers that are
            dropped at random. It is set automatically if a trial pass leaves some unused. It costs
            a walk through the graph in each pass.
        shard_optimizer: Makes each rank update its part of the weights and hold the optimizer state
            of that part only (ZeRO, stage 1: Rajbhandari et al., 2020). This is the strategy
            "zero1". With a strategy that splits the model, the copies of the model share the update
            in this way.
    """

    word: ClassVar[str] = "ddp"
    dimension: ClassVar[str] = "data"
    rank_half: ClassVar[str] = "sparkdl.engines.gang.strategies.ddp:DDPRank"
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    find_unused_parameters: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def shards_update(self) -> bool:
        return self.shard_optimizer

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.parallel.base.ParallelStrategy`, also for the methods below."""
        size = self.bucket_cap_mb
        if not (is_number(size) and size > 0):
            yield f"bucket_cap_mb={shown(size)}): give a number of megabytes above 0."
        if self.static_graph and self.find_unused_parameters:
            yield "static_graph=True, find_unused_parameters=True): passes are alike, or they are not."

    def problems_beside(self, words: str) -> Iterator[str]:
        if self != DDP(shard_optimizer=True):
            yield from super().problems_beside(words)

    def problems_with(self, trainer: Any) -> Iterator[str]:
        if self.static_graph and trainer.accumulate != 1:
            yield (
                f"strategy=DDP(static_graph=True) with accumulate={trainer.accumulate}: torch "
                "records the graph in a backward pass that sums gradients, and only the last part "
                "of an accumulated batch does. Leave one of the two out."
            )
        if self.shard_optimizer and getattr(trainer.consistency, "topology", None):
            yield (
                f'consistency={type(trainer.consistency).__name__} with strategy="zero1": each rank '
                'updates all of its own weights. Use strategy="ddp".'
            )

    def check_mesh(self, module: nn.Module, mesh: Mesh) -> None:
        if self.shard_optimizer and mesh.data == 1 < mesh.size:
            sizes = {name: size for name, size in mesh.sizes.items() if size > 1 or name == "data"}
            raise ParameterError(
                f'strategy="zero1" divides the update among copies of the model, but '
                f'mesh={sizes} of {mesh.size} ranks has only one copy: give "data" a size of at '
                'least 2, or leave "zero1" out.'
            )
