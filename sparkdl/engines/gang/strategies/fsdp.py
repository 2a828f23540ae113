"""Fully sharded replicas: torch's ``fully_shard`` around the module of a recipe.

[Note: a pass that all ranks go through together] A unit is gathered each time it is called, so all
ranks must call the same units equally often. A rank without rows uses a few spare ones. A rank with
fewer micro-batches than the others runs its last one again. A rank with fewer validation batches
runs a batch of training rows. All of these have a share of zero.

A parameter that is a single number has no rows to shard. Each rank has it, and its gradients are summed
after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from sparkdl.collectives.direct import DirectReduceScatter, all_reduce
from sparkdl.engines.gang.model_group import synchronise
from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy, SummedGradients
from sparkdl.model.buffers import PRECISIONS, TrainingOptions
from sparkdl.model.flat import local
from sparkdl.model.recipe import LiveReplica, with_tensors
from sparkdl.parallel.fsdp import FSDP, units_of, whole_parameters
from sparkdl.parallel.trace import TracedStage
from sparkdl.process.memory import is_scarce, memory_given_back
from sparkdl.replica.compute import MiniBatch, Passed, forward_backward, idle
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import ReplicaIteration

HEAP_SHARE = 8
"""The memory that a rank may come to hold if it keeps its heap, in multiples of the model's bytes.
Measured with Adam; see :mod:`sparkdl.process.memory`."""


class FSDPRank(RankStrategy[FSDP]):
    """A rank with shards of the model's units, or of those of its pipeline stages."""

    order = 2
    splits_rows = True

    def __init__(self, strategy: FSDP, build: Build) -> None:
        super().__init__(strategy, build)
        self._units = units_of(build.module, strategy.units)

    def split(self, build: Build) -> None:
        options, mesh, piped = build.recipe.options, build.mesh, "pipe" in build.parallel.parts
        if options.sync_batchnorm:
            synchronise(build.module)
        if self._strategy.cpu_offload:
            build.home = torch.device("cpu")
        # the copies of a pipeline sum their gradients once for all its micro-batches
        names = ("data", "shard") if mesh.data > 1 and not piped else ("shard",)
        shown = _copied if "tensor" in build.parallel.parts else _no_view
        for outermost in build.outermost:
            self._shard(outermost, build.groups.mesh(*names), options, piped, shown)
            for child in outermost.modules():
                if isinstance(child, TracedStage):
                    child.hand_back()

    def _shard(
        self,
        outermost: nn.Module,
        mesh: DeviceMesh,
        options: TrainingOptions,
        piped: bool,
        shown: Callable[..., object],
    ) -> None:
        """Apply ``fully_shard`` to units, and to their parent for what is in none of them."""
        strategy, inside = self._strategy, {id(child) for child in outermost.modules()}
        trained = next((p.dtype for p in outermost.parameters() if p.requires_grad), torch.float32)
        computed = PRECISIONS[strategy.param_dtype]
        # Copies of a pipeline have different numbers of micro-batches, so each step gathers once
        again = strategy.reshard_after_forward and not piped
        dtypes = MixedPrecisionPolicy(
            param_dtype=computed, reduce_dtype=options.wire_dtype or (computed and trained)
        )
        offloading = OffloadPolicy()
        if strategy.cpu_offload:
            offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        for parameter in outermost.parameters():
            if local(parameter) is parameter:
                parameter.data = parameter.data.contiguous()
        whole = set(whole_parameters(outermost))
        units = [unit for unit in self._units if id(unit) in inside]
        for unit in dict.fromkeys([*units, outermost]):
            unit.register_forward_hook(shown)
            if unit is outermost and computed is not None:
                dtypes = replace(dtypes, output_dtype=trained)
            cut: FSDPModule = fully_shard(  # type: ignore[call-overload]
                unit,
                mesh=mesh,
                mp_policy=dtypes,
                offload_policy=offloading,
                reshard_after_forward=None if again else False,
                ignored_params=whole,
            )
            cut.set_gradient_divide_factor(1.0)
            cut.set_force_sum_reduction_for_comms(True)
            cut.set_reduce_scatter_unused_params(True)
            cut.set_custom_reduce_scatter(DirectReduceScatter(idle))  # type: ignore[arg-type]

    def finish(self, build: Build) -> None:
        """Give back freed memory for good if it is scarce."""
        here = [each.node_id for each in build.samples].count(build.samples[build.rank].node_id)
        if is_scarce(HEAP_SHARE * build.whole.nbytes // build.mesh.pipe, here):
            build.member.at_end.enter_context(memory_given_back())
        if build.mesh.place(build.rank, "shard"):
            whole = set(whole_parameters(build.live.flat.module))
            parameters = enumerate(build.live.flat.parameters)
            repeated = frozenset(number for number, (_, p) in parameters if p in whole)
            build.shards = replace(build.shards, repeated=build.shards.repeated | repeated)

    def gradients(self, build: Build) -> GradientSync:
        return ShardedSync(build)


def numbers_of(live: LiveReplica) -> list[nn.Parameter]:
    """Return the parameters that are a single number."""
    return [p for _, p in live.flat.parameters if not p.ndim]


def sum_whole(live: LiveReplica, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Sum the gradients of the parameters that are a single number over each of ``groups`` in turn."""
    whole = numbers_of(live)
    if not whole:
        return
    sums = torch.zeros(2, len(whole), dtype=whole[0].dtype, device=live.device)
    for number, parameter in enumerate(whole):
        if parameter.grad is not None and not idle():  # which may be no number
            sums[0, number], sums[1, number] = parameter.grad, 1.0
    for group in groups:
        if group is not None:
            all_reduce(sums, group)
    for parameter, total, count in zip(whole, *sums, strict=True):
        parameter.grad = total.clone() if count else None


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

    _sums, _gathers = False, True

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._model_group = build.model_group()
        self._whole = [build.groups.along(name) for name in ("shard", "data")]
        live = build.live
        # Torch sets a unit up at its first call; if that is an evaluation, the unit cannot train
        forward_backward(live, self._spare, 0, 1.0, Clock(), share=0.0, by_rows=True)
        live.clear_gradients()
        live.flat.refresh()

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        accumulate = self._live.recipe.options.accumulate
        parts = min(accumulate, max(stop - start for start, stop in work.step.rows))
        passed = super().run_pass(work, batch, share, clock, parts)
        sum_whole(self._live, self._whole)
        self._factor = 1.0  # sums, which other ranks' rows are part of
        return passed

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        result = super().scored(batches, score, outputs)
        let_go(self._live.flat.module)
        return result
