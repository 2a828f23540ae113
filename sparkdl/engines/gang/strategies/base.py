"""Strategies of a gang, on the ranks: what each does to the model and to the sum of gradients.

See [Note: the two halves of a strategy] in :mod:`sparkdl.parallel.base`.

:func:`build_rank` makes a rank's state and its gradient exchange from the strategies of the run.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from sparkdl.codec.packed import ByParameter
from sparkdl.data.batches import Batch
from sparkdl.engines.gang.model_group import (
    BuildLock,
    MeshGroups,
    ModelGroup,
    NodeLocalRows,
    synchronise,
)
from sparkdl.engines.gang.rank_messages import RankConfig, SampleLocation
from sparkdl.engines.gang.rank_state import RankState
from sparkdl.engines.gang.shards import RowsOf, ShardedState, ShardSpec, nested_shards, spans_of
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.flat import FlatModule, Layout, layout_of
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.parallel.base import Mesh, ParallelStrategy
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.memory import keep_heap, memory_given_back
from sparkdl.replica.compute import Losses, MiniBatch
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import ReplicaIteration, to_mini_batch
from sparkdl.slab.root import open_root
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec


class RankPass(NamedTuple):
    """The part of a rank in an iteration."""

    work: ReplicaIteration
    batches: Sequence[MiniBatch]  # at most one for each step that the rank takes; none without rows
    weights: Sequence[float]  # of each rank's rows
    clock: Clock


class GradientSync(ABC):
    """The work of rank ``rank`` on the gradients of an iteration.

    Attributes:
        kept: The tensors that the rank keeps for the next iteration, by parameter number: what
            compression has left out of the gradients so far, or the state of its own optimizer.
            None if there are none.
        count: The weight of the rank's rows in the last pass. For a loss that returns ``(sum,
            count)`` it is known only after the pass.
        losses: Sum and count of each named loss of a step, in the rank's rows of the last pass.
        steps: The number of mini-batches into which the rows of an iteration are divided, one for
            each step that the rank takes by itself.
        ends_before_report: Whether the report of the rank needs the end of the update. If not, the
            driver prepares the next iteration meanwhile.
    """

    steps: int = 1
    ends_before_report: bool = False

    def __init__(self, rank: int) -> None:
        self._rank, self.count = rank, 0.0
        self._kept: ByParameter | None = None
        self.losses: Losses = {}

    @property
    def kept(self) -> ByParameter | None:
        return self._kept

    def place_kept(self, kept: ByParameter | None) -> None:
        """Continue with what a rank had kept."""
        self._kept = kept

    @abstractmethod
    def compute(self, rank_pass: RankPass) -> tuple[float, str]:
        """Run forward and backward on the rows of ``rank_pass``.

        Returns:
            The loss, and a description of what is not finite, or "".
        """

    @abstractmethod
    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections from which each of this rank's slices is updated, by slice index.

        A slice that is not among them stays as it is.

        Args:
            rows: The rows of each rank.
            weights: The final weight of each rank's rows.
        """

    def committed(self) -> None:
        """Note that the iteration was committed, for what is kept for the next one."""
        return

    def settle(self) -> None:
        """Prepare the state for being read. All ranks call this at the same time."""
        return

    @property
    def loss_rank(self) -> int:
        """Return the rank that knows the loss of this rank's samples."""
        return self._rank

    def scored(self, batches: int, score: Callable[[], Any], outputs: bool = False) -> Any:
        """Return the result of ``score`` for this rank's ``batches`` of the validation samples.

        ``outputs`` says that after a step ``score`` also runs the model itself, for metrics.
        """
        return score()


@dataclass(kw_only=True)
class Build:
    """The parts of a rank, from the recipe to its state, which the strategies assemble in turn.

    What comes after ``state`` is there only if the model is split.
    """

    setup: RankConfig
    samples: Sequence[SampleLocation]  # of all ranks; empty if the model is not split
    member: RankContext
    rank: int = field(init=False)
    device: torch.device = field(init=False)
    parallel: ParallelPlan = field(init=False)
    mesh: Mesh = field(init=False)
    spare: Batch = field(init=False)
    live: LiveReplica = field(init=False)
    state: RankState = field(init=False)
    groups: MeshGroups = field(init=False)
    lock: BuildLock = field(init=False)  # nothing may be sent before it is released
    recipe: Recipe = field(init=False)  # without weights
    module: nn.Module = field(init=False)  # split in place
    whole: Layout = field(init=False)
    outermost: list[nn.Module] = field(init=False)
    home: torch.device = field(init=False)
    numbers: Callable[[int], frozenset[int]] = field(init=False)
    row_dimensions: tuple[str, ...] = field(init=False)  # of the mesh, the outermost first
    shards: ShardSpec = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.device = self.member.rank, self.member.device
        self.parallel, self.spare = self.setup.parallel, self.setup.spare
        self.mesh = self.parallel.mesh

    @property
    def plans(self) -> list[SliceSpec]:
        """Return the slices that this rank updates."""
        return [owner.plan for owner in self.state.owners.values()]

    def rows(self, rank: int) -> RowsOf:
        """Return the rows that a rank has of the parameters in ``numbers``."""
        sizes, place = self.mesh.sizes, self.mesh.place
        return nested_shards([(sizes[name], place(rank, name)) for name in self.row_dimensions])

    def near_rows(self) -> NodeLocalRows:
        """Return the rows of other ranks of the model-parallel group that this rank can read."""
        group, run = self.mesh.model_group(self.rank), self.setup.run
        return NodeLocalRows(self.samples, self.rank, group, run, self.live)

    def model_group(self) -> ModelGroup:
        """Return the model-parallel group of a rank without pipeline stages."""
        like, near = to_mini_batch(self.spare, self.live, training=False), self.near_rows()
        group = self.groups.along("tensor")
        return ModelGroup(self.mesh, self.rank, group, self.live, like, near)


S = TypeVar("S", bound=ParallelStrategy)


class RankStrategy(Generic[S]):
    """The half of a strategy that works on a rank.

    It is made when the module is built, and whole if it is to be split. Only if it is split, then
    follow :meth:`split` and :meth:`finish`, of all strategies in their ``order``. At last the
    outermost strategy that sums gradients says how.

    Attributes:
        order: The position of the strategy among those that split a model.
        splits_rows: Whether it leaves a rank some rows of each parameter.
    """

    order: ClassVar[int] = 0
    splits_rows: ClassVar[bool] = False

    def __init__(self, strategy: S, build: Build) -> None:
        self._strategy = strategy

    def split(self, build: Build) -> None:
        """Split ``build.module``, or what earlier strategies have left of it, in place."""

    def finish(self, build: Build) -> None:
        """Go on with the replica ``build.live``, and complete ``build.shards``."""

    def gradients(self, build: Build) -> GradientSync | None:
        """Return how the ranks sum their gradients, or None to leave that to an inner strategy."""
        return None


def rank_half(strategy: ParallelStrategy) -> type[RankStrategy[Any]]:
    """Return the class that a strategy names as its half on the ranks."""
    found: type[RankStrategy[Any]] = pkgutil.resolve_name(strategy.rank_half)
    return found


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
    build.state = RankState(build.live, build.setup.run, build.rank)
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
