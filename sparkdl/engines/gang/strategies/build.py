"""The construction of a rank's state and of its gradient exchange, from the strategies of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from sparkdl.engines.gang.batchnorm import synchronise
from sparkdl.engines.gang.build_turn import Turn
from sparkdl.engines.gang.model_group import Groups, ModelGroup, NodeLocalRows
from sparkdl.engines.gang.rank_messages import RankConfig, SampleLocation
from sparkdl.engines.gang.rank_state import RankState, ReplicatedState, ShardedState, ShardSpec
from sparkdl.engines.gang.shards import RowsOf, nested_shards, spans_of
from sparkdl.engines.gang.strategies.base import SummedGradients
from sparkdl.engines.gang.strategies.ddp import BucketedDDP, FlatAllReduce
from sparkdl.engines.gang.strategies.sections import SectionExchange
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.tensor import without_fused_layers
from sparkdl.process.memory import is_scarce, keep_heap, memory_given_back
from sparkdl.replica.gradient_writer import writes_early
from sparkdl.replica.run import RunSpec
from sparkdl.replica.step import to_mini_batch
from sparkdl.slab.root import open_root

Built = tuple[RankState, SummedGradients | SectionExchange]
HEAP_SHARE = 8
"""The memory that a rank under "fsdp" may come to hold if it keeps its heap, in multiples of the
model's bytes. Measured with Adam; see :mod:`sparkdl.process.memory`."""


def hold(
    load: Callable[[], Recipe],
    setup: RankConfig,
    samples: Sequence[SampleLocation],
    member: RankContext,
) -> Built:
    """Build the replica, and return the state that this rank holds and the exchange of its gradients.

    Args:
        load: Reads the recipe.
        setup: The configuration of the rank.
        samples: The sample locations of all ranks.
        member: The context of the rank.

    Raises:
        sparkdl.ModelError: If the layers cannot be split as the plan says.
        sparkdl.SessionError: If a model that is split so cannot run on these devices.
    """
    keep_heap()
    run, parallel, spare = setup.run, setup.parallel, setup.spare
    if parallel.cuts:
        return _cut(load, setup, samples, member)
    recipe = load()
    live = LiveReplica.of(recipe, member.device)
    if recipe.policy.sync_batchnorm:
        synchronise(live.flat.module)
    held = ReplicatedState(live, run, member.rank)
    if not writes_early(live):
        return held, SectionExchange(live, held.slices, held.owners, member.rank)
    plans = [held.slices[n] for n in held.owners]
    if FlatAllReduce.suits(live, parallel.ddp):
        return held, FlatAllReduce(live, plans, member.rank, spare)
    return held, BucketedDDP(live, plans, member.rank, spare, parallel.ddp)


def _cut(
    load: Callable[[], Recipe],
    setup: RankConfig,
    samples: Sequence[SampleLocation],
    member: RankContext,
) -> Built:
    """Split the model into stages, units or layers, or several of these."""
    from sparkdl.engines.gang.strategies.fsdp import ShardedSync, sharded
    from sparkdl.engines.gang.strategies.pipeline import PipelineSync
    from sparkdl.engines.gang.strategies.pipeline_stages import staged
    from sparkdl.engines.gang.strategies.tensor import TensorSync, cut_by_layer, repeated
    from sparkdl.engines.gang.tensor_rows import RowLayout

    run, parallel, spare = setup.run, setup.parallel, setup.spare
    rank, mesh, device = member.rank, parallel.mesh, member.device
    groups, at_end = Groups(parallel, device), member.at_end
    seats = None
    if parallel.tensor is not None:
        at_end.enter_context(without_fused_layers())
    root = open_root(run.slab)
    assert root is not None
    with memory_given_back(), Turn(root.directories[-1]) as turn:
        recipe = load()
        module = recipe.build()
        recipe = recipe.without_weights()  # the module has them
        if parallel.pipeline is not None:
            made = staged(recipe, module, parallel, groups, rank, spare, device, turn)
            live, whole, seats = made.live, made.whole, made.seats
        elif parallel.fsdp is not None:
            live, whole = sharded(recipe, module, parallel, groups, spare, device, turn)
        else:
            assert parallel.tensor is not None
            layers = groups.mesh("tensor")
            how = parallel.tensor
            live, whole = cut_by_layer(recipe, module, how, layers, spare, device, turn)
    if parallel.fsdp is not None:
        here = [each.token for each in samples].count(samples[rank].token)
        if is_scarce(HEAP_SHARE * whole.nbytes // mesh.pipe, here):
            at_end.enter_context(memory_given_back())
    names = [name for name in ("shard", "tensor") if name in parallel.parts]
    every = frozenset(range(len(whole.segments)))

    def rows(r: int) -> RowsOf:
        return nested_shards([(mesh.sizes[name], mesh.place(r, name)) for name in names])

    def numbers(r: int) -> frozenset[int]:
        return every if seats is None else seats.numbers(r)

    cut = ShardSpec(live, whole, mesh, lambda r: spans_of(whole, rows(r), numbers(r)))
    if parallel.tensor is not None:
        turned = RowLayout(live, whole, groups.mesh(*names), rows(rank), numbers(rank))
        part = mesh.place(rank, "tensor")
        cut = replace(cut, turned=turned, repeated=repeated(live, groups.mesh("tensor"), part))
    if parallel.ddp.shard_optimizer and mesh.data > 1:
        cut = replace(cut, update_group=mesh.along(rank, "data"), group=groups.along("data"))
    held = ShardedState(cut, run, rank)
    plans = [owner.plan for owner in held.owners.values()]
    near = NodeLocalRows(samples, rank, mesh.model_group(rank), run, live)
    if parallel.pipeline is not None:
        carrier = _carrier(groups.along("pipe"), mesh.along(rank, "pipe"), samples, run, device)
        pipeline = parallel.pipeline
        return held, PipelineSync(made, plans, rank, spare, pipeline, groups, near, carrier)
    like = to_mini_batch(spare, live, training=False)
    group = ModelGroup(mesh, rank, groups.along("tensor"), live, like, near)
    if parallel.fsdp is not None:
        return held, ShardedSync(live, plans, rank, spare, mesh, group)
    return held, TensorSync(live, plans, rank, spare, group, groups.along("data"))


def _carrier(
    pipe: dist.ProcessGroup | None,
    members: Sequence[int],
    samples: Sequence[SampleLocation],
    run: RunSpec,
    device: torch.device,
) -> dist.ProcessGroup | None:
    """Return the process group that carries messages between the stages of a pipeline."""
    from sparkdl.engines.gang.strategies.pipeline_messages import near_group

    together = len({samples[r].token for r in members}) == 1
    on_cpu = device.type == "cpu" and hasattr(os, "memfd_create")  # only Linux has it
    if pipe is None or len(members) == 1 or not (together and on_cpu):
        return pipe
    root = open_root(run.slab)
    assert root is not None
    return near_group(members, pipe, root.directories[-1])
