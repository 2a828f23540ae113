"""The construction of a rank's state and of its gradient exchange, from the strategies of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.engines.gang.model_group import BuildLock, MeshGroups, synchronise
from sparkdl.engines.gang.rank_messages import RankConfig, SampleLocation
from sparkdl.engines.gang.rank_state import RankState, ReplicatedState
from sparkdl.engines.gang.shards import ShardedState, ShardSpec, spans_of
from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy, rank_half
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.flat import FlatModule, layout_of
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.process.memory import keep_heap, memory_given_back
from sparkdl.slab.root import open_root


def build_rank(
    load: Callable[[], Recipe],
    setup: RankConfig,
    samples: Sequence[SampleLocation],
    member: RankContext,
) -> tuple[RankState, GradientSync]:
    """Build the replica; return the state that this rank holds and the exchange of its gradients.

    Raises ModelError if the layers cannot be split as the plan says, and SessionError if a model
    that is split so cannot run on these devices.
    """
    keep_heap()
    build = Build(setup=setup, samples=samples, member=member)
    halves = _split(build, load) if setup.parallel.splits_model else _replicate(build, load)
    found = (halves[dimension].gradients(build) for dimension in setup.parallel.parts)
    return build.state, next(sync for sync in found if sync is not None)


def _halves(build: Build) -> dict[str, RankStrategy[Any]]:
    """Return this half of each strategy, by dimension, in the order in which they split the model."""
    pairs = [(rank_half(part), part) for part in build.parallel.parts.values()]
    pairs.sort(key=lambda pair: pair[0].order)
    return {part.dimension: half(part, build) for half, part in pairs}


def _replicate(build: Build, load: Callable[[], Recipe]) -> dict[str, RankStrategy[Any]]:
    """Build the whole model on this rank."""
    recipe = load()
    build.live = LiveReplica.of(recipe, build.device)
    if recipe.options.sync_batchnorm:
        synchronise(build.live.flat.module)
    build.state = ReplicatedState(build.live, build.setup.run, build.rank)
    return _halves(build)


def _split(build: Build, load: Callable[[], Recipe]) -> dict[str, RankStrategy[Any]]:
    """Build the model, one rank of a node at a time, and keep what the strategies leave this rank."""
    run, device = build.setup.run, build.device
    build.groups = MeshGroups(build.parallel, device)
    root = open_root(run.slab)
    assert root is not None
    with memory_given_back(), BuildLock(root.directories[-1]) as build.lock:
        recipe = load()
        build.module = recipe.build()
        build.recipe = recipe = recipe.without_weights()  # the module has them
        whole = build.whole = layout_of(build.module, recipe.options.buffers)
        every = frozenset(range(len(whole.segments)))
        build.outermost, build.home, build.numbers = [build.module], device, lambda rank: every
        halves = _halves(build)
        for half in halves.values():
            half.split(build)
        flat = FlatModule(build.module, build.home, recipe.options.buffers)
        if build.home != device:  # of the parameters alone
            for owner in build.module.modules():
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else buffer.to(device)
        build.live = LiveReplica.around(recipe, flat, device)
    build.row_dimensions = tuple(d for d in build.parallel.parts if halves[d].splits_rows)
    build.shards = ShardSpec(
        build.live,
        whole,
        build.mesh,
        lambda rank: spans_of(whole, build.rows(rank), build.numbers(rank)),
    )
    for half in halves.values():
        half.finish(build)
    build.state = ShardedState(build.shards, run, build.rank)
    return halves
