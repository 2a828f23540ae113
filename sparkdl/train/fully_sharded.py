"""A replica that is cut over the ranks: torch's ``fully_shard`` around a recipe's module.

[Note: a pass that all ranks go through together] Each unit is gathered when it is called, so ranks
must call the same units equally often. A rank without rows takes a few others; one with fewer
micro-batches than the rest goes through its last one again; one with fewer batches to validate goes
through one of training. All with a share of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sparkdl.clock import Clock
from sparkdl.data.assemble import Batch
from sparkdl.replica.flat import FlatModule, Layout, layout_of
from sparkdl.replica.live import LiveReplica
from sparkdl.replica.policy import PRECISIONS
from sparkdl.replica.recipe import Recipe
from sparkdl.step.compute import MiniBatch, forward_backward
from sparkdl.step.replica import Work
from sparkdl.sync.plan import SlicePlan
from sparkdl.train.batchnorm import synchronise
from sparkdl.train.groups import Groups
from sparkdl.train.mesh import Mesh
from sparkdl.train.parallel import Parallel
from sparkdl.train.summing import Summed, first_not_finite, gathered
from sparkdl.train.teams import Team
from sparkdl.train.tensor_parallel import parallelise
from sparkdl.train.units import units_of


def sharded(
    recipe: Recipe, parallel: Parallel, groups: Groups, spare: Batch, device: torch.device
) -> tuple[LiveReplica, Layout]:
    """The replica with this rank's shards in its flat vector, and the layout of the whole.

    The module is built on the CPU, and cut unit by unit, after its layers where they are cut too.
    """
    strategy = parallel.fsdp
    assert strategy is not None
    module = recipe.build()
    layout = layout_of(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    units = units_of(module, strategy.units)
    if parallel.tensor is not None:
        parallelise(recipe, module, parallel.tensor, groups.mesh("tensor"), spare, device)
        for unit in {*units, module}:
            unit.register_forward_hook(_no_view)
    policy = recipe.policy
    if policy.sync_batchnorm:
        synchronise(module)
    trained = next(p.dtype for p in module.parameters() if p.requires_grad)
    computed = PRECISIONS[strategy.param_dtype]
    names = ("data", "shard") if parallel.mesh.data > 1 else ("shard",)
    how = {
        "mesh": groups.mesh(*names),
        "reshard_after_forward": None if strategy.reshard_after_forward else False,
    }
    dtypes = MixedPrecisionPolicy(
        param_dtype=computed, reduce_dtype=policy.wire_dtype or (computed and trained)
    )
    for unit in [*units, module]:
        if unit is module and computed is not None:
            dtypes = replace(dtypes, output_dtype=trained)
        cut: FSDPModule = fully_shard(unit, mp_policy=dtypes, **how)  # type: ignore[call-overload]
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        cut.set_reduce_scatter_unused_params(True)
    return LiveReplica.around(recipe, FlatModule(module, device)), layout


def _no_view(unit: nn.Module, inputs: object, output: object) -> object:
    """An operation in place, on an output that is a view of what the ranks summed, would drop what
    torch hangs on the output to gather the unit for backward."""
    return output.clone() if isinstance(output, torch.Tensor) else output


class FullySharded(Summed):
    """Gradients that ``fully_shard`` sums and scatters; see the note above."""

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SlicePlan],
        rank: int,
        spare: Batch,
        mesh: Mesh,
        team: Team,
    ) -> None:
        super().__init__(live, plans, rank, spare)
        self._mesh, self._team = mesh, team
        self._scored = team.scored
        # Torch sets a unit up when it is first called; in evaluation it would set up what cannot train
        forward_backward(live, self._spare, 0, 1.0, Clock(), share=0.0)
        live.clear_gradients()
        live.flat.refresh()

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
        """See :class:`sparkdl.train.summing.Summed`."""
        counts = [int(count) for (count,) in gathered([batches])]
        most = max(sum(counts[rank] for rank in team) for team in self._mesh.teams)
        result = self._scored(counts, score, most)
        for unit in self._live.flat.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # what is gathered once is otherwise kept, also when weights change
        return result
