"""A replica that is cut over the ranks: torch's ``fully_shard`` around a recipe's module.

[Note: a pass that all ranks go through together] Each unit is gathered when it is called, so ranks
must call the same units equally often. A rank without rows takes a few others; one with fewer
micro-batches than the rest goes through its last one again; one with fewer batches to validate goes
through one of training. All with a share of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sparkdl.clock import Clock
from sparkdl.infer.predictor import evaluating
from sparkdl.replica.flat import FlatModule, Layout, layout_of
from sparkdl.replica.live import LiveReplica
from sparkdl.replica.policy import PRECISIONS
from sparkdl.replica.recipe import Recipe
from sparkdl.step.compute import MiniBatch, forward_backward
from sparkdl.step.replica import Work
from sparkdl.train.batchnorm import synchronise
from sparkdl.train.data_parallel import Summed, first_not_finite, gathered
from sparkdl.train.strategy import FSDP
from sparkdl.train.units import units_of


def sharded(recipe: Recipe, strategy: FSDP, device: torch.device) -> tuple[LiveReplica, Layout]:
    """The replica with this rank's shards in its flat vector, and the layout of the whole.

    The module is built on the CPU, and cut unit by unit.
    """
    module = recipe.build()
    layout = layout_of(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    policy = recipe.policy
    if policy.sync_batchnorm:
        synchronise(module)
    trained = next(p.dtype for p in module.parameters() if p.requires_grad)
    computed = PRECISIONS[strategy.param_dtype]
    shards = dist.get_world_size() // strategy.copies
    dimensions = {"copies": strategy.copies, "shards": shards}
    if strategy.copies == 1:
        del dimensions["copies"]
    names, shape = tuple(dimensions), tuple(dimensions.values())
    how = {
        "mesh": init_device_mesh(device.type, shape, mesh_dim_names=names),
        "reshard_after_forward": None if strategy.reshard_after_forward else False,
    }
    dtypes = MixedPrecisionPolicy(
        param_dtype=computed, reduce_dtype=policy.wire_dtype or (computed and trained)
    )
    for unit in [*units_of(module, strategy.units), module]:
        if unit is module and computed is not None:
            dtypes = replace(dtypes, output_dtype=trained)
        cut: FSDPModule = fully_shard(unit, mp_policy=dtypes, **how)  # type: ignore[call-overload]
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        cut.set_reduce_scatter_unused_params(True)
    return LiveReplica.around(recipe, FlatModule(module, device)), layout


class FullySharded(Summed):
    """Gradients that ``fully_shard`` sums and scatters; see the note above."""

    def _pass(self, work: Work, batch: MiniBatch, share: float, clock: Clock) -> float:
        accumulate = self._live.recipe.policy.accumulate
        parts = min(accumulate, max(stop - start for start, stop in work.step.rows))
        scale = work.step.loss_scale
        return forward_backward(
            self._live, batch, work.seed(), scale, clock, share=share, parts=parts
        )

    def _not_finite(self) -> str:
        """Of the sum over the ranks, in this rank's rows."""
        return first_not_finite(self._live, self._gradients)

    def scored(self, batches: int, score: Callable[[], Any]) -> Any:
        """See :class:`sparkdl.train.data_parallel.Summed`."""
        most = max(int(count) for (count,) in gathered([batches]))
        result = score()
        for _ in range(most - batches):
            with evaluating(self._live.flat.module) as module:
                module(*self._spare.inputs)
        return result
