"""Fully sharded replicas: torch's ``fully_shard`` around the module of a recipe.

[Note: a pass that all ranks go through together] A unit is gathered each time it is called, so all
ranks must call the same units equally often. A rank without rows uses a few spare ones. A rank with
fewer micro-batches than the others runs its last one again. A rank with fewer validation batches
runs a batch of training rows. All of these have a share of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from sparkdl.collectives.direct import DirectReduceScatter
from sparkdl.data.batches import Batch
from sparkdl.engines.gang.batchnorm import synchronise
from sparkdl.engines.gang.build_turn import Turn
from sparkdl.engines.gang.model_group import Groups, ModelGroup
from sparkdl.engines.gang.strategies.base import (
    SummedGradients,
    can_be_summed,
    first_not_finite,
    gathered_counts,
)
from sparkdl.engines.gang.strategies.tensor import parallelise
from sparkdl.model.flat import FlatModule, Layout, layout_of, local
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.options import PRECISIONS, TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.model.signature import with_tensors
from sparkdl.parallel.fsdp import units_of
from sparkdl.parallel.mesh import Mesh
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compute import MiniBatch, Passed, forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.padding_pass import idle
from sparkdl.replica.step import ReplicaIteration
from sparkdl.slices.spec import SliceSpec


def sharded(
    recipe: Recipe,
    module: nn.Module,
    parallel: ParallelPlan,
    groups: Groups,
    spare: Batch,
    device: torch.device,
    turn: Turn,
) -> tuple[LiveReplica, Layout]:
    """Shard a module over ranks.

    It is sharded unit by unit, after its layers are split, if they are.

    Args:
        recipe: The recipe of the module.
        module: The module, which has just been built on the CPU.
        parallel: The strategies. With ``cpu_offload`` the shards stay on the CPU.
        groups: The process groups of this rank.
        spare: A few rows, with which split layers are tried.
        device: The device of this rank.
        turn: The turn of this rank to build, which ends when layers are split.

    Returns:
        The replica with this rank's shards in its flat vector, and the layout of the whole model.
    """
    strategy = parallel.fsdp
    assert strategy is not None
    layout = layout_of(module)
    units = units_of(module, strategy.units)
    if parallel.tensor is not None:
        parallelise(recipe, module, parallel.tensor, groups.mesh("tensor"), spare, device, turn)
    policy = recipe.policy
    if policy.sync_batchnorm:
        synchronise(module)
    names = ("data", "shard") if parallel.mesh.data > 1 else ("shard",)
    cut_units(units, module, parallel, groups.mesh(*names), policy)
    flat = FlatModule(module, "cpu" if strategy.cpu_offload else device)
    if strategy.cpu_offload:  # only parameters are offloaded; buffers are on the module's device
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = None if buffer is None else buffer.to(device)
    return LiveReplica.around(recipe, flat, device), layout


def cut_units(
    units: Sequence[nn.Module],
    outermost: nn.Module,
    parallel: ParallelPlan,
    mesh: DeviceMesh,
    policy: TrainingOptions,
) -> None:
    """Apply ``fully_shard`` to units, and to their parent for what is in none of them.

    Args:
        units: The units.
        outermost: The module that contains them.
        parallel: The strategies.
        mesh: The ranks over which the units are sharded.
        policy: The options of training.
    """
    strategy = parallel.fsdp
    assert strategy is not None
    trained = next((p.dtype for p in outermost.parameters() if p.requires_grad), torch.float32)
    computed = PRECISIONS[strategy.param_dtype]
    # Copies of a pipeline have different numbers of micro-batches, so each step gathers once
    again = strategy.reshard_after_forward and parallel.pipeline is None
    dtypes = MixedPrecisionPolicy(
        param_dtype=computed, reduce_dtype=policy.wire_dtype or (computed and trained)
    )
    offloading = OffloadPolicy()
    if strategy.cpu_offload:
        offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for parameter in outermost.parameters():
        if local(parameter) is parameter:
            parameter.data = parameter.data.contiguous()
    for unit in dict.fromkeys([*units, outermost]):
        unit.register_forward_hook(_copied if parallel.tensor is not None else _no_view)
        if unit is outermost and computed is not None:
            dtypes = replace(dtypes, output_dtype=trained)
        cut: FSDPModule = fully_shard(  # type: ignore[call-overload]
            unit,
            mesh=mesh,
            mp_policy=dtypes,
            offload_policy=offloading,
            reshard_after_forward=None if again else False,
        )
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        cut.set_reduce_scatter_unused_params(True)
        cut.set_custom_reduce_scatter(DirectReduceScatter(idle))  # type: ignore[arg-type]


def let_go(module: nn.Module) -> None:
    """Free gathered parameters, which torch keeps after an evaluation, even if the weights change."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _no_view(unit: nn.Module, inputs: object, output: object) -> object:
    """Copy outputs that are views.

    An in-place operation on a view, such as the output of ``squeeze``, would drop the hook that
    torch attaches to the output to gather the unit for backward. Torch warns about it.
    """
    return with_tensors(output, lambda tensor: tensor.clone() if tensor._is_view() else tensor)


def _copied(unit: nn.Module, inputs: object, output: object) -> object:
    """Copy all outputs, as sums over tensor-parallel ranks are views that are not marked as such."""
    return with_tensors(output, torch.Tensor.clone)


class ShardedSync(SummedGradients):
    """Gradients that ``fully_shard`` sums and scatters. See the note above."""

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SliceSpec],
        rank: int,
        spare: Batch,
        mesh: Mesh,
        group: ModelGroup,
    ) -> None:
        super().__init__(live, plans, rank, spare)
        self._mesh, self._model_group = mesh, group
        # Torch sets a unit up at its first call; if that is an evaluation, the unit cannot train
        forward_backward(live, self._spare, 0, 1.0, Clock(), share=0.0, by_rows=True)
        live.clear_gradients()
        live.flat.refresh()

    def _pass(self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock) -> Passed:
        accumulate = self._live.recipe.policy.accumulate
        parts = min(accumulate, max(stop - start for start, stop in work.step.rows))
        scale = work.step.loss_scale
        return forward_backward(
            self._live,
            batch,
            work.seed(),
            scale,
            clock,
            share=share,
            parts=parts,
            by_rows=True,
        )

    def _not_finite(self) -> str:
        """Return the parameter whose summed gradient is not finite in this rank's rows, or ""."""
        if can_be_summed(self._vector.filled(self._gradients.dense), 1):
            return ""
        return first_not_finite(self._live, self._gradients)

    def _summed(self) -> tuple[torch.Tensor, frozenset[int]]:
        return self._vector.vector, self._gradients.absent

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        """See :class:`sparkdl.engines.gang.strategies.base.SummedGradients`."""
        counts = gathered_counts(batches)
        assert self._model_group is not None
        result = self._model_group.scored(counts, score, self._mesh.most(counts), outputs)
        let_go(self._live.flat.module)
        return result
